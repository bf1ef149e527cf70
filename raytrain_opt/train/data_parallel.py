"""Data parallelism of one process: a single process, or DistributedDataParallel (DDP); sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from inspect import signature
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from raytrain_opt.clock import monotonic_s
from raytrain_opt.config.updates import ParallelSection
from raytrain_opt.errors import DataError, JobError, Problem
from raytrain_opt.results import EvalTotals, TrainTotals
from raytrain_opt.threads import start_thread
from raytrain_opt.train.gradient_noise import NoiseTracker, Pair, Scale
from raytrain_opt.train.load_balance import LoadBalance, MeasuredShares
from raytrain_opt.train.micro_batches import MicroBatches
from raytrain_opt.train.step_check import unused_parameters
from raytrain_opt.train.task import Task, aggregate, aggregates, metric_of

Totals = TypeVar("Totals", bound=TrainTotals | EvalTotals)

_DDP_ARGUMENTS = signature(DistributedDataParallel).parameters
# torch 2.15 gave `broadcast_buffers` a new name and warns about the old one.
_SYNC_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers"
    if "forward_sync_buffers" in _DDP_ARGUMENTS
    else "broadcast_buffers": False
}
_COMPRESSION: dict[str, tuple[torch.dtype, Callable[..., Any]]] = {
    "bf16": (torch.bfloat16, bf16_compress_hook),
    "fp16": (torch.float16, fp16_compress_hook),
}
# Elements of the first messages: NCCL uses separate connections for small and large ones.
_FIRST_MESSAGES = {"cpu": (1,), "cuda": (1, 25 * 2**18)}


class Parallel:
    """What the training loop needs from its process group; this class is a single process."""

    distributed = False
    forward: nn.Module

    speeds: Sequence[float] = ()  # of the workers, by rank

    def __init__(self, model: nn.Module, section: ParallelSection) -> None:
        self.forward = model
        self._indices = range(0)

    def begin_phase(
        self,
        steps: int,
        micro_batches: MicroBatches,
        scale: Scale,
        read_ahead: Callable[[], int],
        search: bool = False,
    ) -> None:
        """Begin a phase of `steps` complete batches.

        Losses are multiplied by `scale`, loaders are `read_ahead` ahead. In a `search` a
        micro-batch may raise.
        """
        self._indices = micro_batches.indices

    def indices(self, update: int) -> range:
        """Return which micro-batches this process computes in an update of the phase, from 0."""
        return self._indices

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """Wrap forward and backward of one micro-batch; `last` marks the last of an update."""
        return nullcontext()

    def finish_backward(self) -> None:
        """Send no gradients in place of those that are missing, where a micro-batch raised."""

    def after_step(self) -> None:
        """Call this after each update."""

    def end_phase(self) -> tuple[Pair, ...]:
        """End the phase; return squared gradient norms of some updates (`gradient_noise`)."""
        return ()

    def report(self) -> dict[str, object]:
        """Return what was chosen and measured, for the records."""
        return {}


class DataParallel(Parallel):
    """DistributedDataParallel, which sends gradients in buckets during the backward pass.

    BatchNorm statistics stay per process, and gradients are views of the buckets.
    """

    distributed = True
    forward: DistributedDataParallel

    def __init__(self, model: nn.Module, section: ParallelSection) -> None:
        self._model, self._section = model, section
        self._device = next(model.parameters()).device
        self._has_updated = self._last = False
        # In a search: of the parameters whose gradients the current micro-batch has computed.
        self._accumulated: set[nn.Parameter] = set()
        self._hooks: list[RemovableHandle] = []
        world_size = dist.get_world_size()
        self._balance = (
            MeasuredShares(world_size, self._device)
            if section.measures_shares
            else LoadBalance(section.speeds or [1.0] * world_size)
        )
        self._noise = NoiseTracker(model)
        self.forward = self._wrap()

    @property
    def speeds(self) -> Sequence[float]:
        return self._balance.speeds

    @speeds.setter
    def speeds(self, speeds: Sequence[float]) -> None:
        self._balance.speeds = speeds

    def begin_phase(
        self,
        steps: int,
        micro_batches: MicroBatches,
        scale: Scale,
        read_ahead: Callable[[], int],
        search: bool = False,
    ) -> None:
        while self._hooks:
            self._hooks.pop().remove()
        if search:
            trained: list[Any] = [p for p in self._model.parameters() if p.requires_grad]
            self._hooks = [p.register_post_accumulate_grad_hook(self._note) for p in trained]
        self._balance.begin_phase(micro_batches.count, read_ahead)
        self._noise.begin_phase(steps, micro_batches.divisor, scale)

    def indices(self, update: int) -> range:
        return self._balance.indices(update)

    @contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        """Wrap one micro-batch; gradients are exchanged in the last one of an update."""
        self._last, self._accumulated = last, set()
        with self._noise.micro_batch(last), nullcontext() if last else self.forward.no_sync():
            yield

    def _note(self, parameter: nn.Parameter) -> None:
        self._accumulated.add(parameter)

    def finish_backward(self) -> None:
        """Send zeros for the gradients that the micro-batch has not sent before it raised.

        Other ranks wait for them, in the last micro-batch of an update.
        """
        if not self._last:
            return
        if not self._accumulated:  # DDP expects gradients after a forward pass only
            self.forward.module = nn.Identity()
            try:
                self.forward(torch.zeros((), device=self._device))
            finally:
                self.forward.module = self._model
        trained = [p for p in self._model.parameters() if p.requires_grad]
        missing = [p for p in trained if p not in self._accumulated]
        torch.autograd.backward(missing, [torch.zeros_like(p) for p in missing])

    def after_step(self) -> None:
        """Raise JobError for parameters without a gradient, for which other workers would wait."""
        named = self._model.named_parameters()
        unused = [name for name, p in named if p.grad is None and p.requires_grad]
        if problem := unused_parameters(unused, at_random=self._has_updated):
            raise JobError([problem])
        self._has_updated = True
        self._balance.after_update()

    def end_phase(self) -> tuple[Pair, ...]:
        self._balance.end_phase()
        return self._noise.end_phase()

    def report(self) -> dict[str, object]:
        section, largest = self._section, max(self.speeds)
        return {
            "mode": section.mode,
            "speeds": None
            if section.equal_shares
            else [round(v / largest, 3) for v in self.speeds],
            "gradient_buckets": section.gradient_buckets,
            "compression": section.compression,
        }

    def _wrap(self) -> DistributedDataParallel:
        ddp = DistributedDataParallel(
            self._model,
            device_ids=[self._device] if self._device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            **_SYNC_BUFFERS,
            **bucket_arguments(self._section.gradient_buckets),
        )
        _, hook = _COMPRESSION.get(self._section.compression, (None, allreduce_hook))
        if isinstance(self._balance, MeasuredShares):
            ddp.register_comm_hook(None, self._timed(hook))
        elif self._section.compression != "none":
            ddp.register_comm_hook(None, hook)
        return ddp

    def _timed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return a hook that also notes when the last gradients of an update are computed."""

        def note_and_exchange(state, bucket):  # type: ignore[no-untyped-def]  # DDP checks types
            if bucket.is_last():
                self._balance.on_gradients()
            return hook(state, bucket)

        return note_and_exchange


