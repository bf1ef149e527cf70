"""Assign micro-batches to workers, bound the age of their weights, choose gradients of updates.

Pure: no processes, no clock.

Asynchronous data parallelism with a bounded staleness (after Ho et al., SSP, NIPS 2013). Each step
of an epoch is split into P micro-batches, P the number of workers. Any worker claims the next
micro-batch, so fast workers compute more. The gradients of any P micro-batches make one update, so
that the rate, the momentum and the number of updates mean the same as in synchronous training.

    P        micro-batches of one update
    u        updates done so far, the version of the weights
    q        version of the weights that a micro-batch's gradient is computed on
    s        bound of the staleness, u - q of the update that the gradient goes into

Every gradient has a deadline, update q + s. Of the gradients that are computed or waiting, in the
order of their deadlines, the i-th (from 0) can go into update u + i // P at the earliest. So no
gradient is late if that is no later than its deadline, for all of them; that is kept true
(1) when a micro-batch begins: at most P (s + 1) of them at a time, on weights that are new enough;
(2) when an update is made: of the P gradients with the earliest deadlines, and only if the
    gradients that are still being computed can meet theirs. Else the update waits for them.
With s = 0, and micro-batches begun in order, these are the micro-batches of one step: the
synchronous result.

A micro-batch that is given to another worker gets a new number, the old one plus that of all
micro-batches. So a gradient of the first worker, which was only slow or cut off, is none of an
update's, whenever it arrives.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from raytrain_opt.optim.epoch_steps import ramp_factor
from raytrain_opt.results import TrainTotals
from raytrain_opt.train.learner_config import LearnerConfig

# A worker counts as dead when it was silent for ten times its longest micro-batch, but at least
# ten seconds (a pause of the operating system or the network). Before its first micro-batch, which
# may compile kernels and connect, it may be silent for two minutes.
_SILENT_MICRO_BATCHES = 10.0
_SILENT_S = 10.0
_SILENT_AT_START_S = 120.0


@dataclass(frozen=True)
class EpochPhase:
    """The steps of `epoch` from `first_step` on, each at its rate, in `micro_batches` parts.

    `bound`: s, None for no bound. `damped`: divide a gradient by 1 + its staleness. `in_order`: no
    micro-batch of a step begins before the update of the step before (not where loader processes
    claim ahead: workers would wait for each other). `weight_decay_factor` multiplies the job's
    weight decay.
    """

    id: str
    epoch: int
    first_step: int
    lrs: tuple[float, ...]
    micro_batches: int
    bound: int | None
    damped: bool = False
    in_order: bool = False
    weight_decay_factor: float = 1.0

    @property
    def updates(self) -> int:
        """Number of updates."""
        return len(self.lrs)

    @property
    def size(self) -> int:
        """Number of micro-batches of all updates together."""
        return self.updates * self.micro_batches

    def index_of(self, number: int) -> tuple[int, int]:
        """Return the step of the epoch and the micro-batch of that step."""
        step, micro_batch = divmod(number % self.size, self.micro_batches)
        return self.first_step + step, micro_batch


def epoch_phase(
    config: LearnerConfig,
    epoch: int,
    first_step: int,
    lrs: tuple[float, ...],
    weight_decay_factor: float,
) -> EpochPhase:
    """Return the phase of these steps with the learners' settings."""
    ramp, parallel = config.batch_ramp, config.parallel
    factor = ramp_factor(ramp.steps, epoch) if ramp.grow == "accumulation" else 1
    bound = parallel.staleness_bound
    reads_ahead = config.data.loader_workers != 0
    return EpochPhase(
        id=f"{epoch}.{first_step + len(lrs)}",
        epoch=epoch,
        first_step=first_step,
        lrs=lrs,
        micro_batches=config.worker_count * factor,
        bound=bound,
        damped=parallel.damp_stale_gradients,
        in_order=bound == 0 and not reads_ahead,
        weight_decay_factor=weight_decay_factor,
    )


@dataclass(frozen=True)
class Update:
    """One update: gradients by number of their micro-batch with their weights, and the rate.

    `number` counts from 0.
    """

    phase: str
    number: int
    lr: float
    weights: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class MicroBatchDone:
    """A micro-batch whose gradient has reached the weights: sums over its samples."""

    number: int
    loss_sum: float
    samples: int
    correct: int
    skipped: int


@dataclass(frozen=True)
class Staleness:
    """Number of gradients by staleness, from 0."""

    counts: tuple[int, ...] = ()

    @property
    def mean(self) -> float:
        """Mean over all gradients; 0 without any."""
        return sum(k * n for k, n in enumerate(self.counts)) / max(sum(self.counts), 1)

    def to_json(self) -> dict[str, object]:
        """Return the value of a line in epochs.jsonl."""
        return {"counts": list(self.counts), "mean": self.mean, "max": len(self.counts) - 1}


@dataclass
class _Worker:
    heard_s: float
    longest_s: float = 0.0
    start_s: float | None = None

    def silence_limit_s(self) -> float:
        if not self.longest_s:
            return _SILENT_AT_START_S
        return max(_SILENT_MICRO_BATCHES * self.longest_s, _SILENT_S)


