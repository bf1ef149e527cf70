"""Build optimizers and parameter groups by name; `update` sets their rates.

The few values of biases and normalization layers set scales and offsets. Weight decay, which pulls
them to zero, or a trust ratio, which moves them in proportion to their norm, costs accuracy at
large batch sizes: Goyal et al. 2017 (arXiv 1706.02677); You, Gitman and Ginsburg 2017
(arXiv 1708.03888). `Muon` orthogonalizes matrices, which these are not; nor are embeddings, of
which a batch uses some rows only. Every group can have a rate of its own: a schedule's rate times
the group's `lr_multiplier` (`update.set_lr`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from schedulefree import AdamWScheduleFree, SGDScheduleFree
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.optim import Optimizer

from raytrain_opt.config.error_messages import nearest
from raytrain_opt.config.load import resolve_function
from raytrain_opt.config.section import is_function_name
from raytrain_opt.config.updates import OptimizerSection
from raytrain_opt.errors import JobError, Problem, listed
from raytrain_opt.optim.batched import has_fused_kernels, is_dense
from raytrain_opt.optim.large_batch import LARS, RMSpropWarmup
from raytrain_opt.optim.muon import Muon, without_batch
from raytrain_opt.optim.update import set_lr

_NORMALIZATION = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
EMBEDDING = (nn.Embedding, nn.EmbeddingBag)


def parameter_groups(
    model: nn.Module,
    *,
    exclude_bias_and_norm: bool,
    lr_multipliers: Mapping[str, float] | None = None,
    use_muon: bool = False,
) -> list[dict[str, Any]]:
    """Return all parameters of `model` in groups for an optimizer, shared ones once.

    With `exclude_bias_and_norm`, all parameters of normalization layers and those of fewer than
    two dimensions get `weight_decay` 0 and `adapt` False (which `LARS` reads and other optimizers
    ignore); their groups come last. `lr_multipliers`: factors of the rate, by patterns of
    parameter names (`fc.*`); the first that matches counts. With `use_muon`, a group's `use_muon`
    says whether its parameters are matrices of at least two rows and columns, outside of
    embeddings and normalization layers; learned positions [1, length, width] are.

    Raises JobError for a pattern that matches no parameter.
    """
    multipliers = lr_multipliers or {}
    in_norm = _parameters_of(model, _NORMALIZATION)
    in_embedding = _parameters_of(model, EMBEDDING)
    in_convolution = _parameters_of(model, (_ConvNd,))
    unmatched, names_of = dict.fromkeys(multipliers), dict[int, list[str]]()
    for name, param in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(param), []).append(name)
    groups: dict[tuple[tuple[str, Any], ...], list[nn.Parameter]] = {}
    for param in model.parameters():
        settings: dict[str, Any] = {}
        if exclude_bias_and_norm and (param.dim() < 2 or id(param) in in_norm):
            settings |= {"weight_decay": 0.0, "adapt": False}
        if use_muon:
            matrix = param if id(param) in in_convolution else without_batch(param)
            settings["use_muon"] = (
                matrix.dim() >= 2
                and min(len(matrix), matrix[0].numel()) >= 2
                and id(param) not in in_norm | in_embedding
            )
        names = names_of[id(param)]  # several of a tied one
        if patterns := [p for p in multipliers if any(fnmatchcase(n, p) for n in names)]:
            settings["lr_multiplier"] = multipliers[patterns[0]]
        for pattern in patterns:
            unmatched.pop(pattern, None)
        groups.setdefault(tuple(settings.items()), []).append(param)
    for pattern in unmatched:
        first = ", ".join(names[0] for names in [*names_of.values()][:3])
        rule = f"{pattern!r} matches no parameter of this model ({first}, ...)"
        raise JobError([Problem("optimizer", rule)])
    excluded_last = sorted(groups.items(), key=lambda item: ("adapt", False) in item[0])
    return [{"params": params, **dict(settings)} for settings, params in excluded_last]


def _parameters_of(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> set[int]:
    modules = (module for module in model.modules() if isinstance(module, kinds))
    return {id(param) for module in modules for param in module.parameters(recurse=False)}


_CLASSES: dict[str, Any] = {
    **{
        name: value
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, Optimizer)
    },
    "LARS": LARS,
    "Muon": Muon,
    "RMSpropWarmup": RMSpropWarmup,
    "ScheduleFreeAdamW": AdamWScheduleFree,
    "ScheduleFreeSGD": SGDScheduleFree,
}
# Gradients are dense here, and Rprop uses the rate for its first step only.
for _name in ("Optimizer", "Rprop", "SparseAdam"):
    del _CLASSES[_name]
# What torch says of a class that takes its arguments.
_NO_PARAMETERS = "optimizer got an empty parameter list"
# Until the first rate is set: some classes refuse 0.
_INITIAL_LR = 1e-3


def check_step(name: str, step: Callable[..., object]) -> list[Problem]:
    """Return a problem if an optimizer's step needs arguments, as the closure of LBFGS."""
    parameters = [p for p in inspect.signature(step).parameters.values() if p.name != "self"]
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in variable]
    if not needed:
        return []
    rule = f"cannot train here: its step() requires {', '.join(needed)}"
    hint = "the loop computes the gradients and then calls step() without arguments"
    return [Problem("optimizer.name", rule, name, hint)]


