"""Build optimizers by name: torch's, this package's, schedule-free ones and the user's own.

The learning rate is not an argument of the optimizer: the policy decides it, and the training
loop sets it before each update with `set_lr`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from raytrain_opt.config.error_messages import nearest
from raytrain_opt.config.functions import resolve_function
from raytrain_opt.config.section import is_function_name
from raytrain_opt.config.updates import MomentumWarmup, OptimizerSection
from raytrain_opt.errors import JobError, Problem

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

_UNSUPPORTED = {
    "LBFGS": "evaluates the loss several times per step through a closure; the loop does it once",
    "SparseAdam": "needs sparse gradients; those of a data-parallel model are dense",
    "Rprop": "uses the learning rate for its first step only, so no policy could control it",
}
_RESERVED_ARGUMENTS = {
    "lr": "is set by the learning-rate policy: use learning_rate.initial",
    "differentiable": "is for differentiating through an update, which this loop does not do",
    "warmup_steps": "is set by the learning-rate policy: use learning_rate.warmup",
    "distributed": "follows from the number of workers",
}
# Arguments of RMSpropWarmup that a job writes in epochs, with the paper's values as defaults.
_EPOCH_ARGUMENTS = {"center_epochs": 10.0, "period_epochs": 5.0}


def check_optimizer(section: OptimizerSection) -> list[Problem]:
    """Return all problems of the section: unknown class or argument, values the class rejects.

    Values are checked by constructing the class without parameters. Imports torch.
    """
    if section.name in _UNSUPPORTED:
        rule = f"cannot train here: {section.name} {_UNSUPPORTED[section.name]}"
        return [Problem("optimizer.name", rule, None, "use SGD, AdamW or another")]
    try:
        optimizer_class = _resolve_class(section.name)
    except JobError as error:
        return error.problems
    return _check_arguments(optimizer_class, section.constructor_args) or _check_values(
        optimizer_class, section.constructor_args
    )


def build_optimizer(
    section: OptimizerSection,
    model: nn.Module,
    *,
    steps_per_epoch: int,
    distributed: bool = False,
) -> Optimizer:
    """Build the optimizer of `model`'s parameters, at learning rate 0; see `set_lr`.

    The section says which parameters are left out of weight decay, and which have rates of their
    own. `distributed`: all ranks of the default process group take each step together.
    Arguments in epochs are converted to updates, `steps_per_epoch` each. Unless the arguments
    choose an implementation, the fused one is used where the class and the parameters allow it,
    else foreach (all tensors in few kernels).
    Raises JobError: anything `check_optimizer` finds, or the class rejects these parameters.
    """
    problems = check_optimizer(section)
    if problems:
        raise JobError(problems)
    optimizer_class = _resolve_class(section.name)
    args = {
        **_default_implementation(optimizer_class, section.constructor_args, model),
        **_constructor_arguments(optimizer_class, section.constructor_args, steps_per_epoch),
    }
    if section.name == "Muon":
        args["distributed"] = distributed
    groups = group_parameters(section, model)
    try:
        optimizer: Optimizer = optimizer_class(groups, lr=0.0, **args)
    except Exception as error:  # a user's class may raise anything
        rule = f"{section.name} rejects this model's parameters: {error}"
        raise JobError([Problem("optimizer", rule)]) from error
    return optimizer


def group_parameters(section: OptimizerSection, model: nn.Module) -> list[dict[str, Any]]:
    """Return the parameter groups of the section's optimizer; see `parameter_groups`.

    Raises JobError for a pattern that matches no parameter.
    """
    from raytrain_opt.optim.parameter_groups import parameter_groups

    try:
        return parameter_groups(
            model,
            exclude_bias_and_norm=section.excludes_bias_and_norm,
            lr_multipliers=section.lr_multipliers,
            use_muon=section.name == "Muon",
            aux_parameters=section.aux_parameters,
        )
    except ValueError as error:
        raise JobError([Problem("optimizer", str(error))]) from error


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of the next update: in each group `lr` times its `lr_multiplier`.

    A rate that is a tensor is filled in place, because captured CUDA graphs read that tensor.
    (torch's ASGD reads the rate at the end of an update: there it counts one update later.)
    """
    import torch

    from raytrain_opt.optim.parameter_groups import scaled_lr

    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(scaled_lr(group, lr))
        else:
            group["lr"] = scaled_lr(group, lr)


def set_momentum(optimizer: Optimizer, warmup: MomentumWarmup | None, epoch: float) -> None:
    """Set the momentum of the next update, after `epoch` epochs, if there is a warm-up.

    Raises JobError for an optimizer without an argument of that name.
    """
    if warmup is None:
        return
    final = optimizer.defaults.get("momentum")
    if final is None:
        rule = f"{type(optimizer).__name__} has no argument momentum; remove it"
        raise JobError([Problem("optimizer.momentum_warmup", rule)])
    risen = min(1.0, epoch / warmup.epochs)
    for group in optimizer.param_groups:
        group["momentum"] = warmup.initial + risen * (final - warmup.initial)


def get_weight_decays(optimizer: Optimizer) -> list[float]:
    """Return the weight decay of each parameter group; 0 for an optimizer without it."""
    return [float(group.get("weight_decay", 0.0)) for group in optimizer.param_groups]


def set_weight_decays(optimizer: Optimizer, weight_decays: Sequence[float]) -> None:
    """Set the weight decay of each parameter group; an optimizer without it stays unchanged."""
    for group, weight_decay in zip(optimizer.param_groups, weight_decays, strict=True):
        if "weight_decay" in group:
            group["weight_decay"] = weight_decay


