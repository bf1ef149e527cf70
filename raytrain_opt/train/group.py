"""How one process takes part in data parallelism: alone, or with DDP; and its threads."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import signature
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.nn.parallel import DistributedDataParallel

from raytrain_opt.clock import monotonic_s
from raytrain_opt.config.optimizer import ParallelSection
from raytrain_opt.errors import JobError, Problem
from raytrain_opt.train.buckets import BackwardOrder, Plan, fastest, plan_buckets
from raytrain_opt.train.noise import GroupWatch, NoiseWatch, NoWatch, Pair, Scale
from raytrain_opt.train.timing import Marks, marks_for

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
# A new DDP sends other buckets in its first step, and makes the planned ones in the second.
UNCOUNTED_STEPS = 2
COUNTED_STEPS = 5


class Parallel(Protocol):
    """What the training loop needs of its process group."""

    @property
    def forward(self) -> nn.Module:
        """For a forward pass that is trained on. May be another one after `after_step`."""
        ...

    def begin(self, shares: float, scale: Scale) -> None:
        """A phase begins: this process computes `shares` shares of each update, and multiplies
        their losses by `scale`.
        """
        ...

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one share; `last`: the last one of an update."""
        ...

    def after_step(self) -> None:
        """To be called after each update."""
        ...

    def finish(self) -> tuple[Pair, ...]:
        """The phase is over: squared gradient norms of some of its updates (`train.noise`)."""
        ...

    def report(self) -> dict[str, object]:
        """What was chosen and measured, for the records."""
        ...


class Alone:
    """One process by itself: nothing is exchanged."""

    def __init__(self, model: nn.Module) -> None:
        self.forward = model

    def begin(self, shares: float, scale: Scale) -> None:
        """Nothing to prepare."""

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """Nothing to wait for."""
        return nullcontext()

    def after_step(self) -> None:
        """Nothing to adapt."""

    def finish(self) -> tuple[Pair, ...]:
        """Nothing was measured."""
        return ()

    def report(self) -> dict[str, object]:
        """Nothing was chosen."""
        return {}


