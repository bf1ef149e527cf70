"""Parameter groups: what each parameter needs of weight decay, trust ratio, rule and rate.

The few values of biases and normalization layers set scales and offsets. Weight decay, which pulls
them to zero, or a trust ratio, which moves them in proportion to their norm, costs accuracy at
large batch sizes: Goyal et al. 2017 (arXiv 1706.02677); You, Gitman and Ginsburg 2017
(arXiv 1708.03888). `Muon` orthogonalizes matrices, which these are not; nor are embeddings, of
which a batch uses some rows only. Every group can have a rate of its own: a schedule's rate times
the group's `lr_multiplier` (`scaled_lr`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

_NORMALIZATION = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
EMBEDDING = (nn.Embedding, nn.EmbeddingBag)


def scaled_lr(group: Mapping[str, Any], lr: float) -> float:
    """Return the rate of a parameter group when a schedule's rate is `lr`."""
    return lr * float(group.get("lr_multiplier", 1.0))


def parameter_groups(
    model: nn.Module,
    *,
    exclude_bias_and_norm: bool,
    lr_multipliers: Mapping[str, float] | None = None,
    use_muon: bool = False,
    aux_parameters: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Return all parameters of `model` in groups for an optimizer, shared ones once.

    With `exclude_bias_and_norm`, all parameters of normalization layers and those of fewer than
    two dimensions get `weight_decay` 0 and `adapt` False (which `LARS` reads and other optimizers
    ignore); their groups come last. `lr_multipliers`: factors of the rate, by patterns of
    parameter names (`fc.*`); the first that matches counts. With `use_muon`, a group's `use_muon`
    says whether its parameters are matrices of at least two rows and columns, without those of
    embeddings and normalization layers, and without those whose names match `aux_parameters`.

    Raises ValueError for a pattern that matches no parameter.
    """
    multipliers = lr_multipliers or {}
    _check_patterns([*multipliers, *aux_parameters], model)
    in_norm = _parameters_of(model, _NORMALIZATION)
    in_embedding = _parameters_of(model, EMBEDDING)
    groups: dict[tuple[tuple[str, Any], ...], list[nn.Parameter]] = {}
    for name, param in model.named_parameters():
        settings: dict[str, Any] = {}
        if exclude_bias_and_norm and (param.dim() < 2 or id(param) in in_norm):
            settings |= {"weight_decay": 0.0, "adapt": False}
        if use_muon:
            settings["use_muon"] = (
                param.dim() >= 2
                and min(len(param), param[0].numel()) >= 2
                and id(param) not in in_norm | in_embedding
                and not any(fnmatchcase(name, pattern) for pattern in aux_parameters)
            )
        factors = [f for pattern, f in multipliers.items() if fnmatchcase(name, pattern)]
        if factors:
            settings["lr_multiplier"] = factors[0]
        groups.setdefault(tuple(settings.items()), []).append(param)
    excluded_last = sorted(groups.items(), key=lambda item: ("adapt", False) in item[0])
    return [{"params": params, **dict(settings)} for settings, params in excluded_last]


def _parameters_of(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> set[int]:
    modules = (module for module in model.modules() if isinstance(module, kinds))
    return {id(param) for module in modules for param in module.parameters(recurse=False)}


def _check_patterns(patterns: Sequence[str], model: nn.Module) -> None:
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            some = ", ".join(names[:3])
            raise ValueError(f"{pattern!r} matches no parameter of this model ({some}, ...)")
