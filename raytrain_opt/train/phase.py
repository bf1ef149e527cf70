"""What a process counts in a phase of training, and which exceptions make the phase fail."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raytrain_opt.clock import monotonic_s
from raytrain_opt.errors import RaytrainOptError, UserCodeError, is_lost_connection, origin
from raytrain_opt.results import TrainTotals
from raytrain_opt.train.micro_batches import MicroBatches

_MAX_TEXT = 500
# Messages by which torch, cuDNN, cuBLAS and the CPU allocator report that memory ran out, in
# errors other than torch.OutOfMemoryError.
_OUT_OF_MEMORY_TEXTS = (
    "out of memory",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "unable to find an engine to execute this computation",  # no room for any plan of cuDNN
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",  # no room for its handle
    "can't allocate memory",
    "not enough memory",
)


@dataclass
class Phase:
    """One phase (`Learner.begin`), and its sums since they were last taken."""

    epoch: int
    micro_batches: MicroBatches
    search: bool
    held_out: int
    losses: list[Tensor] = field(default_factory=list)  # of each step: [micro-batches], float64
    steps: int = 0
    samples: int = 0
    skipped: int = 0
    data_wait_s: float = 0.0
    started_s: float = field(default_factory=monotonic_s)
    failure: Exception | None = None  # the first that a pass or an update raised (`failed_steps`)

    def take_totals(self) -> TrainTotals:
        """Return the sums over all processes, and begin new ones; this waits for the device.

        Each loss is 0 in all processes but one, so an all-reduce in any order is exact.
        """
        rows = torch.stack(self.losses) if self.losses else torch.zeros(0, 1)
        counts = [rows.new_full((1,), count) for count in (self.samples, self.skipped)]
        message = torch.cat([rows.view(-1), *counts])
        if dist.is_initialized():
            dist.all_reduce(message)
        message = message.cpu()
        losses = tuple(map(sum, message[:-2].view_as(rows).tolist()))
        samples, skipped = map(int, message[-2:].tolist())
        totals = TrainTotals(
            steps=self.steps,
            samples=samples,
            losses=losses,
            skipped=skipped,
            duration_s=monotonic_s() - self.started_s,
            data_wait_s=self.data_wait_s,
            failure=first_failure(describe(self.failure), sum(losses)),
        )
        self.losses, self.started_s = [], monotonic_s()
        self.steps = self.samples = self.skipped = 0
        self.data_wait_s = 0.0
        return totals


def first_failure(own: str, total: float) -> str:
    """Return the failure of the first rank that has one, where the total of all is not finite."""
    if math.isfinite(total) or not dist.is_initialized():
        return own
    of_ranks = [own] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    return next(filter(None, of_ranks), "")


def describe(error: Exception | None) -> str:
    """Return the type and the text of an exception, which may contain all values of a tensor."""
    return "" if error is None else f"{type(error).__name__}: {error}"[:_MAX_TEXT]


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(
        text in str(error) for text in _OUT_OF_MEMORY_TEXTS
    )


@contextmanager
def failed_steps(
    phase: Phase, model: nn.Module, repair: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Let a candidate diverge whose pass or update raises inside; so does a ruined training.

    The loss of the phase becomes NaN. The phase goes on, because other ranks wait for this one's
    gradients: `repair` makes up for those that are missing. Raises UserCodeError if they wait in a
    collective of the model's own, and other exceptions.
    """
    try:
        yield
    except Exception as error:
        may_fail = phase.search or _is_ruined(model, error)
        if not (may_fail and _is_failed_step(error)):
            raise
        phase.failure = phase.failure or error
        for losses in phase.losses[-1:]:
            losses.fill_(math.nan)
        try:
            repair()
        except RuntimeError as broken:
            raise UserCodeError(
                f"{describe(error)} (at {origin(error)}) was raised by this worker, while others "
                "wait for it in a collective that the model calls itself; raise it on all "
                "workers, or on none"
            ) from broken


def _is_failed_step(error: Exception) -> bool:
    """Return whether an exception may come from the numbers of a pass or an update."""
    is_other = isinstance(error, RaytrainOptError) or is_out_of_memory(error)
    return not (is_other or is_lost_connection(error) or "CUDA error" in str(error))


def _is_ruined(model: nn.Module, error: Exception) -> bool:
    """Return whether weights, gradients or tensors of the functions that raised are not finite."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    values = [*model.parameters(), *(p.grad for p in model.parameters())]
    values += [value for frame in frames for value in frame.f_locals.values()]
    tensors = (v.detach() for v in values if isinstance(v, Tensor) and v.is_floating_point())
    return not all(bool((tensor < math.inf).all()) for tensor in tensors)  # -inf may be a mask
