"""How a device computes: number formats, the kernels of a GPU, compiled models."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from raytrain_opt.config.schema import Compile, Precision

# Classes of torch, torchvision, timm and transformers. These networks are faster compiled.
_ATTENTION = re.compile("Attention|Attn")


# max-autotune alone captures CUDA graphs. Gradients would lie in the memory of a graph, which the
# next micro-batch of an update overwrites, and which is not released for another pool.
COMPILE_ARGUMENTS: dict[str, dict[str, Any]] = {
    "default": {},
    "max-autotune": {"mode": "max-autotune-no-cudagraphs"},
}


def compile_model(setting: Compile, model: nn.Module, device: torch.device) -> Compile:
    """Compile the model's calls, unless it stays eager; return the mode, or `off`.

    `auto` compiles networks with attention on GPUs. The parameters stay the same objects.
    """
    is_auto = setting == "auto"
    if is_auto:
        has_attention = any(_ATTENTION.search(type(m).__name__) for m in model.modules())
        setting = "default" if device.type == "cuda" and has_attention else "none"
    if setting != "none":
        # What nobody asked to compile must not end a run: it stays eager, with a warning.
        torch._dynamo.config.suppress_errors = is_auto

        # Not `Module.compile`, which skips a Sequential of torch's layers with torch 2.11.
        def call(*args: Any, **kwargs: Any) -> Any:
            return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

        model._compiled_call_impl = torch.compile(call, **COMPILE_ARGUMENTS[setting])
    return setting


@contextmanager
def eager(model: nn.Module) -> Iterator[None]:
    """Run calls of the model without its compiled code, if any."""
    compiled, model._compiled_call_impl = model._compiled_call_impl, None
    try:
        yield
    finally:
        model._compiled_call_impl = compiled


_AMP_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast_dtype(precision: Precision, device: torch.device) -> torch.dtype | None:
    """Return the type of automatic mixed precision on this device; None for none."""
    if precision == "auto":
        has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(
            including_emulation=False
        )
        return torch.bfloat16 if has_bf16 else None
    return _AMP_DTYPE.get(precision)


def choose_kernels(precision: Precision, device: torch.device) -> None:
    """Let a GPU use TF32, unless `fp32_strict`, and measure cuDNN's algorithms for each shape."""
    if device.type != "cuda":
        return
    allow_tf32 = precision != "fp32_strict"
    # Not `fp32_precision`: with it, Inductor of torch 2.11 to 2.14 fails to read the precision.
    torch.set_float32_matmul_precision("high" if allow_tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = allow_tf32
    torch.backends.cudnn.benchmark = True
