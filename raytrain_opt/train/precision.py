"""Number formats of the forward pass, and the kernels that a GPU may use."""

from __future__ import annotations

import torch

from raytrain_opt.config.schema import Precision

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
    allow_tf32 = precision != "fp32_strict"
    # Not `fp32_precision`: with it, Inductor of torch 2.11 to 2.14 fails to read the precision.
    torch.set_float32_matmul_precision("high" if allow_tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = allow_tf32
    torch.backends.cudnn.benchmark = True
    return ["TF32" if allow_tf32 else "no TF32", "cuDNN autotuning"]
