"""Check the `model` section of a job, and build its network: equal seeds give equal weights."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map

from raytrain_opt.config.error_messages import nearest
from raytrain_opt.config.load import resolve_function
from raytrain_opt.config.schema import ModelSection
from raytrain_opt.config.section import is_function_name
from raytrain_opt.errors import DataError, JobError, Problem, RaytrainOptError, origin
from raytrain_opt.models.networks import BUILTIN_MODELS, model_names, torchvision_names
from raytrain_opt.random_state import preserve_random_state, seeded

# Arguments that build_model itself passes to a constructor.
_DATA_ARGUMENTS = ("num_classes", "sample_shape")

_FROM_DATA = "cannot be set here: comes from the data"
_NOT_PRETRAINED = "cannot be set here: write model.weights beside model.args"
_RESERVED_ARGUMENTS = {
    **dict.fromkeys(_DATA_ARGUMENTS, _FROM_DATA),
    **dict.fromkeys(("weights", "pretrained", "weights_backbone"), _NOT_PRETRAINED),
}
# Of torchvision, with auxiliary heads by default.
TWO_OUTPUTS = ("googlenet", "inception_v3")
# Of oneDNN with AVX-512; with AVX2 a block has 8.
_CHANNELS_OF_A_BLOCK = 16


def check_model(section: ModelSection) -> list[Problem]:
    """Return the problems of names, of the model and of its arguments, without building it."""
    name = section.name
    if is_function_name(name):
        try:
            function = resolve_function(name, "model.name")
        except JobError as error:
            return error.problems
        return _check_arguments(function, section.args)
    if name not in BUILTIN_MODELS and name not in torchvision_names():
        builtin = model_names()
        hint = nearest(str(name), [*builtin, *torchvision_names()], n=3)
        rule = "must be a built-in model, one of torchvision's, or package.module:function"
        return [Problem("model.name", rule, repr(name), hint or f"built in: {', '.join(builtin)}")]
    reserved = section.args.keys() & _RESERVED_ARGUMENTS.keys()
    problems = [Problem(f"model.args.{k}", _RESERVED_ARGUMENTS[k]) for k in sorted(reserved)]
    if name in BUILTIN_MODELS:
        args = {key: v for key, v in section.args.items() if key not in reserved}
        problems += _check_arguments(BUILTIN_MODELS[str(name)], args)
    elif section.args.get("aux_logits") and name in TWO_OUTPUTS:
        rule = "must be false: the loss takes one output, and this adds a second"
        problems.append(Problem("model.args.aux_logits", rule, "true"))
    return problems


def _keyword_parameters(function: Callable[..., Any]) -> tuple[dict[str, inspect.Parameter], bool]:
    """Return a function's keyword parameters, and whether it takes any others (**kwargs)."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a function in C
        return {}, True
    named = {p.name: p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    return named, any(p.kind is p.VAR_KEYWORD for p in parameters)


def _check_arguments(function: Callable[..., Any], args: dict[str, Any]) -> list[Problem]:
    parameters, accepts_any = _keyword_parameters(function)
    valid = [name for name in parameters if name not in _DATA_ARGUMENTS]
    problems = []
    for key in args:
        if key not in parameters and not accepts_any:
            hint = nearest(key, valid) or f"valid arguments: {', '.join(valid) or 'none'}"
            problems.append(Problem(f"model.args.{key}", "no such argument", None, hint))
    for key, parameter in parameters.items():
        is_required = parameter.default is inspect.Parameter.empty
        if is_required and key not in args and key not in _DATA_ARGUMENTS:
            problems.append(Problem(f"model.args.{key}", "is required by the model's function"))
    return problems


def build_model(
    section: ModelSection,
    *,
    num_classes: int,
    sample_shape: tuple[int, ...],
    seed: int,
    channels_last: bool = False,
) -> nn.Module:
    """Build the network on the CPU, in training mode, from `seed`.

    `sample_shape`: [channels, height, width] for all named models. A user's function is called
    with `args` and, where its signature has them, `num_classes` (also by **kwargs) and
    `sample_shape`; `args` take precedence. Random states are preserved. `channels_last`: the
    memory format of the weights, if samples are images.
    Raises JobError (unknown name, wrong arguments, no usable nn.Module) and DataError (the
    named model cannot take such samples).
    """
    if problems := check_model(section):
        raise JobError(problems)
    with seeded(seed):
        torch.manual_seed(seed)  # also of GPUs, where a user's function may draw
        model = _construct(section, num_classes=num_classes, sample_shape=sample_shape)
    freeze_parameters(model, section.freeze)
    _require_trainable(model, frozen=bool(section.freeze))
    if channels_last and len(sample_shape) == 3:
        model = model.to(memory_format=torch.channels_last)
    _avoid_narrow_pointwise(model)
    return model.train()


def _avoid_narrow_pointwise(model: nn.Module) -> None:
    """Let strided 1 x 1 convolutions of few channels have the default memory format on the CPU.

    With channels_last, oneDNN computes the gradients of their weights beyond its memory: numbers
    are wrong, the process crashes or hangs (its issue 6035).
    """
    for module in model.modules():
        if (
            isinstance(module, nn.Conv2d)
            and module.kernel_size == (1, 1)
            and module.stride != (1, 1)
            and module.in_channels < _CHANNELS_OF_A_BLOCK
        ):
            module.to(memory_format=torch.contiguous_format)
            module.register_forward_pre_hook(_to_default_format)


def _to_default_format(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.contiguous() if x.is_cpu else x for x in inputs)


def freeze_parameters(model: nn.Module, patterns: Sequence[str]) -> None:
    """Train no parameter whose name matches a pattern; raises JobError if none does."""
    parameters = dict(model.named_parameters(remove_duplicate=False))  # tied: by any name
    for i, pattern in enumerate(patterns):
        if not (matching := [p for name, p in parameters.items() if fnmatchcase(name, pattern)]):
            rule = f"matches no parameter of this model ({', '.join([*parameters][:3])}, …)"
            raise JobError([Problem(f"model.freeze.{i}", rule, repr(pattern))])
        for parameter in matching:
            parameter.requires_grad_(False)


def _construct(
    section: ModelSection, *, num_classes: int, sample_shape: tuple[int, ...]
) -> nn.Module:
    """Construct the network from the current random state; its names must have been checked."""
    data_args = {"num_classes": num_classes, "sample_shape": tuple(sample_shape)}
    if is_function_name(section.name):
        function = resolve_function(section.name, "model.name")
        return _call_user_function(function, section.args, data_args)
    name = str(section.name)
    channels = "channels" if name in BUILTIN_MODELS else 3
    if len(sample_shape) != 3 or channels not in ("channels", sample_shape[0]):
        rule = f"{name} takes images [{channels}, height, width], these data have"
        hint = f"Built-in models take any number of channels: {', '.join(model_names())}."
        raise DataError("model.name", f"{rule} {list(sample_shape)}. {hint}")
    function = BUILTIN_MODELS.get(name) or partial(_build_torchvision, name)
    try:
        model: nn.Module = function(**data_args, **section.args)
    except RaytrainOptError:
        raise
    except Exception as error:
        args = section.args
        path = f"model.args.{next(iter(args))}" if len(args) == 1 else "model.args"
        rejected = Problem(path, f"{name} rejects it: {error}", repr(args) if args else None)
        raise JobError([rejected]) from error
    return model


def _build_torchvision(
    name: str, *, num_classes: int, sample_shape: tuple[int, ...], **args: Any
) -> nn.Module:
    from torchvision import models

    if name in TWO_OUTPUTS:
        args = {"aux_logits": False, "init_weights": True, **args}
    model: nn.Module = models.get_model(name, weights=None, num_classes=num_classes, **args)
    return model


def _call_user_function(
    function: Callable[..., Any], args: dict[str, Any], data_args: dict[str, Any]
) -> nn.Module:
    parameters, accepts_any = _keyword_parameters(function)
    # Factories that take **kwargs (timm's, torchvision's) know num_classes, but no sample_shape.
    keys = {*parameters, "num_classes"} if accepts_any else {*parameters}
    accepted = {key: data_args[key] for key in _DATA_ARGUMENTS if key in keys}
    try:
        model = function(**{**accepted, **args})
        model = model.cpu() if isinstance(model, nn.Module) else model
    except RaytrainOptError:
        raise
    except Exception as error:
        rule = f"the model's function raised {type(error).__name__}: {error}"
        raise JobError([Problem("model.name", rule, None, f"at {origin(error)}")]) from error
    if not isinstance(model, nn.Module):
        rule = f"must be or return a torch.nn.Module, not {type(model).__name__}"
        name = getattr(function, "__qualname__", repr(function))
        raise JobError([Problem("model.name", rule, name)])
    return model


def _require_trainable(model: nn.Module, *, frozen: bool) -> None:
    if any(is_lazy(tensor) for tensor in [*model.parameters(), *model.buffers()]):
        rule = "the model has lazy layers, whose weights would not depend on the seed"
        hint = "use layers with sizes: num_classes and sample_shape are passed to your function"
        raise JobError([Problem("model.name", rule, None, hint)])
    if not any(parameter.requires_grad for parameter in model.parameters()):
        rule = "no parameter of the model requires a gradient: nothing to train"
        raise JobError([Problem("model.freeze" if frozen else "model.name", rule)])


def check_output(model: nn.Module, samples: Tensor, num_classes: int) -> None:
    """Pass `samples`, on the device of `model`, through it in eval mode.

    At least two: one would hide a model that drops or averages the batch dimension. The model is
    preserved. Raises DataError: the model cannot take such samples, or its output is not
    [samples, num_classes].
    """
    with preserve_model(model, samples.device), torch.no_grad():
        model.eval()
        try:
            output = model(samples)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            rule = f"it cannot process a batch of these data, shape {list(samples.shape)}"
            hint = "Choose another model.name, model.args or samples of another shape."
            raise DataError("model", f"{rule}: {type(error).__name__}: {error}. {hint}") from error
    shape = list(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
    count = len(samples)
    if shape != [count, num_classes]:
        rule = f"its output for {count} samples must be [{count}, {num_classes}]"
        hint = "Change model.args, or data.num_classes if that is wrong."
        raise DataError("model", f"{rule} (samples, classes of the data), but is {shape}. {hint}")


@contextmanager
def preserve_model(model: nn.Module, device: torch.device, *others: object) -> Iterator[None]:
    """Restore everything that calls of a model may change, on exit.

    These are parameters and buffers; the attributes of every layer and of `others` (a task, with
    its networks), including the contents of lists, dictionaries and sets; and the random states.
    The copies are in CPU memory.
    """
    values = (value for other in others for value in (other, *_attributes(other).values()))
    parts = [value for value in values if isinstance(value, nn.Module)]
    layers = [layer for part in (model, *parts) for layer in part.modules()]
    owners = [_attributes(owner) for owner in (*layers, *others)]
    attributes = [({n: (v, _copy_content(v)) for n, v in own.items()}, own) for own in owners]
    tensors = {id(leaf): leaf for own in owners for leaf in tree_leaves(own) if _is_value(leaf)}
    copies = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in tensors.values()]
    with preserve_random_state(device):
        try:
            yield
        finally:
            for before, own in attributes:
                for name in own.keys() - before.keys():
                    del own[name]
                for name, (value, content) in before.items():
                    own[name] = value
                    if content is not None:
                        value.clear()
                        add = value.extend if isinstance(value, list | deque) else value.update
                        add(content)
            for tensor, value in copies:
                if tensor.shape == value.shape:
                    tensor.detach().copy_(value)
                else:
                    tensor.data = value.to(tensor.device)


def _attributes(owner: object) -> dict[str, Any]:
    return getattr(owner, "__dict__", {})


def _is_value(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_leaf or not leaf.requires_grad)


def _copy_content(value: Any) -> Any:
    """Return a copy of a container and of those nested in it; None for another value."""
    if not isinstance(value, list | deque | dict | set):
        return None
    content = tree_map(lambda leaf: leaf, value)
    return copy(value) if content is value else content
