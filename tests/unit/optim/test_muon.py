"""Muon compared step by step with torch's and with the reference; its laws; checkpoints."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from raytrain_opt.optim import muon
from raytrain_opt.optim.factory import parameter_groups
from raytrain_opt.optim.muon import Muon, divide_work, orthogonalization_flops, orthogonalize
from raytrain_opt.train.state import capture, restore
from tests.support.reference_muon import ReferenceMuon

MATRICES = [(8, 6), (8, 6), (5, 20), (20, 5), (3, 3)]
# Two banks of one shape, a depthwise one, one of five dimensions, a matrix; then biases.
SHAPES = [(8, 3, 3, 3), (8, 3, 3, 3), (6, 1, 3, 3), (4, 2, 3, 3, 3), (40, 7), (6,), (1,)]
LRS = [0.5, 2.0, 2.0, 0.1, 8.0]

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "decay": {"weight_decay": 0.1},
    "no momentum": {"momentum": 0.0},
    "much momentum": {"momentum": 0.95},
}


def weights(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[nn.Parameter]:
    random = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=random, dtype=dtype)) for s in shapes]


def set_gradients(step: int, *sides: list[nn.Parameter]) -> None:
    for params in sides:
        random = torch.Generator().manual_seed(step + 1)
        for param in params:
            param.grad = torch.randn(param.shape, generator=random, dtype=param.dtype)


def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    others = [param for param in params if param.dim() == 1]
    matrices = [param for param in params if param.dim() > 1]
    return [{"params": matrices}, {"params": others, "use_muon": False}]


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_multiplier", 1.0)


def test_on_matrices_every_step_equals_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "iteration_dtype", lambda _: torch.bfloat16)
    ours, theirs = weights(MATRICES, torch.float32), weights(MATRICES, torch.float32)
    settings: dict[str, Any] = {"momentum": 0.95, "weight_decay": 0.1}
    optimizers = (Muon(ours, lr=0.0, **settings), torch.optim.Muon(theirs, lr=0.0, **settings))
    for step, lr in enumerate(LRS):
        set_gradients(step, ours, theirs)
        for optimizer in optimizers:
            set_lr(optimizer, lr)
            optimizer.step()
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * lr)


@pytest.mark.parametrize("settings", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("channels_last", [False, True])
def test_every_step_of_any_network_equals_the_reference(
    settings: dict[str, Any], channels_last: bool
) -> None:
    params, reference = weights(SHAPES, torch.float64), weights(SHAPES, torch.float64)
    if channels_last:
        for param in params[:3]:
            param.data = param.data.contiguous(memory_format=torch.channels_last)
    optimizer = Muon(groups(params), lr=0.0, aux="sgd", aux_lr_multiplier=0.25, **settings)
    expected = ReferenceMuon(reference, **settings)
    for step, lr in enumerate(LRS):
        set_gradients(step, params, reference)
        if step == 2:
            params[0].grad = reference[0].grad = None
        set_lr(optimizer, lr)
        optimizer.step()
        expected.step(lr, 0.25 * lr)
        torch.testing.assert_close(params, reference, rtol=1e-9, atol=1e-9)


def test_learned_positions_move_as_their_matrix() -> None:
    (matrix,), (positions,) = weights([(9, 4)], torch.float32), weights([(1, 9, 4)], torch.float32)
    set_gradients(0, [matrix], [positions])
    Muon([matrix], lr=0.5).step()
    Muon([positions], lr=0.5).step()
    assert torch.equal(positions[0], matrix)
    flops = [orthogonalization_flops([param.shape]) for param in (matrix, positions)]
    assert flops[0] == flops[1]


def test_the_second_rule_can_be_torchs_adamw() -> None:
    params, reference = weights(SHAPES, torch.float32)[-2:], weights(SHAPES, torch.float32)[-2:]
    optimizer = Muon(
        [{"params": params, "use_muon": False}],
        lr=0.1,
        weight_decay=0.1,
        aux="adamw",
        aux_lr_multiplier=0.5,
    )
    expected = torch.optim.AdamW(reference, lr=0.05, weight_decay=0.1, betas=(0.9, 0.95))
    for step in range(4):
        set_gradients(step, params, reference)
        optimizer.step()
        expected.step()
    torch.testing.assert_close(params, reference)


def test_an_orthogonalized_matrix_has_singular_values_around_one() -> None:
    matrices = torch.randn(4, 9, 30, generator=torch.Generator().manual_seed(0)).double()
    for batch in (matrices, matrices.mT):
        values = torch.linalg.svdvals(orthogonalize(batch))
        assert 0.6 < values.min() <= values.max() < 1.3


@pytest.mark.parametrize("shape", [(8, 3, 3, 3), (8, 32), (64, 8)])
def test_the_operations_are_those_that_torch_counts(shape: tuple[int, ...]) -> None:
    with FlopCounterMode(display=False) as counter:
        orthogonalize(torch.randn(1, shape[0], math.prod(shape[1:])))
    assert orthogonalization_flops([torch.Size(shape)]) == counter.get_total_flops()


def test_a_zero_gradient_changes_nothing_and_a_nan_is_not_hidden() -> None:
    params = weights(MATRICES[:2], torch.float32)
    before = params[0].detach().clone()
    params[0].grad = torch.zeros_like(params[0])
    params[1].grad = torch.full_like(params[1], float("nan"))
    Muon(params, lr=0.1).step()
    assert torch.equal(params[0], before)
    assert params[1].isnan().all()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 5)
    ).to(memory_format=torch.channels_last)


def make(model: nn.Module, **settings: Any) -> Muon:
    made = parameter_groups(model, exclude_bias_and_norm=True, use_muon=True)
    return Muon(made, lr=0.1, weight_decay=0.1, **settings)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        set_gradients(step, list(model.parameters()))
        optimizer.step()


@pytest.mark.parametrize("aux", ["sgd", "adamw"])
@pytest.mark.parametrize("via", ["state_dict", "state", "copy"])
def test_training_continues_bit_for_bit_from_a_saved_state(aux: str, via: str) -> None:
    model = network()
    optimizer = make(model, aux=aux, aux_lr_multiplier=0.5)
    train(model, optimizer, range(3))
    resumed: nn.Module = network()
    other: torch.optim.Optimizer = make(resumed)
    scaler = torch.amp.GradScaler(enabled=False)
    if via == "copy":
        resumed, other = copy.deepcopy((model, optimizer))
    elif via == "state":
        restore(capture(model, optimizer, scaler, copy=True), resumed, other, scaler)
    else:
        file = io.BytesIO()
        torch.save((model.state_dict(), optimizer.state_dict()), file)
        file.seek(0)
        weights_saved, state = torch.load(file)
        resumed.load_state_dict(weights_saved)
        other.load_state_dict(state)
    train(model, optimizer, range(3, 6))
    train(resumed, other, range(3, 6))
    for one, two in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_every_matrix_is_computed_by_one_rank_and_the_work_is_shared(ranks: int) -> None:
    shapes = [torch.Size((64, 64 * k)) for k in (1, 9, 9, 9, 9, 2, 2, 4)]
    owned = divide_work(shapes, ranks)
    own = [[index for batch in batches for index in batch] for batches in owned]
    assert sorted(index for indices in own for index in indices) == list(range(len(shapes)))
    work = [sum(shapes[i][1] for i in indices) for indices in own]
    assert max(work) <= max(64 * 9 * 4, sum(work) / ranks + 64 * 4)


def test_matrices_are_computed_in_the_same_batches_by_any_number_of_ranks() -> None:
    shapes = [torch.Size((8, 8))] * 9 + [torch.Size((4, 8))] * 2
    batches = [sorted(b for own in divide_work(shapes, n) for b in own) for n in (1, 2, 5)]
    assert batches == [[[0, 1, 2, 3], [4, 5, 6, 7], [8], [9, 10]]] * 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr must be at least 0"),
        ({"weight_decay": float("nan")}, "weight_decay must be"),
        ({"aux": "lion"}, "aux must be one of"),
    ],
)
def test_values_out_of_range_are_errors(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Muon(weights(MATRICES, torch.float32), **{"lr": 0.1, **settings})


def test_a_vector_in_a_group_of_matrices_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"shape \[6\] is no matrix"):
        Muon(weights(SHAPES, torch.float32), lr=0.1)
