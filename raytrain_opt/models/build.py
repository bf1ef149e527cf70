"""Build the network that the `model` section names, the same for the same seed."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from raytrain_opt.config.functions import is_function_name, resolve_function
from raytrain_opt.config.schema import ModelSection
from raytrain_opt.errors import DataError, JobError, Problem, RaytrainOptError
from raytrain_opt.models.check import OFFERED, accepted, check_names
from raytrain_opt.models.registry import TORCHVISION_DEFAULTS, model_names, our_function

if TYPE_CHECKING:
    from torch import nn


def build_model(
    section: ModelSection, *, num_classes: int, sample_shape: tuple[int, ...], seed: int
) -> nn.Module:
    """The network on the CPU, in training mode; equal seeds give equal weights.

    `sample_shape` is that of one sample: [channels, height, width] for all named models. A
    user's function is called with `args` and, where its signature takes them, `num_classes`
    and `sample_shape`; a value in `args` goes before ours. The CPU's random state is unchanged
    afterwards. Raises JobError (unknown name, wrong arguments, no usable nn.Module) and
    DataError (the named model cannot take such samples).
    """
    import torch

    problems = check_names(section)
    if problems:
        raise JobError(problems)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = construct(section, num_classes=num_classes, sample_shape=sample_shape)
        except NotImplementedError as error:  # of torchvision: a combination it does not have
            raise JobError([_refused(str(section.name), section.args, error)]) from error
    _require_trainable(model)
    return model.train()


def construct(
    section: ModelSection, *, num_classes: int, sample_shape: tuple[int, ...]
) -> nn.Module:
    """The network of a section whose names were checked, from the current random state."""
    offered = {"num_classes": num_classes, "sample_shape": tuple(sample_shape)}
    if is_function_name(section.name):
        function = resolve_function(section.name, "model.name")
        return _call_users(function, section.args, offered)
    name = str(section.name)
    function, given = _named(name, offered)
    try:
        model: nn.Module = function(**given, **section.args)
    except (RaytrainOptError, NotImplementedError):
        raise
    except Exception as error:
        raise JobError([_refused(name, section.args, error)]) from error
    return model


def _named(name: str, offered: dict[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function of a named model and what we give to it."""
    if name in model_names():
        return our_function(name), offered
    from torchvision import models

    channels = offered["sample_shape"][0]
    if len(offered["sample_shape"]) != 3 or channels != 3:
        raise DataError(
            f"model.name: torchvision's {name} takes colour images [3, height, width], but a "
            f"sample of these data has shape {list(offered['sample_shape'])}. Ours take any "
            f"number of channels, greyscale too: {', '.join(model_names())}."
        )
    builder = models.get_model_builder(name)
    defaults = TORCHVISION_DEFAULTS.get(name, {})

    def build(num_classes: int, sample_shape: tuple[int, ...], **args: Any) -> Any:
        return builder(weights=None, num_classes=num_classes, **{**defaults, **args})

    return build, offered


def _call_users(
    function: Callable[..., Any], args: dict[str, Any], offered: dict[str, Any]
) -> nn.Module:
    from torch import nn

    parameters, takes_any = accepted(function)
    wanted = {key: offered[key] for key in OFFERED if takes_any or key in parameters}
    try:
        model = function(**{**wanted, **args})
    except RaytrainOptError:
        raise
    except Exception as error:
        raise JobError([_raised(error)]) from error
    if not isinstance(model, nn.Module):
        rule = f"must return a torch.nn.Module, but returned {type(model).__name__}"
        raise JobError([Problem("model.name", rule, _label(function))])
    return model


def _raised(error: Exception) -> Problem:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    rule = f"the model's function raised {type(error).__name__}: {error}"
    return Problem("model.name", rule, None, f"at {frame.filename}:{frame.lineno}")


def _refused(name: str, args: dict[str, Any], error: Exception) -> Problem:
    path = f"model.args.{next(iter(args))}" if len(args) == 1 else "model.args"
    return Problem(path, f"{name} refuses: {error}", repr(args) if args else None)


def _require_trainable(model: nn.Module) -> None:
    from torch.nn.parameter import is_lazy

    if any(is_lazy(tensor) for tensor in [*model.parameters(), *model.buffers()]):
        rule = "the model has lazy layers, whose weights would not depend on the seed"
        hint = "give them sizes: num_classes and sample_shape are passed to your function"
        raise JobError([Problem("model.name", rule, None, hint)])
    if not any(parameter.requires_grad for parameter in model.parameters()):
        rule = "the model has no parameter that requires a gradient: nothing to train"
        raise JobError([Problem("model.name", rule)])


def _label(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))
