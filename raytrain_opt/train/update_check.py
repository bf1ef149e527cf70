"""Check that a training updates each parameter that gets a gradient."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from raytrain_opt.errors import JobError, Problem, listed
from raytrain_opt.optim.factory import require_all_parameters

# As a multiple of the rounding of a parameter: a plain gradient step that is visible. Others stay
# the same for good, such as biases before a BatchNorm layer, whose gradients are rounding errors.
_VISIBLE = 1e3


class UpdateCheck:
    """Raises JobError for parameters that get a gradient, but no update, in one phase."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._before: list[tuple[str, nn.Parameter, Tensor]] = []
        self._loss_is_checked = False

    def check_loss(self, loss: Tensor) -> None:
        """Check the parameters that the first loss depends on, before its backward pass."""
        if self._loss_is_checked:
            return
        self._loss_is_checked = True
        require_all_parameters(self._optimizer, self._model)
        known = {id(p) for p in self._model.parameters()}
        others = [str(list(p.shape)) for p in _parameters_of(loss) if id(p) not in known]
        if others:
            rule = f"the loss depends on parameters outside the network; shapes: {listed(others)}"
            hint = "make them attributes of the network, or freeze them: requires_grad_(False)"
            raise JobError([Problem("task", rule, None, hint)])
        # Only a class of the user's may leave parameters out that it has.
        if not type(self._optimizer).__module__.startswith(("torch.", "raytrain_opt.")):
            named = self._model.named_parameters()
            self._before = [(name, p, p.detach().clone()) for name, p in named]

    def end_phase(self) -> None:
        """Check the phase by its last gradients."""
        require_all_parameters(self._optimizer, self._model)
        rates = {p: float(g["lr"]) for g in self._optimizer.param_groups for p in g["params"]}
        untrained = [
            name
            for name, p, value in self._before
            if torch.equal(p, value) and _has_visible_step(p, rates.get(p, 0.0))
        ]
        self._before = []
        if untrained:
            name = type(self._optimizer).__name__
            rule = f"{name} does not change parameters that have a gradient: {listed(untrained)}"
            hint = "train them in `step`, or freeze them: model.freeze"
            raise JobError([Problem("optimizer.name", rule, None, hint)])


def _has_visible_step(parameter: nn.Parameter, lr: float) -> bool:
    gradient = parameter.grad
    # A gradient scaler leaves out all updates of a step with a gradient that is not finite.
    if gradient is None or not gradient.isfinite().all():
        return False
    rounding = torch.finfo(parameter.dtype).eps * parameter.detach().abs()
    return bool((lr * gradient.abs() > _VISIBLE * rounding).any())


def _parameters_of(loss: Tensor) -> Iterator[nn.Parameter]:
    """Yield the parameters that a loss depends on."""
    nodes = [loss.grad_fn] if loss.grad_fn is not None else []
    seen = set(nodes)
    for node in nodes:  # which grows
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter):
            yield leaf
        inputs = {n: None for n, _ in node.next_functions if n is not None and n not in seen}
        seen.update(inputs)
        nodes += inputs
