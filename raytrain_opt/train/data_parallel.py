"""Data parallelism of one process: a single process, or DistributedDataParallel (DDP)."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import signature
from typing import Any

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
from raytrain_opt.errors import JobError, Problem
from raytrain_opt.train.background import start_thread
from raytrain_opt.train.gradient_buckets import BackwardOrder, BucketPlan, fastest, plan_buckets
from raytrain_opt.train.gradient_noise import NoiseTracker, Pair, Scale
from raytrain_opt.train.load_balance import LoadBalance, MeasuredShares
from raytrain_opt.train.micro_batches import MicroBatches
from raytrain_opt.train.step_check import unused_parameters
from raytrain_opt.train.step_timer import StepTimer, step_timer_for

# torch 2.15 gave `broadcast_buffers` a new name and warns about the old one.
_SYNC_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers"
    if "forward_sync_buffers" in signature(DistributedDataParallel).parameters
    else "broadcast_buffers": False
}
_COMPRESSION: dict[str, tuple[torch.dtype, Callable[..., Any]]] = {
    "bf16": (torch.bfloat16, bf16_compress_hook),
    "fp16": (torch.float16, fp16_compress_hook),
}
# A new DDP rebuilds its buckets in its second step, so two steps are not timed. The median of
# five is not changed by two slow ones.
WARMUP_STEPS = 2
TIMED_STEPS = 5
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

    def unwrapped(self) -> AbstractContextManager[None]:
        """Take the model out of DDP while something that DDP would disturb is done to it."""
        return nullcontext()

    def exchange_s(self) -> float:
        """Return the seconds of an exchange of all gradients; all ranks must call it together."""
        return 0.0

    def end_phase(self) -> tuple[Pair, ...]:
        """End the phase; return squared gradient norms of some updates (`gradient_noise`)."""
        return ()

    def report(self) -> dict[str, object]:
        """Return what was chosen and measured, for the records."""
        return {}


class DataParallel(Parallel):
    """DDP with gradient buckets that can be planned, or chosen by timing, during training.

    A plan needs the order of the backward pass, so the first step uses torch's default
    buckets, from which DDP itself learns that order. Then the model is wrapped again for each
    plan. Results differ only in the order of additions: two workers get the same bits from
    every plan; with more workers, a ring all-reduce starts each part of a message at another
    rank, and the last bits may change.
    """

    distributed = True
    forward: DistributedDataParallel

    def __init__(self, model: nn.Module, section: ParallelSection) -> None:
        self._model, self._section = model, section
        self._device = next(model.parameters()).device
        self._timer: StepTimer = _NullTimer()
        self._in_update = self._has_updated = self._last = False
        # In a search: of the parameters whose gradients the current micro-batch has computed.
        self._accumulated: set[nn.Parameter] = set()
        self._hooks: list[RemovableHandle] = []
        self._plan: BucketPlan | None = None
        self._timings: list[dict[str, object]] = []
        self._wrap_s: list[float] = []
        world_size = dist.get_world_size()
        self._balance = (
            MeasuredShares(world_size, self._device)
            if section.measures_shares
            else LoadBalance(section.speeds or [1.0] * world_size)
        )
        self._noise = NoiseTracker(model, enabled=section.noise_scale)
        self._arguments: dict[str, Any] = {}
        self.forward = self._wrap(self._arguments, init_sync=True)
        self._bucket_choice = self._choose_buckets()
        next(self._bucket_choice, None)

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
        if not self._in_update:
            self._in_update = True
            self._timer.mark()
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
        """Continue the choice of buckets on all workers; it may drop gradients.

        Raises JobError for parameters without a gradient, for which other workers would wait.
        """
        named = self._model.named_parameters()
        unused = [name for name, p in named if p.grad is None and p.requires_grad]
        if problem := unused_parameters(unused, at_random=self._has_updated):
            raise JobError([problem])
        self._has_updated = True
        self._timer.mark()
        self._balance.after_update()
        self._in_update = False
        next(self._bucket_choice, None)

    def end_phase(self) -> tuple[Pair, ...]:
        self._balance.end_phase()
        return self._noise.end_phase()

    def report(self) -> dict[str, object]:
        """Return the plan in use, step times (of the slowest worker) and the cost of wrapping."""
        plan, speeds = self._plan, self.speeds
        return {
            "mode": self._section.mode,
            "speeds": None
            if self._section.mode == "sync"
            else [round(speed / max(speeds), 3) for speed in speeds],
            "buckets": "default" if plan is None else plan.name,
            "buckets_mib": None if plan is None else plan.sizes_mib,
            "compression": self._section.compression,
            "tried": list(self._timings),
            "wrap_s": list(self._wrap_s),
        }

    def _choose_buckets(self) -> Iterator[None]:
        """Advance by one `yield` with each training step."""
        order = BackwardOrder(self._model)
        yield
        indices = torch.tensor(order.finish(), device=self._device)
        if self._section.gradient_buckets == "default":
            return
        dist.broadcast(indices, src=0)
        gradients = order.gradients(indices.tolist())
        plans = plan_buckets(self._section.gradient_buckets, gradients)
        if len(plans) == 1:
            self._use(plans[0])
            return
        own_step_s = []
        for plan in plans:
            own_step_s.append((yield from self._time(plan)))
        # Those of the slowest rank, so that all ranks choose the same plan.
        all_step_s = torch.tensor(own_step_s, dtype=torch.float64, device=self._device)
        dist.all_reduce(all_step_s, op=dist.ReduceOp.MAX)
        step_s = all_step_s.tolist()
        self._timings = [
            {"buckets": plan.name, "buckets_mib": plan.sizes_mib, "step_s": seconds}
            for plan, seconds in zip(plans, step_s, strict=True)
        ]
        self._use(plans[fastest(step_s)])

    def _time(self, plan: BucketPlan) -> Generator[None, None, list[float]]:
        """Train with a plan; return the seconds of each timed step on this rank."""
        self._use(plan)
        for _ in range(WARMUP_STEPS):
            yield
        self._timer = step_timer_for(self._device)
        for _ in range(TIMED_STEPS):
            yield
        timer, self._timer = self._timer, _NullTimer()
        # Intervals alternate between a step and the pause after it.
        return timer.intervals_s()[::2]

    def _use(self, plan: BucketPlan) -> None:
        arguments = plan.ddp_arguments()
        self._plan = plan
        if arguments == self._arguments:
            return
        started_s = monotonic_s()
        with self.unwrapped():
            self._arguments = arguments
        self._wrap_s.append(monotonic_s() - started_s)

    @contextmanager
    def unwrapped(self) -> Iterator[None]:
        """Remove DDP and its hooks, and wrap the model anew afterwards. Drops gradients.

        All ranks must do this together.
        """
        # The gradients are views of the old buckets: free these before the new ones are
        # allocated. The old hooks are removed with the old DDP, which torch before 2.15 leaves in
        # a cycle of references.
        self._model.zero_grad(set_to_none=True)
        del self.forward
        gc.collect()
        try:
            yield
        finally:
            # All ranks have equal weights already, and each keeps its own running statistics.
            self.forward = self._wrap(self._arguments, init_sync=False)

    def exchange_s(self) -> float:
        sizes = (p.numel() for p in self._model.parameters() if p.requires_grad)
        gradients, times_s = torch.zeros(sum(sizes), device=self._device), []
        for _ in range(3):
            started_s = monotonic_s()
            dist.all_reduce(gradients)
            gradients[0].item()  # waits for it
            times_s.append(monotonic_s() - started_s)
        return min(times_s)

    def _wrap(self, arguments: dict[str, Any], *, init_sync: bool) -> DistributedDataParallel:
        ddp = DistributedDataParallel(
            self._model,
            device_ids=[self._device] if self._device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            init_sync=init_sync,
            **_SYNC_BUFFERS,
            **arguments,
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

    BatchNorm statistics stay per process during training, and gradients are views of the
    buckets in which they are sent. All ranks must call this together, as it communicates.
    Raises JobError when the group cannot add numbers of the type that `compression` needs.
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


class _NullTimer(StepTimer):
    """Measures nothing."""

    def mark(self) -> None: ...
