"""What was chosen for a training step, and what compiling the model brought: for the records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from raytrain_opt.clock import monotonic_s
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.precision import autocast_dtype

_TIMED_PASSES = 3


def describe_step(learner: Learner) -> dict[str, object]:
    """Return precision, memory format, mode of compiling and optimizer of the learner's steps."""
    precision, optimizer = learner.config.precision, learner.optimizer
    if precision == "auto":
        precision = "fp32" if autocast_dtype("auto", learner.device) is None else "bf16"
    is_image = len(learner.info.sample_shape) == 3
    kinds = [kind for kind in ("fused", "foreach") if optimizer.defaults.get(kind)]
    return {
        "precision": precision,
        "memory_format": "channels_last"
        if learner.config.channels_last and is_image
        else "contiguous",
        "compile": learner.compiled,
        "optimizer": " ".join([*kinds, type(optimizer).__name__]),
    }


def time_compiled(learner: Learner) -> dict[str, float | None]:
    """Return the seconds of forward and backward of a micro-batch, compiled and eager.

    Call it after a phase of training, in which the model was compiled. The state stays the same.
    Eager passes need more memory: None where there is not enough of it.
    """
    model, task = learner.model, learner.task
    batch = next(iter(learner.micro_batches_at([(0, 0)])))
    parameters = [p for p in model.parameters() if p.requires_grad]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]

    def fastest_s(forward: Callable[..., Any]) -> float:
        times_s = []
        for _ in range(1 + _TIMED_PASSES):  # the first one warms up
            started_s = monotonic_s()
            with learner.autocast():
                loss = task.training_loss(forward, batch.content)  # type: ignore[arg-type]
            # Unlike a backward pass, this leaves the gradients and DDP alone.
            torch.autograd.grad(loss, parameters, allow_unused=True)
            learner.wait_for_device()
            times_s.append(monotonic_s() - started_s)
        return min(times_s[1:])

    model.train()
    times: dict[str, float | None] = {"compiled_s": fastest_s(model), "eager_s": None}
    try:
        times["eager_s"] = fastest_s(model.forward)
    except torch.OutOfMemoryError:
        learner.release_memory()
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)
    return times