class DataParallel:
    """DDP whose buckets may be planned, or tried and chosen, while training goes on.

    A plan needs the order of the backward pass, so the first step goes with torch's own
    buckets, as DDP itself needs it to learn that order. Then the model is wrapped anew for
    each plan. That makes no step different but in the order of additions: two workers get
    the same bits from every plan; with more of them, a ring begins each part of a message at
    another rank, and the last bits may change.
    """

    def __init__(self, model: nn.Module, section: ParallelSection) -> None:
        self._model, self._section = model, section
        self._device = next(model.parameters()).device
        self._marks: Marks = _NoMarks()
        self._in_update = False
        self._plan: Plan | None = None
        self._tried: list[dict[str, object]] = []
        self._wrap_s: list[float] = []
        self._noise: NoiseWatch = GroupWatch(model) if section.noise_scale else NoWatch()
        self.forward = self._wrapped({}, init_sync=True)
        self._adaptation = self._adapt()
        next(self._adaptation, None)

    def begin(self, shares: float, scale: Scale) -> None:
        """A phase begins; see `Parallel`."""
        self._noise.begin(shares, scale)

    @contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        """Around forward and backward of one share; gradients are exchanged in the last."""
        if not self._in_update:
            self._in_update = True
            self._marks.set()
        with self._noise.share(last), nullcontext() if last else self.forward.no_sync():
            yield

    def after_step(self) -> None:
        """To be called after each update, by all workers. May wrap anew and drop gradients."""
        self._marks.set()
        self._in_update = False
        next(self._adaptation, None)

    def finish(self) -> tuple[Pair, ...]:
        """See `Parallel`. All workers call it together: it exchanges a message."""
        return self._noise.finish()

    def report(self) -> dict[str, object]:
        """The plan in use, the seconds of the steps of each one tried, and what wrapping cost.

        Of each step, the seconds of the slowest worker, without the wait for its first batch.
        """
        plan = self._plan
        return {
            "buckets": "default" if plan is None else plan.name,
            "buckets_mib": None if plan is None else plan.sizes_mib,
            "compression": self._section.compression,
            "tried": list(self._tried),
            "wrap_s": list(self._wrap_s),
        }

    def _adapt(self) -> Iterator[None]:
        """Goes on by one `yield` with each step."""
        if self._section.buckets == "default":
            return
        order = BackwardOrder(self._model)
        yield
        indices = _of_first_rank(order.finish(), self._device)
        plans = plan_buckets(self._section.buckets, order.gradients(indices))
        if len(plans) == 1:
            self._use(plans[0])
            return
        seconds = []
        for plan in plans:
            seconds.append((yield from self._try(plan)))
        seconds = _of_slowest_rank(seconds, self._device)
        self._tried = [
            {"buckets": plan.name, "buckets_mib": plan.sizes_mib, "step_s": each}
            for plan, each in zip(plans, seconds, strict=True)
        ]
        self._use(plans[fastest(seconds)])

    def _try(self, plan: Plan) -> Generator[None, None, list[float]]:
        """Seconds of each counted step with this plan, on this rank."""
        self._use(plan)
        for _ in range(UNCOUNTED_STEPS):
            yield
        self._marks = marks_for(self._device)
        for _ in range(COUNTED_STEPS):
            yield
        marks, self._marks = self._marks, _NoMarks()
        # A step and the pause after it take turns.
        return marks.gaps_s()[::2]

    def _use(self, plan: Plan) -> None:
        arguments = plan.ddp_arguments()
        self._plan = plan
        if arguments == self._arguments:
            return
        started_s = monotonic_s()
        # The gradients are views of the old buckets: those go before the new ones come. The
        # old hooks go with the old DDP.
        self._model.zero_grad(set_to_none=True)
        del self.forward
        # All ranks hold the same weights, and each keeps its own running statistics.
        self.forward = self._wrapped(arguments, init_sync=False)
        self._wrap_s.append(monotonic_s() - started_s)

    def _wrapped(self, arguments: dict[str, Any], *, init_sync: bool) -> DistributedDataParallel:
        ddp = DistributedDataParallel(
            self._model,
            device_ids=[self._device] if self._device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            init_sync=init_sync,
            **_SYNC_BUFFERS,
            **arguments,
        )
        if self._section.compression != "none":
            _, hook = _COMPRESSION[self._section.compression]
            ddp.register_comm_hook(None, hook)
        self._arguments = arguments
        return ddp


def alone(model: nn.Module, section: ParallelSection) -> Alone:
    """`distribute` for one process."""
    return Alone(model)


def distribute(model: nn.Module, section: ParallelSection) -> DataParallel:
    """Wrap for data parallelism over the process group, which must be there.

    BatchNorm statistics stay per process while training, and gradients lie in the buckets in
    which they are sent. All ranks call this at the same place: it exchanges messages. Raises
    JobError when the group cannot add numbers of the type that `compression` asks for.
    """
    if section.compression != "none":
        _require_compression(section.compression, next(model.parameters()).device)
    return DataParallel(model, section)


def use_threads(count: int) -> None:
    """Compute threads of this process on CPU."""
    torch.set_num_threads(max(1, count))


class _NoMarks:
    """Nothing is measured."""

    def set(self) -> None: ...

    def clear(self) -> None: ...

    def gaps_s(self) -> list[float]:
        return []


def _require_compression(name: str, device: torch.device) -> None:
    dtype, _ = _COMPRESSION[name]
    try:
        dist.all_reduce(torch.ones(1, dtype=dtype, device=device))
    except RuntimeError as error:
        rule = f"{dist.get_backend()} cannot add such numbers on {device.type}: {error}"
        hint = "none sends gradients as they are"
        raise JobError([Problem("parallel.compression", rule, name, hint)]) from error


def _of_first_rank(order: Sequence[int], device: torch.device) -> list[int]:
    tensor = torch.tensor(order, device=device)
    dist.broadcast(tensor, src=0)
    return [int(index) for index in tensor.tolist()]


def _of_slowest_rank(seconds: list[list[float]], device: torch.device) -> list[list[float]]:
    """Each step's largest over the ranks, so that all of them choose the same."""
    tensor = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return [[float(second) for second in steps] for steps in tensor.tolist()]
