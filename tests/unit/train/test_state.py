"""Capture and restore: every bit is copied, no memory is shared, the digest covers all."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from raytrain_opt.train.state import PackedTensor, TrainingState, capture, restore

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


class Nested(torch.optim.SGD):
    """SGD whose momentum is in a list, as parts of the state of SOAP and Shampoo are."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            [momentum] = self.state[parameter].setdefault("GG", [torch.zeros_like(parameter)])
            momentum.mul_(0.9).add_(parameter.grad)
            parameter.data.sub_(momentum, alpha=0.1)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "nested": lambda m: Nested(m.parameters(), lr=0.1),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, foreach=True),
}


class Training:
    """A small convolutional net in training, on random data of its own."""

    def __init__(self, make: MakeOptimizer, seed: int, channels_last: bool = True) -> None:
        torch.manual_seed(seed)
        self.model: nn.Module = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 4 * 4, 5)
        )
        if channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)
        self.optimizer = make(self.model)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0 * (seed + 1))

    def step(self, seed: int, count: int = 2) -> Training:
        random = torch.Generator().manual_seed(seed)
        for _ in range(count):
            x = torch.randn(6, 3, 6, 6, generator=random)
            self.optimizer.zero_grad()
            self.scaler.scale(self.model(x).square().mean()).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return self

    def capture(self, *, copy: bool = True) -> TrainingState:
        return capture(self.model, self.optimizer, self.scaler, copy=copy)

    def restore(self, state: TrainingState) -> Training:
        restore(state, self.model, self.optimizer, self.scaler)
        return self

    def tensors(self) -> list[Tensor]:
        """All tensors of model and optimizer, live."""
        moments = tree_leaves(list(self.optimizer.state.values()))
        moments = [value for value in moments if isinstance(value, Tensor)]
        return [*self.model.state_dict().values(), *moments]


def frozen(state: TrainingState) -> TrainingState:
    """Return the state in read-only memory, like that of Ray's object store."""
    tensors = {}
    for name, tensor in state.tensors.items():
        data = tensor.data.copy()
        data.flags.writeable = False
        tensors[name] = replace(tensor, data=data)
    return replace(state, tensors=tensors)


def assert_same(a: Training, b: Training) -> None:
    for left, right in zip(a.tensors(), b.tensors(), strict=True):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)
        assert left.stride() == right.stride()
    assert a.scaler.state_dict() == b.scaler.state_dict()
    groups = [[{**g, "params": None} for g in t.optimizer.param_groups] for t in (a, b)]
    assert groups[0] == groups[1]


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_another_training_continues_bit_by_bit(make: MakeOptimizer, channels_last: bool) -> None:
    first = Training(make, 0, channels_last).step(1)
    second = Training(make, 7, channels_last).step(8, count=3)
    state = first.capture()
    second.restore(frozen(state))
    assert_same(first, second)
    assert second.capture().digest() == state.digest()
    assert_same(first.step(2), second.step(2))


def test_a_training_returns_to_an_earlier_state() -> None:
    """Even to a state without optimizer tensors."""
    training = Training(OPTIMIZERS["adamw"], 0)
    start = training.capture()
    once = training.step(1).capture().digest()
    training.scaler.unscale_(training.optimizer)  # and then the update raises
    assert training.restore(start).capture().digest() == start.digest()
    assert training.step(1).capture().digest() == once


def test_parameters_stay_the_same_objects_in_the_same_place() -> None:
    training = Training(OPTIMIZERS["adamw"], 0).step(1)
    before = [(id(p), p.data_ptr()) for p in training.model.parameters()]
    training.restore(Training(OPTIMIZERS["adamw"], 1).step(2).capture())
    assert [(id(p), p.data_ptr()) for p in training.model.parameters()] == before
    optimized = [id(p) for group in training.optimizer.param_groups for p in group["params"]]
    assert optimized == [id(p) for p in training.model.parameters()]


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_training_never_writes_to_the_restored_state(make: MakeOptimizer) -> None:
    state = Training(make, 0).step(1).capture()
    digest = state.digest()
    other = Training(make, 1).restore(state)
    other.step(3)
    assert state.digest() == digest
    assert other.capture().digest() != digest


def test_without_a_copy_memory_is_shared() -> None:
    training = Training(OPTIMIZERS["adamw"], 0).step(1)
    addresses = {tensor.data_ptr() for tensor in training.tensors()}
    state = training.capture(copy=False)
    assert {value.data.ctypes.data for value in state.tensors.values()} == addresses


def test_every_bit_changes_the_digest() -> None:
    state = Training(OPTIMIZERS["momentum"], 0).step(1).capture()
    digests = {state.digest()}
    for name, tensor in state.tensors.items():
        data = tensor.data.copy()
        data[-1] ^= 1
        digests.add(TrainingState({**state.tensors, name: replace(tensor, data=data)}).digest())
    assert len(digests) == len(state.tensors) + 1


def test_names_shapes_and_dtypes_change_the_digest_and_the_order_of_names_does_not() -> None:
    a, b = (PackedTensor.from_tensor(torch.full((2, 1), value), copy=True) for value in (1.0, 2.0))
    others = [replace(a, shape=(1, 2)), replace(a, dtype="int32")]
    tensors = [{"a": a, "b": b}, {"a": b, "b": a}, *({"a": other, "b": b} for other in others)]
    assert len({TrainingState(named).digest() for named in tensors}) == 4
    digests = [TrainingState(named).digest() for named in ({"a": a, "b": b}, {"b": b, "a": a})]
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3, 4, 5),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(2, 1, 3, 3).to(memory_format=torch.channels_last),
        torch.randn(2, 3, 1, 1).to(memory_format=torch.channels_last),
        torch.randn(2, 3, 2, 4, 5).to(memory_format=torch.channels_last_3d),
        torch.randn(4, 6).t(),
        torch.tensor(7),
        torch.empty(0, 3),
        torch.randn(5).to(torch.bfloat16),
        torch.randn(5).to(torch.float16),
        torch.tensor([True, False]),
        torch.tensor([math.nan, math.inf, -0.0]),
        torch.arange(3, dtype=torch.float64),
    ],
)
@pytest.mark.parametrize("copy", [True, False])
def test_any_tensor_is_unpacked_unchanged(tensor: Tensor, copy: bool) -> None:
    """A step of an optimizer may round by the strides of axes of size 1, too."""
    packed = PackedTensor.from_tensor(tensor, copy)
    assert packed.tensor().stride() == tensor.stride()
    assert packed.data.flags.c_contiguous
    assert packed.data.dtype == np.uint8
    back = packed.tensor()
    assert (back.shape, back.dtype) == (tensor.shape, tensor.dtype)
    assert torch.equal(back.nan_to_num(99.0), tensor.nan_to_num(99.0))


def test_a_tensor_with_gaps_is_packed_without_them() -> None:
    tensor = torch.randn(8)[::2]
    assert torch.equal(PackedTensor.from_tensor(tensor, copy=False).tensor(), tensor)