def begin_communicator_warmup(device: torch.device) -> Future[float]:
    """Connect the workers in a background thread; return the seconds it takes.

    Meanwhile, model and data are built. NCCL connects on first use, which would make the first
    step slow. gloo connects when the process group is initialized, so initialize it before. Until
    the result is there, this process must not communicate, or the ranks would mix up their
    messages: call `distribute` only afterwards.
    """
    return start_thread(lambda: _send_first_messages(device))


def _send_first_messages(device: torch.device) -> float:
    started_s = monotonic_s()
    # On a separate stream, so that it does not wait for the construction of the model.
    stream = None
    if device.type == "cuda":
        # A thread begins with the first GPU, where leaving the stream would take memory, too.
        torch.cuda.set_device(device)
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for elements in _FIRST_MESSAGES[device.type]:
            message = torch.zeros(elements, device=device)
            dist.all_reduce(message)
            dist.broadcast(message, src=0)
        if stream is not None:
            stream.synchronize()
    return monotonic_s() - started_s


def distribute(model: nn.Module, section: ParallelSection) -> DataParallel:
    """Wrap a model for data parallelism over the process group, which must be initialized.

    All ranks must call this together, as it communicates. Raises JobError when the group cannot
    add numbers of the type that `compression` needs.
    """
    name, device = section.compression, next(model.parameters()).device
    if name != "none":
        try:
            dist.all_reduce(torch.ones(1, dtype=_COMPRESSION[name][0], device=device))
        except RuntimeError as error:
            rule = f"{dist.get_backend()} cannot add such numbers on {device.type}: {error}"
            hint = "use none, which sends gradients without compression"
            raise JobError([Problem("parallel.compression", rule, name, hint)]) from error
    return DataParallel(model, section)


