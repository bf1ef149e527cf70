"""The training loss: cross entropy with label smoothing, or a function of the user."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from raytrain_opt.config.error_messages import nearest
from raytrain_opt.config.functions import resolve_function
from raytrain_opt.config.schema import LossSection
from raytrain_opt.config.section import is_function_name
from raytrain_opt.errors import JobError, Problem

if TYPE_CHECKING:
    from torch import Tensor

    Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]

_PATH = "loss.name"
_CROSS_ENTROPY = "cross_entropy"
_RULE = "must be cross_entropy or package.module:function"


def check_loss(section: LossSection) -> list[Problem]:
    """Return all problems of the section, without calling the function or importing torch."""
    if section.name == _CROSS_ENTROPY:
        return []
    if not is_function_name(section.name):
        hint = nearest(section.name, [_CROSS_ENTROPY], cutoff=0.4)
        return [Problem(_PATH, _RULE, repr(section.name), hint)]
    try:
        function = resolve_function(section.name, _PATH)
    except JobError as error:
        return error.problems
    return _signature_problems(function)


def build_loss(section: LossSection) -> Loss:
    """Build a function of (output [N, classes], labels [N]) that returns the mean loss, [].

    Raises JobError with the problems that `check_loss` finds. The function raises JobError if
    the user's function does not return a tensor without dimensions.
    """
    from torch.nn import functional

    problems = check_loss(section)
    if problems:
        raise JobError(problems)
    if section.name == _CROSS_ENTROPY:
        return partial(functional.cross_entropy, label_smoothing=section.label_smoothing)
    return partial(_call_user_loss, resolve_function(section.name, _PATH))


def check_loss_value(section: LossSection, num_classes: int) -> list[Problem]:
    """Call the user's function with outputs and labels of two samples; return its problems."""
    import torch

    if section.name == _CROSS_ENTROPY:
        return []
    output, labels = torch.zeros(2, num_classes), torch.zeros(2, dtype=torch.int64)
    try:
        build_loss(section)(output, labels)
    except JobError as error:
        return error.problems
    except Exception as error:  # noqa: BLE001 - the user's function may raise anything
        rule = (
            f"raised {type(error).__name__}: {error}; it was called with output "
            f"{list(output.shape)} and labels {list(labels.shape)} of two samples"
        )
        return [Problem(_PATH, rule)]
    return []


def _signature_problems(function: Callable[..., Any]) -> list[Problem]:
    if inspect.isclass(function):
        hint = "wrap it: def loss(output, labels): return MyLoss()(output, labels)"
        return [Problem(_PATH, "must be a function, not a class", function.__qualname__, hint)]
    try:
        signature = inspect.signature(function)
    except ValueError:
        return []  # written in C, without a signature: only a call can show that it fails
    try:
        signature.bind("output", "labels")
    except TypeError as error:
        rule = f"must be callable as (output, labels): {error}"
        return [Problem(_PATH, rule, f"its signature is {signature}")]
    return []


def _call_user_loss(function: Callable[..., Any], output: Tensor, labels: Tensor) -> Tensor:
    import torch

    loss = function(output, labels)
    if isinstance(loss, torch.Tensor) and loss.dim() == 0:
        return loss
    kind = f"shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
    rule = "must return the mean over the batch, a tensor without dimensions"
    raise JobError([Problem(_PATH, rule, f"returned {kind}")])