@dataclass
class SspScheduler:
    """The state of one phase. Times are monotonic seconds, given by the caller."""

    phase: EpochPhase
    version: int = 0
    totals: TrainTotals = TrainTotals(0, 0, 0.0, 0, 0, 0.0, 0.0)
    _next: int = 0
    _returned: list[int] = field(default_factory=list)
    _claims: dict[int, int] = field(default_factory=dict)  # micro-batch -> worker
    _begun: dict[int, int] = field(default_factory=dict)  # micro-batch -> version of its weights
    _waiting: dict[int, int] = field(default_factory=dict)  # gradient -> version of its weights
    _counts: Counter[int] = field(default_factory=Counter)
    _workers: dict[int, _Worker] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """Whether every micro-batch is in an update."""
        return self.version == self.phase.updates

    @property
    def staleness(self) -> Staleness:
        """Staleness of the gradients in the updates so far."""
        return Staleness(tuple(self._counts[k] for k in range(max(self._counts, default=-1) + 1)))

    def heard(self, worker: int, now_s: float) -> None:
        """Record a sign of life."""
        self._workers.setdefault(worker, _Worker(now_s)).heard_s = now_s

    def silent(self, now_s: float, waiting: Iterable[int] = ()) -> list[int]:
        """Return workers with micro-batches that were silent for too long, without `waiting`."""
        holders = set(self._claims.values()) - set(waiting)
        silences_s = {w: now_s - self._workers[w].heard_s for w in holders}
        return [w for w, s in silences_s.items() if s > self._workers[w].silence_limit_s()]

    def claim(self, worker: int, now_s: float) -> int | None:
        """Give the worker the next free micro-batch; None when all are claimed."""
        self.heard(worker, now_s)
        if self._returned:
            number = heapq.heappop(self._returned)
        elif self._next < self.phase.size:
            number, self._next = self._next, self._next + 1
        else:
            return None
        self._claims[number] = worker
        return number

    def leave(self, worker: int) -> list[Update]:
        """Free what a worker that died or restarted had not done, for others.

        Returns the updates that waited for it.
        """
        self._workers.pop(worker, None)
        for number in [n for n, owner in self._claims.items() if owner == worker]:
            del self._claims[number]
            self._begun.pop(number, None)
            heapq.heappush(self._returned, number + self.phase.size)
        return self._make_updates()

    @property
    def has_work(self) -> bool:
        """Whether there is a micro-batch to claim."""
        return bool(self._returned) or self._next < self.phase.size

    def owns(self, worker: int, number: int) -> bool:
        """Return whether the micro-batch is assigned to this worker."""
        return self._claims.get(number) == worker

    def has_begun(self, worker: int, number: int) -> bool:
        """Return whether this worker computes the micro-batch already."""
        return self.owns(worker, number) and number in self._begun

    def may_begin(self, number: int) -> bool:
        """Return whether rule (1) allows one more micro-batch to be computed now."""
        bound = self.phase.bound
        # Micro-batches of a dead worker may be missing in this step: waiting workers take them.
        in_order = self.phase.in_order and not self._returned
        if in_order and number % self.phase.size >= self.phase.micro_batches * (self.version + 1):
            return False
        if bound is None:
            return True
        return len(self._begun) + len(self._waiting) < self.phase.micro_batches * (bound + 1)

    def new_enough(self, version: int) -> bool:
        """Return whether rule (1) allows a micro-batch to begin on weights of this version."""
        if self.phase.bound is None or version >= self.version:
            return True
        versions = [*self._begun.values(), *self._waiting.values(), version]
        return self._in_time(versions, self.version)

    def begin(self, worker: int, number: int, version: int, now_s: float) -> None:
        """Record that the worker computes this micro-batch now, on weights of this version."""
        self.heard(worker, now_s)
        self._workers[worker].start_s = now_s
        self._begun[number] = version

    def done(self, worker: int, result: MicroBatchDone, now_s: float) -> list[Update]:
        """Record a gradient; return the updates that can be made now, in order.

        The result is ignored if the micro-batch has been given to another worker.
        """
        self.heard(worker, now_s)
        if not self.owns(worker, result.number) or result.number not in self._begun:
            return []
        record = self._workers[worker]
        if record.start_s is not None:
            record.longest_s = max(record.longest_s, now_s - record.start_s)
        del self._claims[result.number]
        self._waiting[result.number] = self._begun.pop(result.number)
        self.totals = _add(self.totals, result)
        return self._make_updates()

    def _make_updates(self) -> list[Update]:
        updates = []
        size = self.phase.micro_batches
        while len(self._waiting) >= size:
            # Of equal deadlines, the gradients that have waited longest.
            chosen = sorted(self._waiting, key=self._waiting.__getitem__)[:size]
            others = [v for n, v in self._waiting.items() if n not in chosen]
            if not self._in_time([*others, *self._begun.values()], self.version + 1):
                break
            updates.append(self._make_update(chosen))
        return updates

    def _make_update(self, chosen: list[int]) -> Update:
        weights = []
        # In their order in the step, so that sums do not depend on the order of arrival.
        for number in sorted(chosen, key=self.phase.index_of):
            staleness = self.version - self._waiting.pop(number)
            self._counts[staleness] += 1
            damping = 1 + staleness if self.phase.damped else 1
            weights.append((number, 1 / (self.phase.micro_batches * damping)))
        update = Update(self.phase.id, self.version, self.phase.lrs[self.version], tuple(weights))
        self.version += 1
        return update

    def _in_time(self, versions: list[int], update: int) -> bool:
        """Return whether gradients on weights of these versions can meet their deadlines.

        `update`: number of the next update.
        """
        bound = self.phase.bound
        if bound is None:
            return True
        return all(
            version + bound >= update + i // self.phase.micro_batches
            for i, version in enumerate(sorted(versions))
        )


def _add(totals: TrainTotals, result: MicroBatchDone) -> TrainTotals:
    return replace(
        totals,
        samples=totals.samples + result.samples,
        loss_sum=totals.loss_sum + result.loss_sum,
        correct=totals.correct + result.correct,
        skipped=totals.skipped + result.skipped,
    )
