"""Check by checksums that all ranks hold the same bits, after a phase and before a save."""

from __future__ import annotations

from collections.abc import Sequence
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
from raytrain_opt.train.state import named_tensors

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Elements that are summed at a time: they need 16 bytes each.
_CHUNK = 2**18
_HINT = (
    "only gradients are exchanged. Usual causes: nn.Embedding(max_norm=...), code in the network, "
    "the loss or the optimizer that writes weights or depends on the rank, random numbers that "
    "cannot be seeded. Remove the cause, or train with workers.count: 1"
)


def compare_ranks(model: nn.Module, optimizer: Optimizer, epoch: int, *, failed: bool) -> None:
    """Compare what `state_dict` has of model and optimizer over the group; all ranks call it.

    Does nothing for one rank, or if the phase `failed` on any rank. Where ranks have different
    processors, which round differently, all take the values of rank 0. Raises JobError, on all
    ranks, with the names of tensors that differ.
    """
    if dist.get_world_size() == 1:
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
