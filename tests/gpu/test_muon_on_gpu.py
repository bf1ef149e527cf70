"""Muon on a GPU: bfloat16 against float32, torch's own Muon, no waits, NCCL. No Ray."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from raytrain_opt.optim.muon import Muon
from tests.support.reference_muon import ReferenceMuon

# The compiler and the debug mode warn about themselves, each version of torch differently.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

CUDA = torch.device("cuda", 0)
MATRICES = [(64, 64), (64, 64), (32, 288), (288, 32), (10, 640)]
# Filter banks of one shape, another one, a matrix and biases.
NETWORK = [(32, 16, 3, 3), (32, 16, 3, 3), (64, 32, 1, 1), (10, 640), (64,)]
# Rounding to bfloat16, 2^-9, through five iterations: up to 0.03 of an update on CPU; an order of
# sums that differs: 0.005. One iteration fewer is 0.25.
BFLOAT16, ORDER = 0.06, 0.02


def weights(shapes: Sequence[tuple[int, ...]], device: Any = CUDA) -> list[Any]:
    """Return the same parameters on every device; filter banks in channels_last."""
    random, params = torch.Generator().manual_seed(0), []
    for shape in shapes:
        layout = torch.channels_last if len(shape) == 4 else torch.contiguous_format
        param = torch.randn(shape, generator=random).to(device, memory_format=layout)
        params.append(nn.Parameter(param))
    return params


def fill_gradients(params: Sequence[Any], seed: int) -> None:
    random = torch.Generator().manual_seed(seed + 1)
    for param in params:
        grad = torch.randn(param.shape, generator=random)
        param.grad = torch.empty_like(param).copy_(grad)


def muon(params: Sequence[Any], **settings: Any) -> Muon:
    others = [param for param in params if param.dim() == 1]
    matrices = [param for param in params if param.dim() > 1]
    groups = [{"params": matrices}, {"params": others, "use_muon": False}]
    return Muon(groups, 1.0, **{"aux": "sgd", **settings})


def updates(params: Sequence[Tensor], before: Sequence[Tensor]) -> list[Tensor]:
    return [(p - b).detach().cpu() for p, b in zip(params, before, strict=True)]


def assert_close(ours: Sequence[Tensor], theirs: Sequence[Tensor], tolerance: float) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert (one - other).norm() <= tolerance * other.norm()


def test_an_update_in_bfloat16_is_that_in_float32_up_to_rounding() -> None:
    params, literal = weights(NETWORK), weights(NETWORK, "cpu")
    optimizer, reference = muon(params), ReferenceMuon(literal)
    for seed in range(3):
        before = [[p.detach().clone() for p in side] for side in (params, literal)]
        fill_gradients(params, seed)
        fill_gradients(literal, seed)
        optimizer.step()
        reference.step(1.0, 1.0)
        assert_close(updates(params, before[0]), updates(literal, before[1]), BFLOAT16)


def test_on_matrices_a_step_equals_that_of_torchs_muon() -> None:
    ours, theirs = weights(MATRICES), weights(MATRICES)
    settings: dict[str, Any] = {"momentum": 0.95, "weight_decay": 0.1}
    optimizers = Muon(ours, 1.0, **settings), torch.optim.Muon(theirs, lr=1.0, **settings)
    for seed in range(3):
        before = [[p.detach().clone() for p in side] for side in (ours, theirs)]
        for params, optimizer in zip((ours, theirs), optimizers, strict=True):
            fill_gradients(params, seed)
            optimizer.step()
        assert_close(updates(ours, before[0]), updates(theirs, before[1]), ORDER)


def test_no_step_waits_for_the_device() -> None:
    params = weights(NETWORK)
    optimizer = muon(params, weight_decay=0.1)
    fill_gradients(params, 0)
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(3):
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_exchange_over_nccl_gives_the_same_weights(tmp_path: Path) -> None:
    alone, exchanged = weights(NETWORK), weights(NETWORK)
    meeting = f"file://{tmp_path}/meeting-point"
    dist.init_process_group("nccl", init_method=meeting, rank=0, world_size=1, device_id=CUDA)
    try:
        for params, distributed in ((alone, False), (exchanged, True)):
            optimizer = muon(params, distributed=distributed)
            for seed in range(3):
                fill_gradients(params, seed)
                optimizer.step()
    finally:
        dist.destroy_process_group()
    torch.testing.assert_close(exchanged, alone, rtol=0, atol=0)
