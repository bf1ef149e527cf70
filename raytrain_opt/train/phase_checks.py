"""Check at the end of a phase that parameters are updated, and that all ranks hold the same.

An exchange of gradients alone does not ensure that. Checksums of the bits are compared, so NaN
equals NaN, and 0.0 differs from -0.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from raytrain_opt.errors import JobError, Problem, listed
from raytrain_opt.optim.factory import require_all_parameters
from raytrain_opt.train.state import named_tensors

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Elements that are summed at a time: they need 16 bytes each.
_CHUNK = 2**18
_HINT = (
    "only gradients are exchanged, so all else that changes weights must do it alike on each "
    "worker. Usual causes: nn.Embedding(max_norm=...), code in the network, the loss or the "
    "optimizer that writes weights or depends on the rank, random numbers that cannot be seeded. "
    "Remove the cause, or train with workers.count: 1"
)


def compare_ranks(model: nn.Module, optimizer: Optimizer, epoch: int, *, failed: bool) -> None:
    """Compare what `state_dict` has of model and optimizer over the process group.

    Call it on all ranks. Does nothing without a group of at least two, or if the phase `failed`
    on any rank. Where ranks have different processors, which round differently, all take the
    values of rank 0. Raises JobError, on all ranks, with the names of tensors that differ.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    state, device = optimizer.state_dict(), next(model.parameters()).device
    tensors = dict(sorted(named_tensors(model.state_dict(keep_vars=True), state)))
    sums = torch.stack([checksum(tensor).to(device) for tensor in tensors.values()])
    numbers = [v for v in tree_leaves(state) if isinstance(v, bool | int | float | str)]
    plain = repr(([(name, tensor.shape) for name, tensor in tensors.items()], numbers))
    digest = int.from_bytes(blake2b(plain.encode(), digest_size=8).digest(), "big", signed=True)
    total = checksum(sums) + digest
    # The complement of the largest complement is the smallest sum.
    message = torch.stack((total, ~total, torch.full_like(total, failed)))
    dist.all_reduce(message, op=dist.ReduceOp.MAX)
    largest, complement, any_failed = message.tolist()
    if largest == ~complement or any_failed:
        return
    own: Any = _processor(device), {**dict(zip(tensors, sums.tolist(), strict=True)), "": plain}
    of_ranks = [own] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    names = dict.fromkeys(name for _, rank in of_ranks for name in rank)
    differing = [n for n in names if len({rank.get(n) for _, rank in of_ranks}) > 1]
    if len({processor for processor, _ in of_ranks}) > 1 and "" not in differing:
        for tensor in map(tensors.__getitem__, differing):
            of_first = tensor.detach().to(device, copy=True).contiguous()
            dist.broadcast(of_first, src=0)
            tensor.detach().copy_(of_first)
        return
    names_by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    ordered = [names_by_id.get(id(p)) for group in optimizer.param_groups for p in group["params"]]
    shown = listed([_shown(name, ordered) for name in differing])
    rule = f"in epoch {epoch} the workers hold different values; tensors that differ: {shown}"
    raise JobError([Problem("model", rule, None, _HINT)])


def _shown(name: str, parameters: Sequence[str | None]) -> str:
    """Return the name of a tensor for a message; `parameters`: of the optimizer, in its order."""
    kind, _, rest = name.partition(".")
    if kind != "optimizer":
        return rest or "shapes or numbers of the optimizer"
    index, _, key = rest.partition(".")
    return f"{key} of {parameters[int(index)]} in the optimizer"


def _processor(device: torch.device) -> str:
    """Return what decides how a rank rounds: its GPU, or its CPU and the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return f"{info.partition('model name')[2].partition('flags')[0]} {torch.get_num_threads()}"


def checksum(tensor: Tensor) -> Tensor:
    """Return a number that depends on each bit and its place: int64, [], on the device."""
    tensor = tensor.detach().to_dense()
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).contiguous().view(-1)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    odd = _odd_numbers(tensor.device)  # a product with one differs whenever the factor differs
    for part in torch.split(flat.view(_BITS[flat.itemsize]), _CHUNK):
        total = 31 * total + (part.to(torch.int64) * odd[: len(part)]).sum()
    return total


@cache
def _odd_numbers(device: torch.device) -> Tensor:
    return 2 * 0x9E3779B97F4A7 * torch.arange(_CHUNK, device=device) + 1


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
