"""Number formats of the forward pass, the kernels that a GPU may use, and compiling."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from raytrain_opt.config.schema import Compile, Precision

# max-autotune alone captures CUDA graphs. Gradients would lie in the memory of a graph, which the
# next micro-batch of an update overwrites, and which is not released for another pool.
COMPILE_ARGUMENTS: dict[str, dict[str, Any]] = {
    "default": {},
    "max-autotune": {"mode": "max-autotune-no-cudagraphs"},
}
# Classes of torch, torchvision, timm and transformers. These networks are faster compiled.
_ATTENTION = re.compile("Attention|Attn")
_AMP_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast_dtype(precision: Precision, device: torch.device) -> torch.dtype | None:
    """Return the type of automatic mixed precision on this device; None for none."""
    if precision == "auto":
        has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(
            including_emulation=False
        )
        return torch.bfloat16 if has_bf16 else None
    return _AMP_DTYPE.get(precision)


def choose_kernels(precision: Precision, device: torch.device) -> list[str]:
    """Let a GPU use TF32, unless `fp32_strict`, and measure cuDNN's algorithms for each shape.

    Returns what was chosen, in words; on CPU nothing.
    """
    if device.type != "cuda":
        return []
    number_format = "ieee" if precision == "fp32_strict" else "tf32"
    backends: Any = torch.backends  # its type information lacks some of these
    backends.cuda.matmul.fp32_precision = number_format
    backends.cudnn.conv.fp32_precision = number_format
    backends.cudnn.benchmark = True
    return ["no TF32" if number_format == "ieee" else "TF32", "cuDNN autotuning"]


def compile_model(setting: Compile, model: nn.Module, device: torch.device) -> Compile:
    """Compile calls of the model from now on, or no longer; return the mode, or `off`.

    Its parameters stay the same objects.
    """
    if setting == "auto":
        setting = "off"
        if device.type == "cuda":
            # What nobody asked to compile must not end a run: it stays eager, with a warning.
            torch._dynamo.config.suppress_errors = True
            has_attention = any(_ATTENTION.search(type(m).__name__) for m in model.modules())
            setting = "default" if has_attention else "off"
    if setting == "off":
        model._compiled_call_impl = None
    else:
        model.compile(**COMPILE_ARGUMENTS[setting])
    return setting