def bucket_arguments(
    sizes_mib: list[int] | None, takes_list: bool = "bucket_cap_mb_list" in _DDP_ARGUMENTS
) -> dict[str, Any]:
    """Return DDP's arguments for buckets of these sizes, in the order of the backward pass.

    DDP learns that order in its first step. Torch before 2.15 takes one size: the last one.
    """
    if sizes_mib is None:
        return {}
    return {"bucket_cap_mb_list": sizes_mib} if takes_list else {"bucket_cap_mb": sizes_mib[-1]}


def reduce_sums(values: Sequence[float], device: torch.device) -> list[float]:
    """Sum each value over the process group, in float64; without a group, return the values."""
    if not dist.is_initialized():
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    return [float(value) for value in tensor.tolist()]


def sum_over_ranks(totals: Totals, device: torch.device) -> Totals:
    """Return the totals of the process group; times are this rank's."""
    if isinstance(totals, EvalTotals):
        columns = (totals.samples, totals.loss_squares, *totals.sums.values())
        samples, squares, *sums = reduce_sums(columns, device)
        named = dict(zip(totals.sums, sums, strict=True))
        failure = _first_failure(totals.failure, sum(sums))
        scored = replace(totals, samples=int(samples), sums=named, loss_squares=squares)
        return replace(scored, failure=failure)
    values = (totals.samples, totals.loss_sum, totals.skipped)
    samples, loss_sum, skipped = reduce_sums(values, device)
    failure = _first_failure(totals.failure, loss_sum)
    summed = replace(totals, samples=int(samples), loss_sum=loss_sum, skipped=int(skipped))
    return replace(summed, failure=failure)


def aggregate_ranks(task: Task, totals: EvalTotals) -> EvalTotals:
    """Return the sums of all ranks with the metrics of the task's `aggregate`, alike on all.

    The first rank computes them from the outputs of all ranks, which are in the order of the
    samples. They are NaN if the loss is not finite. Raises DataError.
    """
    if not aggregates(task):
        return totals
    unknown = replace(totals, outputs=None, aggregated={metric_of(task).name: math.nan})
    if not math.isfinite(totals.loss):
        return unknown
    parts: list[Any] = [totals.outputs]
    if dist.is_initialized():
        is_first = dist.get_rank() == 0
        parts = [None] * dist.get_world_size()
        dist.gather_object(totals.outputs, parts if is_first else None)
    result: list[Any] = [None]
    if parts[0] is not None:
        try:
            result = [aggregate(task, parts)]
        except DataError as error:
            result = [error]
    if dist.is_initialized():
        dist.broadcast_object_list(result)
    if isinstance(result[0], DataError):
        raise result[0]
    return replace(unknown, aggregated=result[0])


def _first_failure(own: str, total: float) -> str:
    """Return the failure of the first rank that has one, where the total of all is not finite."""
    if math.isfinite(total) or not dist.is_initialized():
        return own
    of_ranks = [own] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    return next(filter(None, of_ranks), "")
