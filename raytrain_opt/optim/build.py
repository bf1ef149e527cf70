"""Optimizers by name, torch's and ours. Their learning rate belongs to the training loop."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from raytrain_opt.config.optimizer import OptimizerSection
from raytrain_opt.errors import JobError, Problem

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

_UNFIT = {
    "LBFGS": "evaluates the loss several times a step through a closure; this loop has one pass",
    "SparseAdam": "needs sparse gradients; those of a data-parallel model are dense",
    "Rprop": "uses the learning rate for its first step only, so no policy could steer it",
    "Muon": "updates matrices only and refuses convolutions, biases and normalisation",
}
_UNFIT_ARGS = {
    "lr": "is set by the learning-rate policy: use learning_rate.initial",
    "differentiable": "is for differentiating through an update, which this loop does not do",
}


# Of RMSpropWarmup: its times are epochs in a job, the paper's where none are given.
_EPOCHS = {"center_epochs": 10.0, "period_epochs": 5.0}


def check_optimizer(section: OptimizerSection) -> list[Problem]:
    """Every problem of the section: unknown class or argument, values the class refuses.

    The class is tried on one small parameter, so its own checks speak. Imports torch.
    """
    classes = _classes()
    if section.name not in classes:
        return [_unknown_class(section.name, sorted(set(classes) - set(_UNFIT)))]
    if section.name in _UNFIT:
        rule = f"cannot train here: {section.name} {_UNFIT[section.name]}"
        return [Problem("optimizer.name", rule, None, "use SGD, AdamW or another")]
    return _argument_problems(classes[section.name], section.args) or _refused_values(
        classes[section.name], section.args
    )


def build_optimizer(
    section: OptimizerSection, model: nn.Module, *, steps_per_epoch: int
) -> Optimizer:
    """The optimizer of `model`'s parameters, at learning rate 0: see `set_lr`.

    Which parameters are left out of weight decay is the section's `exclude`. Epochs among the
    arguments become updates, `steps_per_epoch` each. The foreach implementation (all tensors in
    few kernels) is used where the class has one and the arguments choose no other. Raises
    JobError: anything `check_optimizer` finds, or the class refuses these parameters.
    """
    from raytrain_opt.optim.parameter_groups import parameter_groups

    problems = check_optimizer(section)
    if problems:
        raise JobError(problems)
    optimizer_class = _classes()[section.name]
    groups = parameter_groups(model, exclude_bias_and_norm=section.excludes_bias_and_norm)
    args = {
        **_fast(optimizer_class, section.args),
        **_arguments(optimizer_class, section.args, steps_per_epoch),
    }
    try:
        optimizer: Optimizer = optimizer_class(groups, lr=0.0, **args)
    except (TypeError, ValueError, RuntimeError) as error:
        rule = f"{section.name} refuses this model's parameters: {error}"
        raise JobError([Problem("optimizer", rule)]) from error
    return optimizer


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Make `lr` the rate of the next update of every group.

    A rate that is a tensor is filled in place, since captured graphs read that very tensor.
    (torch's ASGD alone reads the rate at the end of an update: there it counts one later.)
    """
    import torch

    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def weight_decays(optimizer: Optimizer) -> list[float]:
    """Of each group; 0 where the optimizer has none."""
    return [float(group.get("weight_decay", 0.0)) for group in optimizer.param_groups]


def set_weight_decays(optimizer: Optimizer, decays: Sequence[float]) -> None:
    """Of each group; those of 0 are left alone."""
    for group, decay in zip(optimizer.param_groups, decays, strict=True):
        if decay:
            group["weight_decay"] = decay


def _classes() -> dict[str, Any]:
    """Name to class of torch's optimizers and ours. Any: their constructors differ."""
    import torch

    from raytrain_opt.optim.lars import LARS
    from raytrain_opt.optim.rmsprop_warmup import RMSpropWarmup

    base = torch.optim.Optimizer
    theirs = {
        name: value
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, base) and value is not base
    }
    return {**theirs, "LARS": LARS, "RMSpropWarmup": RMSpropWarmup}


