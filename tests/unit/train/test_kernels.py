"""Number formats by device; kernels chosen by settings of torch; threads by the time of steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

from raytrain_opt.config.schema import Compile, LossSection
from raytrain_opt.data.base import Batch
from raytrain_opt.train.kernels import (
    COMPILE_ARGUMENTS,
    autocast_dtype,
    choose_kernels,
    compile_model,
    fewest_fast_threads,
    time_threads,
)
from raytrain_opt.train.task import Classification

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def settings() -> tuple[Any, ...]:
    cudnn = torch.backends.cudnn
    return torch.get_float32_matmul_precision(), cudnn.allow_tf32, cudnn.benchmark


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = settings()
    with torch._dynamo.config.patch(suppress_errors=False):
        yield
    torch.compiler.reset()
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = before[1:]


def test_a_gpu_uses_tf32_and_measured_convolutions() -> None:
    choose_kernels("fp32", CUDA)
    assert settings() == ("high", True, True)
    choose_kernels("fp32_strict", CUDA)
    assert settings() == ("highest", False, True)
    assert torch.backends.cudnn.rnn.fp32_precision != "tf32"


def test_a_cpu_keeps_its_settings() -> None:
    before = settings()
    choose_kernels("fp32_strict", CPU)
    assert settings() == before


@pytest.mark.parametrize("has_bf16", [True, False])
def test_auto_is_bf16_where_a_gpu_has_it(has_bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    assert autocast_dtype("auto", CUDA) == (torch.bfloat16 if has_bf16 else None)
    assert autocast_dtype("auto", CPU) is None


def test_named_precisions_hold_on_every_device() -> None:
    for device in (CPU, CUDA):
        assert autocast_dtype("bf16", device) == torch.bfloat16
        assert autocast_dtype("fp16", device) == torch.float16
        assert autocast_dtype("fp32", device) is None
        assert autocast_dtype("fp32_strict", device) is None


def build(name: str) -> nn.Module:
    """Build a network of torchvision without memory for its weights."""
    with torch.device("meta"):
        return torchvision.models.get_model(name)


@pytest.mark.parametrize(
    ("setting", "model", "device", "compiled"),
    [
        ("auto", nn.Sequential(nn.MultiheadAttention(4, 1)), CUDA, True),
        ("auto", nn.Sequential(nn.MultiheadAttention(4, 1)), CPU, False),
        ("auto", build("swin_t"), CUDA, True),
        ("auto", build("resnet18"), CUDA, False),
        ("auto", nn.Linear(2, 2), CUDA, False),
        ("none", nn.MultiheadAttention(4, 1), CUDA, False),
        ("default", nn.Linear(2, 2), CPU, True),
        ("max-autotune", nn.Linear(2, 2), CPU, True),
    ],
)
def test_auto_compiles_transformers_on_a_gpu(
    setting: Compile, model: nn.Module, device: torch.device, compiled: bool
) -> None:
    assert compile_model(setting, model, device) == (
        "none" if not compiled else "default" if setting == "auto" else setting
    )
    assert (model._compiled_call_impl is not None) == compiled


def test_auto_lets_a_network_stay_eager_that_cannot_be_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = []

    class Attention(nn.Linear):
        pass

    def fail(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        tried.append(inputs)
        raise RuntimeError("planted failure")

    monkeypatch.setitem(COMPILE_ARGUMENTS, "default", {"backend": fail})
    model, x = nn.Sequential(Attention(2, 2)), torch.ones(1, 2)
    expected = model(x)
    assert compile_model("auto", model, CUDA) == "default"
    assert torch.equal(model(x), expected)
    assert tried


class Clock:
    """Time that passes only in steps, as `step_s(threads)` says; `tried`: threads of each step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step_s: Callable[[int], float]) -> None:
        self.now_s, self.threads, self.step_s = 0.0, 3, step_s
        self.tried: list[int] = []
        monkeypatch.setattr("raytrain_opt.train.kernels.monotonic_s", lambda: self.now_s)
        monkeypatch.setattr(torch, "get_num_threads", lambda: self.threads)
        monkeypatch.setattr(torch, "set_num_threads", self._set)

    def _set(self, threads: int) -> None:
        self.threads = threads

    def step(self) -> None:
        self.tried.append(self.threads)
        self.now_s += self.step_s(self.threads)


@pytest.mark.parametrize(
    ("step_s", "most", "expected"),
    [
        (lambda threads: 0.1 / threads, 16, 16),
        # Waking threads takes longer than the operations.
        (lambda threads: 0.001 + 0.002 * (threads > 1), 16, 1),
        (lambda threads: 0.01 / threads + 0.001 * threads, 12, 3),
        # More threads that save less than 5 % leave their cores to others.
        (lambda threads: 0.0102 if threads < 8 else 0.01, 8, 1),
        (lambda threads: 0.1, 1, 1),
    ],
)
def test_the_fewest_threads_that_are_about_as_fast_as_any_compute(
    monkeypatch: pytest.MonkeyPatch, step_s: Callable[[int], float], most: int, expected: int
) -> None:
    clock = Clock(monkeypatch, step_s)
    assert fewest_fast_threads(clock.step, most) == expected
    assert clock.threads == 3


def test_long_steps_are_timed_once_with_each_number_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch, lambda threads: 8.0 / threads)
    assert fewest_fast_threads(clock.step, 4) == 4
    assert clock.tried == [4, 2, 1]


def test_threads_remain_when_a_step_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("no memory")

    clock = Clock(monkeypatch, lambda threads: 1.0)
    with pytest.raises(RuntimeError, match="no memory"):
        fewest_fast_threads(fail, 2)
    assert clock.threads == 3


def test_steps_on_trial_have_the_batch_size_and_change_nothing() -> None:
    class Net(nn.Sequential):
        sizes: set[int] = set()

        def forward(self, x: Tensor) -> Tensor:
            self.sizes.add(len(x))
            output: Tensor = super().forward(x)
            return output

    net = Net(nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 4)).eval()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    random_state = torch.get_rng_state()
    samples = Batch(torch.randn(2, 8, generator=torch.Generator()), torch.tensor([0, 1]))
    threads = time_threads(Classification(LossSection()), net, samples, "bf16", 5, 1)
    assert threads == 1
    assert net.sizes == {5}
    assert not net.training
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)
