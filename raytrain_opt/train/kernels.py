"""How a device computes: number formats, the kernels of a GPU, compiled models, threads.

Threads pay only where an operation takes much longer than it takes to wake them and to wait for
the last one. No rule about sizes holds on two machines; some steps tell.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import nn

from raytrain_opt.clock import monotonic_s
from raytrain_opt.config.schema import Compile, Precision
from raytrain_opt.data.base import Batch
from raytrain_opt.data.nesting import map_leaves
from raytrain_opt.models.factory import preserve_model
from raytrain_opt.train.task import Task

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


# The noise of a machine comes and goes, so each number of threads is timed in every round.
_ROUNDS = 15
_SHORT_S = 0.02  # a step that takes longer is timed once in a round
_LIMIT_S = 1.0  # no round begins later
# More threads have to save this part of the time; others may need their cores.
_GAIN = 0.05


def time_threads(
    task: Task, model: nn.Module, samples: Batch, precision: Precision, batch_size: int, most: int
) -> int:
    """Return the threads to train with, at most `most`; times steps of `samples`, repeated."""
    cpu, rows = torch.device("cpu"), torch.arange(batch_size) % samples.size
    x, y = map_leaves(lambda leaf: None if leaf is None else leaf[rows], (samples.x, samples.y))
    content = replace(samples, x=x, y=y).content
    dtype = autocast_dtype(precision, cpu)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = task.training_loss(model, content)
        loss.backward()  # type: ignore[no-untyped-call]

    with preserve_model(model, cpu, task):
        model.train()
        try:
            return fewest_fast_threads(step, most)
        finally:
            model.zero_grad(set_to_none=True)


def fewest_fast_threads(step: Callable[[], None], most: int) -> int:
    """Return the fewest threads, of `most`, its half and so on, that are about as fast as any."""
    times_s: dict[int, list[float]] = {most >> i: [] for i in range(most.bit_length())}
    before, end_s = torch.get_num_threads(), monotonic_s() + _LIMIT_S
    try:
        for _ in range(_ROUNDS):
            for threads, measured in times_s.items():
                torch.set_num_threads(threads)
                measured.append(_time_s(step))
            if monotonic_s() > end_s:
                break
    finally:
        torch.set_num_threads(before)
    typical_s = {threads: median(measured) for threads, measured in times_s.items()}
    fast_s = min(typical_s.values()) / (1 - _GAIN)
    return min(threads for threads, step_s in typical_s.items() if step_s <= fast_s)


def _time_s(step: Callable[[], None]) -> float:
    """Return the seconds of a step, after one that is not counted unless it takes long."""
    for _ in range(2):
        began_s = monotonic_s()
        step()
        if (step_s := monotonic_s() - began_s) > _SHORT_S:
            break
    return step_s
