"""Check the `model` section of a job without data and without memory for weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch

from raytrain_opt.config.error_messages import nearest
from raytrain_opt.config.functions import resolve_function
from raytrain_opt.config.schema import ModelSection
from raytrain_opt.config.section import is_function_name
from raytrain_opt.errors import JobError, Problem, problems_of
from raytrain_opt.models.registry import (
    BUILTIN_MODELS,
    TORCHVISION_DEFAULTS,
    model_names,
    torchvision_names,
)

# Arguments that build_model itself passes to a constructor.
DATA_ARGUMENTS = ("num_classes", "sample_shape")

_FROM_DATA = "cannot be set here: comes from the data"
_NOT_PRETRAINED = "cannot be set here: write model.weights beside model.args"
_RESERVED_ARGUMENTS = {
    "num_classes": _FROM_DATA,
    "sample_shape": _FROM_DATA,
    "weights": _NOT_PRETRAINED,
    "pretrained": _NOT_PRETRAINED,
    "weights_backbone": _NOT_PRETRAINED,
}


def check_model(section: ModelSection) -> list[Problem]:
    """Return all problems of the section: unknown name, wrong or missing arguments, bad values.

    Values are checked by building on torch's meta device, which allocates and computes nothing;
    a user's function is not called. Imports torchvision only if the name is not built in.
    """
    problems = check_names(section)
    if problems or not section.args or is_function_name(section.name):
        return problems
    return _check_values(section)


def check_names(section: ModelSection) -> list[Problem]:
    """Return the problems of the names alone: of the model and of its arguments."""
    name = section.name
    if is_function_name(name):
        try:
            function = resolve_function(name, "model.name")
        except JobError as error:
            return error.problems
        return _check_arguments(function, section.args)
    if name in BUILTIN_MODELS:
        args = {key: v for key, v in section.args.items() if key not in _RESERVED_ARGUMENTS}
        return _check_reserved(section.args) + _check_arguments(BUILTIN_MODELS[str(name)], args)
    if name in torchvision_names():
        return _check_reserved(section.args) + _check_single_output(section)
    return [_unknown_name(str(name))]


def keyword_parameters(function: Callable[..., Any]) -> tuple[dict[str, inspect.Parameter], bool]:
    """Return a function's keyword parameters, and whether it takes any others (**kwargs)."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:
        return {}, True
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {key: value for key, value in parameters.items() if value.kind in by_keyword}
    return named, any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def _check_arguments(function: Callable[..., Any], args: dict[str, Any]) -> list[Problem]:
    parameters, accepts_any = keyword_parameters(function)
    problems = [
        Problem(f"model.args.{key}", "no such argument", None, _suggest_argument(key, parameters))
        for key in args
        if key not in parameters and not accepts_any
    ]
    for key, parameter in parameters.items():
        is_required = parameter.default is inspect.Parameter.empty
        if is_required and key not in args and key not in DATA_ARGUMENTS:
            problems.append(Problem(f"model.args.{key}", "is required by the model's function"))
    return problems


def _check_reserved(args: dict[str, Any]) -> list[Problem]:
    return [
        Problem(f"model.args.{key}", _RESERVED_ARGUMENTS[key])
        for key in args
        if key in _RESERVED_ARGUMENTS
    ]


def _check_single_output(section: ModelSection) -> list[Problem]:
    if not section.args.get("aux_logits") or section.name not in TORCHVISION_DEFAULTS:
        return []
    rule = "must be false: the loss takes one output, and this adds a second"
    return [Problem("model.args.aux_logits", rule, "true")]


def _unknown_name(name: str) -> Problem:
    builtin = model_names()
    hint = nearest(name, [*builtin, *torchvision_names()], n=3)
    rule = "must be a built-in model, one of torchvision's, or package.module:function"
    return Problem("model.name", rule, repr(name), hint or f"built in: {', '.join(builtin)}")


def _suggest_argument(key: str, parameters: Iterable[str]) -> str:
    valid = [name for name in parameters if name not in DATA_ARGUMENTS]
    return nearest(key, valid) or (
        f"valid arguments: {', '.join(valid)}" if valid else "the model has no arguments"
    )


def _check_values(section: ModelSection) -> list[Problem]:
    from raytrain_opt.models.factory import construct

    def build() -> None:
        # Some of torchvision's models (RegNets) compute with tensor values while they are built,
        # which the meta device cannot: build_model reports their problems. Initialization on the
        # meta device may still draw from the CPU generator.
        with suppress(NotImplementedError), torch.random.fork_rng([]), torch.device("meta"):
            construct(section, num_classes=10, sample_shape=(3, 224, 224))

    return problems_of(build)
