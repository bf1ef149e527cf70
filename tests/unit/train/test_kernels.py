"""Number formats by device. Kernels are chosen by settings of torch, which need no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torchvision
from torch import nn

from raytrain_opt.config.schema import Compile
from raytrain_opt.train.kernels import (
    COMPILE_ARGUMENTS,
    autocast_dtype,
    choose_kernels,
    compile_model,
)

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
