"""What is wrong with the `model` section, found without data and without memory for weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any

from raytrain_opt.config.functions import is_function_name, resolve_function
from raytrain_opt.config.schema import ModelSection
from raytrain_opt.errors import JobError, Problem
from raytrain_opt.models.registry import (
    TORCHVISION_DEFAULTS,
    model_names,
    our_function,
    torchvision_names,
)

# What build_model gives to a constructor by itself.
OFFERED = ("num_classes", "sample_shape")

_FRESH = "weights start fresh; to start from trained ones give your own package.module:function"
_NOT_FOR_NAMED = {
    "num_classes": "comes from the data",
    "sample_shape": "comes from the data",
    "weights": _FRESH,
    "pretrained": _FRESH,
    "weights_backbone": _FRESH,
}


def check_model(section: ModelSection) -> list[Problem]:
    """Every problem of the section: unknown name, unknown or missing arguments, bad values.

    Values are tried by building on torch's meta device, which allocates and computes nothing;
    a user's function is not called. Imports torch only if there are arguments or a function,
    torchvision only if the name is not ours.
    """
    problems = check_names(section)
    if problems or not section.args or is_function_name(section.name):
        return problems
    return _refused_values(section)


def check_names(section: ModelSection) -> list[Problem]:
    """The problems that names alone tell: of the model and of its arguments."""
    name = section.name
    if is_function_name(name):
        try:
            function = resolve_function(name, "model.name")
        except JobError as error:
            return error.problems
        return _argument_problems(function, section.args)
    if name in model_names():
        elsewhere = _set_elsewhere(section.args)
        others = {key: value for key, value in section.args.items() if key not in _NOT_FOR_NAMED}
        return elsewhere + (_argument_problems(our_function(str(name)), others) if others else [])
    if name in torchvision_names():
        return _set_elsewhere(section.args) + _one_output(section)
    return [_unknown_name(str(name))]


def accepted(function: Callable[..., Any]) -> tuple[dict[str, inspect.Parameter], bool]:
    """The function's keyword parameters, and whether it takes any others (**kwargs).

    A function whose signature cannot be read counts as one that takes anything.
    """
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:
        return {}, True
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {key: value for key, value in parameters.items() if value.kind in by_keyword}
    return named, any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def _argument_problems(function: Callable[..., Any], args: dict[str, Any]) -> list[Problem]:
    parameters, takes_any = accepted(function)
    problems = [
        Problem(f"model.args.{key}", "no such argument", None, _near(key, parameters))
        for key in args
        if key not in parameters and not takes_any
    ]
    for key, parameter in parameters.items():
        needed = parameter.default is inspect.Parameter.empty
        if needed and key not in args and key not in OFFERED:
            problems.append(Problem(f"model.args.{key}", "is required by the model's function"))
    return problems


def _set_elsewhere(args: dict[str, Any]) -> list[Problem]:
    return [
        Problem(f"model.args.{key}", f"cannot be set here: {_NOT_FOR_NAMED[key]}")
        for key in args
        if key in _NOT_FOR_NAMED
    ]


def _one_output(section: ModelSection) -> list[Problem]:
    if section.args.get("aux_logits") and section.name in TORCHVISION_DEFAULTS:
        return [
            Problem(
                "model.args.aux_logits",
                "must be false: the loss takes one output, and this adds a second",
                "true",
            )
        ]
    return []


def _unknown_name(name: str) -> Problem:
    ours = model_names()
    near = get_close_matches(name, [*ours, *torchvision_names()], n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"ours are {', '.join(ours)}"
    rule = "must be one of our models, of torchvision's, or package.module:function"
    return Problem("model.name", rule, repr(name), hint)


def _near(key: str, parameters: Iterable[str]) -> str:
    valid = [name for name in parameters if name not in OFFERED]
    near = get_close_matches(key, valid, n=1)
    if near:
        return f"did you mean {near[0]}?"
    return f"it takes {', '.join(valid)}" if valid else "it takes none"


def _refused_values(section: ModelSection) -> list[Problem]:
    import torch

    from raytrain_opt.models.build import construct

    try:
        # Initialisation on the meta device may still draw from the CPU generator.
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            construct(section, num_classes=10, sample_shape=(3, 224, 224))
    except JobError as error:
        return error.problems
    except NotImplementedError:
        # Some of torchvision's (RegNets) compute with tensor values while building, which the
        # meta device cannot: build_model will name what is wrong with those.
        return []
    return []