def _arguments(
    optimizer_class: type[Optimizer], args: dict[str, Any], steps_per_epoch: int
) -> dict[str, Any]:
    """Those of the class for those of a job."""
    if optimizer_class.__name__ != "RMSpropWarmup":
        return args
    given = {**_EPOCHS, **args}
    epochs = {key.replace("epochs", "steps"): given.pop(key) for key in _EPOCHS}
    return {**given, **{key: value * steps_per_epoch for key, value in epochs.items()}}


def _argument_names(optimizer_class: type[Optimizer]) -> list[str]:
    """Those that a job may give."""
    names = [key for key in inspect.signature(optimizer_class).parameters if key != "params"]
    if optimizer_class.__name__ == "RMSpropWarmup":
        names = [key.replace("steps", "epochs") for key in names]
    return [key for key in names if key not in _UNFIT_ARGS]


def _fast(optimizer_class: type[Optimizer], args: dict[str, Any]) -> dict[str, Any]:
    has_it = "foreach" in inspect.signature(optimizer_class).parameters
    return {"foreach": True} if has_it and not {"foreach", "fused"} & args.keys() else {}


def _unknown_class(name: str, valid: list[str]) -> Problem:
    lower_case = {candidate.lower(): candidate for candidate in valid}
    near = get_close_matches(name.lower(), lower_case, n=2)
    hint = f"did you mean {' or '.join(lower_case[match] for match in near)}?" if near else None
    rule = "must be a class of torch.optim, LARS or RMSpropWarmup"
    return Problem("optimizer.name", rule, repr(name), hint or f"these work: {', '.join(valid)}")


def _argument_problems(optimizer_class: type[Optimizer], args: dict[str, Any]) -> list[Problem]:
    valid = _argument_names(optimizer_class)
    problems = []
    for key, value in args.items():
        path = f"optimizer.args.{key}"
        if key in _UNFIT_ARGS:
            problems.append(Problem(path, _UNFIT_ARGS[key]))
        elif key not in valid:
            near = get_close_matches(key, valid, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(valid)}"
            rule = f"{optimizer_class.__name__} has no such argument"
            problems.append(Problem(path, rule, None, hint))
        elif _is_number_as_text(value):
            hint = f"write {float(value)!r}: YAML reads 1e-4, without a point, as text"
            problems.append(Problem(path, "must be a number, not text", repr(value), hint))
    return problems


def _is_number_as_text(value: object) -> bool:
    if not isinstance(value, str):
        return False
    try:
        float(value)
    except ValueError:
        return False
    return True


def _refused_values(optimizer_class: type[Optimizer], args: dict[str, Any]) -> list[Problem]:
    refusal = _refusal(optimizer_class, args)
    if refusal is None:
        return []
    alone = [key for key in args if _refusal(optimizer_class, {key: args[key]}) == refusal]
    rule = f"{optimizer_class.__name__} refuses: {refusal}"
    if len(alone) == 1:
        return [Problem(f"optimizer.args.{alone[0]}", rule, repr(args[alone[0]]))]
    return [Problem("optimizer.args", rule, repr(args))]


def _refusal(optimizer_class: Any, args: dict[str, Any]) -> str | None:
    """What the class says against the values of these arguments; None if it takes them.

    It is given no parameters, which every class refuses after it has looked at the values:
    making a real one imports torch's compiler, 3 s that a check of a job must not cost. Only
    the choice of implementation is looked at later.
    """
    if args.get("fused") and args.get("foreach"):
        return "`fused` and `foreach` cannot be `True` together."
    said = _complaint(optimizer_class, args)
    return None if said == _complaint(optimizer_class, {}) else said


def _complaint(optimizer_class: Any, args: dict[str, Any]) -> str | None:
    try:
        optimizer_class([], lr=0.0, **_arguments(optimizer_class, args, 1))
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        return str(error) or type(error).__name__
    return None
