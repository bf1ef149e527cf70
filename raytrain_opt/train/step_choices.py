"""What was chosen for a training step, and what compiling the model brought: for the records."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from raytrain_opt.clock import monotonic_s
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.precision import autocast_dtype, compile_model
from raytrain_opt.train.reductions import reduce_max

_TIMED_PASSES = 3
# Compiling takes a minute or more, which a short training would not gain back.
_TRIAL_AFTER_S = 300.0


class CompileChoice:
    """Measures once what compiling the model brings; `auto` keeps what is faster on all ranks.

    `auto` compiles a model that is not compiled after five minutes of training, on trial. Nothing
    is measured where the forward pass needs all workers. All ranks must make the same calls.
    """

    def __init__(self, learner: Learner, *, auto: bool) -> None:
        self._learner, self._auto = learner, auto
        self._trained_s = 0.0
        self.times_s: dict[str, float | None] = {}  # of forward and backward of a micro-batch

    def after_phase(self, trained_s: float) -> None:
        """Measure or decide after a phase of training that took this long."""
        learner = self._learner
        if self.times_s or learner.config.batch_norm.sync:
            return
        if learner.compiled != "off":
            compiled_s, eager_s = reduce_max(time_compiled(learner), learner.device)
            if self._auto and compiled_s >= eager_s:
                learner.compiled = compile_model("off", learner.model, learner.device)
            eager = eager_s if math.isfinite(eager_s) else None
            self.times_s = {"compiled_s": compiled_s, "eager_s": eager}
        elif self._auto:
            [self._trained_s] = reduce_max([self._trained_s + trained_s], learner.device)
            if self._trained_s >= _TRIAL_AFTER_S:
                learner.compiled = compile_model("default", learner.model, learner.device)


def describe_step(learner: Learner) -> dict[str, object]:
    """Return precision, kernels, memory format, compiling, optimizer and loaders of the steps."""
    precision, optimizer = learner.config.precision, learner.optimizer
    if precision == "auto":
        precision = "fp32" if autocast_dtype("auto", learner.device) is None else "bf16"
    is_image = len(learner.info.sample_shape) == 3
    kinds = [kind for kind in ("fused", "foreach") if optimizer.defaults.get(kind)]
    return {
        "precision": precision,
        "kernels": learner.kernels,
        "memory_format": "channels_last"
        if learner.config.channels_last and is_image
        else "contiguous",
        "compile": learner.compiled,
        "optimizer": " ".join([*kinds, type(optimizer).__name__]),
        "loader_processes": learner.data.processes,
    }


def time_compiled(learner: Learner) -> tuple[float, float]:
    """Return the seconds of forward and backward of a micro-batch, compiled and eager.

    Call it after a phase of training, in which the model was compiled. The state stays the same.
    Eager passes need more memory: infinite where there is not enough of it.
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
    compiled_s, eager_s = fastest_s(model), math.inf
    try:
        eager_s = fastest_s(model.forward)
    except torch.OutOfMemoryError:
        learner.release_memory()
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)
    return compiled_s, eager_s