def check_optimizer(section: OptimizerSection) -> list[Problem]:
    """Return all problems of the section, of values by constructing without parameters."""
    try:
        optimizer_class = _resolve_class(section.name)
    except JobError as error:
        return error.problems
    args = section.constructor_args
    problems = check_step(optimizer_class.__name__, optimizer_class.step)
    if problems := problems or _check_arguments(optimizer_class, args):
        return problems
    # A class of the user's that requires an argument rejects none at all for the same reason.
    message = _rejection(optimizer_class, args)
    if message in (None, _NO_PARAMETERS, _rejection(optimizer_class, {})):
        return []
    rule = f"{optimizer_class.__name__} rejects it: {message}"
    return [Problem("optimizer.args", rule, repr(args))]


def build_optimizer(
    section: OptimizerSection, model: nn.Module, *, steps_per_epoch: int, distributed: bool = False
) -> Optimizer:
    """Build the optimizer of `model`'s parameters, at learning rate 0; see `set_lr`.

    `distributed`: all ranks of the default process group take each step together. Unless the
    arguments choose an implementation, it is the fused one where class and parameters allow it,
    else foreach. Raises JobError: `check_optimizer` finds a problem, or the class rejects these
    parameters.
    """
    if problems := check_optimizer(section):
        raise JobError(problems)
    optimizer_class = _resolve_class(section.name)
    args = {
        **_default_implementation(optimizer_class, section.constructor_args, model),
        **section.constructor_args,
        **_implied_arguments(optimizer_class, steps_per_epoch, distributed),
    }
    groups = group_parameters(section, model)
    try:
        optimizer: Optimizer = optimizer_class(groups, lr=_INITIAL_LR, **args)
    except Exception as error:  # a user's class may raise anything
        message = str(error) or type(error).__name__
        rule = f"{section.name} rejects this model's parameters: {message}"
        raise JobError([Problem("optimizer", rule)]) from error
    _require_all_parameters(optimizer, model)
    set_lr(optimizer, 0.0)
    return optimizer


def _require_all_parameters(optimizer: Optimizer, model: nn.Module) -> None:
    """Raise JobError for a parameter that trains, but that the optimizer does not know."""
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    named = model.named_parameters()
    if unknown := [name for name, p in named if p.requires_grad and id(p) not in known]:
        rule = f"{type(optimizer).__name__} does not train parameters: {listed(unknown)}"
        hint = (
            "a network must create its parameters when it is built, and an optimizer take all its "
            "groups; list those that shall not train in model.freeze"
        )
        raise JobError([Problem("optimizer.name", rule, None, hint)])


def group_parameters(section: OptimizerSection, model: nn.Module) -> list[dict[str, Any]]:
    """Return the optimizer's `parameter_groups`. Raises JobError for an unmatched pattern."""
    return parameter_groups(
        model,
        exclude_bias_and_norm=section.excludes_bias_and_norm,
        lr_multipliers=section.lr_multipliers,
        use_muon=section.traits.second_rule,
    )