def _resolve_class(name: str | Callable[..., Any]) -> Any:
    """Return the class of this name, or the user's. Raises JobError if it is no optimizer."""
    from torch.optim import Optimizer

    if not is_function_name(name):
        classes = _optimizer_classes()
        if name not in classes:
            valid = sorted(set(classes) - set(_UNSUPPORTED))
            raise JobError([_unknown_class(str(name), valid)])
        return classes[str(name)]
    own = resolve_function(name, "optimizer.name")
    if not (isinstance(own, type) and issubclass(own, Optimizer)):
        rule = "must be a class derived from torch.optim.Optimizer"
        raise JobError([Problem("optimizer.name", rule, repr(name))])
    return own


def _optimizer_classes() -> dict[str, Any]:
    """Return all classes by name. Any: their constructors differ."""
    import torch
    from schedulefree import AdamWScheduleFree, SGDScheduleFree

    from raytrain_opt.optim.lars import LARS
    from raytrain_opt.optim.muon import Muon
    from raytrain_opt.optim.rmsprop_warmup import RMSpropWarmup

    base = torch.optim.Optimizer
    from_torch = {
        name: value
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, base) and value is not base
    }
    return {
        **from_torch,
        "LARS": LARS,
        "Muon": Muon,
        "RMSpropWarmup": RMSpropWarmup,
        "ScheduleFreeAdamW": AdamWScheduleFree,
        "ScheduleFreeSGD": SGDScheduleFree,
    }


def _constructor_arguments(
    optimizer_class: type[Optimizer], args: dict[str, Any], steps_per_epoch: int
) -> dict[str, Any]:
    """Translate a job's optimizer arguments into constructor arguments: epochs into updates."""
    if optimizer_class.__name__ != "RMSpropWarmup":
        return args
    others = {**_EPOCH_ARGUMENTS, **args}
    epochs = {key.replace("epochs", "steps"): others.pop(key) for key in _EPOCH_ARGUMENTS}
    return {**others, **{key: value * steps_per_epoch for key, value in epochs.items()}}


def _job_arguments(optimizer_class: type[Optimizer]) -> list[str]:
    """Return the names of the arguments that a job may give."""
    names = [key for key in inspect.signature(optimizer_class).parameters if key != "params"]
    if optimizer_class.__name__ == "RMSpropWarmup":
        names = [key.replace("steps", "epochs") for key in names]
    return [key for key in names if key not in _RESERVED_ARGUMENTS]


def _default_implementation(
    optimizer_class: type[Optimizer], args: dict[str, Any], model: nn.Module
) -> dict[str, Any]:
    if {"foreach", "fused"} & args.keys():
        return {}
    parameters = inspect.signature(optimizer_class).parameters
    if "fused" in parameters and all(map(_can_be_fused, model.parameters())):
        return {"fused": True}
    return {"foreach": True} if "foreach" in parameters else {}


def _can_be_fused(parameter: Tensor) -> bool:
    """Return whether torch's fused kernels, which ignore strides, can update a parameter.

    Autograd gives the gradient the parameter's strides only if its elements fill their memory.
    """
    import torch

    is_dense = torch.empty_like(parameter, device="meta").stride() == parameter.stride()
    return is_dense and parameter.is_floating_point() and parameter.device.type in ("cpu", "cuda")


def _unknown_class(name: str, valid: list[str]) -> Problem:
    hint = nearest(name, valid, n=2, ignore_case=True) or f"valid: {', '.join(valid)}"
    rule = (
        "must be a class of torch.optim, LARS, Muon, RMSpropWarmup, ScheduleFreeSGD, "
        "ScheduleFreeAdamW, or package.module:Class"
    )
    return Problem("optimizer.name", rule, repr(name), hint)


def _check_arguments(optimizer_class: type[Optimizer], args: dict[str, Any]) -> list[Problem]:
    valid = _job_arguments(optimizer_class)
    parameters = inspect.signature(optimizer_class).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    problems = []
    for key, value in args.items():
        path = f"optimizer.args.{key}"
        if key in _RESERVED_ARGUMENTS:
            problems.append(Problem(path, _RESERVED_ARGUMENTS[key]))
        elif key not in valid and not takes_any:
            hint = nearest(key, valid) or f"valid arguments: {', '.join(valid)}"
            rule = f"{optimizer_class.__name__} has no such argument"
            problems.append(Problem(path, rule, None, hint))
        elif _is_number_as_text(value):
            hint = f"write {float(value)!r} without quotes"
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


def _check_values(optimizer_class: type[Optimizer], args: dict[str, Any]) -> list[Problem]:
    message = _rejection(optimizer_class, args)
    if message is None:
        return []
    culprits = [key for key in args if _rejection(optimizer_class, {key: args[key]}) == message]
    rule = f"{optimizer_class.__name__} rejects it: {message}"
    if len(culprits) == 1:
        return [Problem(f"optimizer.args.{culprits[0]}", rule, repr(args[culprits[0]]))]
    return [Problem("optimizer.args", rule, repr(args))]


def _rejection(optimizer_class: Any, args: dict[str, Any]) -> str | None:
    """Return the class's error for the values of these arguments; None if it accepts them.

    The class is constructed without parameters, which every class rejects, but only after it
    has checked the values. A real parameter would make torch import its compiler: 3 s that the
    check of a job must not cost. Only the choice of implementation is checked later by torch,
    so it is checked here.
    """
    if args.get("fused") and args.get("foreach"):
        return "`fused` and `foreach` cannot be `True` together."
    message = _construction_error(optimizer_class, args)
    return None if message == _construction_error(optimizer_class, {}) else message


def _construction_error(optimizer_class: Any, args: dict[str, Any]) -> str | None:
    try:
        optimizer_class([], lr=0.0, **_constructor_arguments(optimizer_class, args, 1))
    except Exception as error:  # noqa: BLE001 - a user's class may raise anything
        return str(error) or type(error).__name__
    return None