def _resolve_class(name: str | Callable[..., Any]) -> Any:
    """Return the class of this name, or the user's. Raises JobError if it is no optimizer."""
    if not is_function_name(name):
        if name not in _CLASSES:
            valid = sorted(_CLASSES)
            hint = nearest(str(name), valid, n=2) or f"valid: {', '.join(valid)}"
            rule = (
                "must be a class of torch.optim (not Rprop or SparseAdam), LARS, Muon, "
                "RMSpropWarmup, ScheduleFreeSGD, ScheduleFreeAdamW, or package.module:Class"
            )
            raise JobError([Problem("optimizer.name", rule, repr(name), hint)])
        return _CLASSES[str(name)]
    own = resolve_function(name, "optimizer.name")
    if not (isinstance(own, type) and issubclass(own, Optimizer)):
        rule = "must be a class derived from torch.optim.Optimizer"
        raise JobError([Problem("optimizer.name", rule, repr(name))])
    return own


def _implied_arguments(
    optimizer_class: type[Optimizer], steps_per_epoch: int = 1, distributed: bool = False
) -> dict[str, Any]:
    """Return the arguments that follow from the rest of the job."""
    if optimizer_class is Muon:
        return {"distributed": distributed}
    return {"steps_per_epoch": steps_per_epoch} if optimizer_class is RMSpropWarmup else {}


def _default_implementation(
    optimizer_class: type[Optimizer], args: dict[str, Any], model: nn.Module
) -> dict[str, Any]:
    if {"foreach", "fused"} & args.keys():
        return {}
    parameters = inspect.signature(optimizer_class).parameters
    if "fused" in parameters and all(
        _can_be_fused(optimizer_class, parameter) for parameter in model.parameters()
    ):
        return {"fused": True}
    implied = {"foreach": True} if "foreach" in parameters else {}
    on_gpu = any(parameter.device.type == "cuda" for parameter in model.parameters())
    if on_gpu and optimizer_class is torch.optim.ASGD:
        implied["capturable"] = True  # without it, it waits for the device twice per parameter
    return implied


def _can_be_fused(optimizer_class: type[Optimizer], parameter: Tensor) -> bool:
    """Return whether torch's fused kernels, which ignore strides, can update a parameter."""
    # Autograd gives the gradient the parameter's strides only if its elements fill their memory.
    is_usual = is_dense(parameter) and parameter.is_floating_point()
    # Some versions of torch, 2.11 among them, refuse Adagrad's on GPUs.
    is_refused = optimizer_class is torch.optim.Adagrad and parameter.device.type != "cpu"
    return is_usual and not is_refused and has_fused_kernels(parameter)


def _check_arguments(optimizer_class: type[Optimizer], args: dict[str, Any]) -> list[Problem]:
    parameters = inspect.signature(optimizer_class).parameters
    reserved = {"lr", "warmup_steps", *_implied_arguments(optimizer_class)}
    valid = [key for key in parameters if key != "params" and key not in reserved]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    problems = []
    for key in args:
        path = f"optimizer.args.{key}"
        if key in reserved:
            rule = "follows from the job: from learning_rate, its warmup, or the workers"
            problems.append(Problem(path, rule))
        elif key not in valid and not takes_any:
            hint = nearest(key, valid) or f"valid arguments: {', '.join(valid)}"
            rule = f"{optimizer_class.__name__} has no such argument"
            problems.append(Problem(path, rule, None, hint))
    return problems


def _rejection(optimizer_class: Any, args: dict[str, Any]) -> str | None:
    """Return the class's error for these arguments and no parameters; None if it has none."""
    # A real parameter would make torch import its compiler: 3 s that a check must not cost.
    try:
        optimizer_class([], lr=_INITIAL_LR, **args, **_implied_arguments(optimizer_class))
    except Exception as error:  # noqa: BLE001 - a user's class may raise anything
        return str(error) or type(error).__name__
    return None
