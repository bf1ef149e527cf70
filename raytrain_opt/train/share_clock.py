"""Who computes what, on weights how old, and which gradients make an update. Pure.

Asynchronous data parallelism with a bounded staleness (after Ho et al., SSP, NIPS 2013). The steps
of an epoch are cut into shares, as many to a step as there are workers. Any worker claims the next
share, so fast ones do more. The gradients of any P shares make one update, so that the rate, the
momentum and the number of updates mean what they mean when all workers take each step together.

    P        shares of one update
    u        updates done so far, the version of the weights
    q        version of the weights that a share's gradient is computed on
    s        bound of the staleness, u - q of the update that the gradient goes into

Every gradient has a deadline, update q + s. Of those that are computed or waiting, in the order
of their deadlines, the i-th (from 0) can go into update u + i // P at the earliest. So nothing is
ever late if that is no later than its deadline, for all of them; that is kept true
(1) when a share begins: at most P (s + 1) of them at a time, on weights that are new enough;
(2) when an update is made: of the P gradients with the earliest deadlines, and only if those that
    are still being computed can make theirs. Else it waits for them.
With s = 0, and shares begun in order, these are the shares of one step: the synchronous result.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from raytrain_opt.config.schema import Job
from raytrain_opt.optim.batch_ramp import ramp_factor
from raytrain_opt.train.totals import TrainTotals

# A worker is taken for dead when nothing was heard of it for so many times its longest share, and
# so many seconds; before its first share, which may compile and connect, for so many.
_SILENT_SHARES = 10.0
_SILENT_S = 10.0
_SILENT_AT_FIRST_S = 120.0


@dataclass(frozen=True)
class Phase:
    """What is trained: the steps of `epoch` from `first_step` on, each at its rate, with `decay`
    times the weight decay, in `shares` shares each. `bound`: s; `damped`: divide a gradient by 1 +
    its staleness; `in_order`: no share of a step begins before the step before it is an update
    (where loader processes claim ahead, workers would wait for each other's).
    """

    id: str
    epoch: int
    first_step: int
    lrs: tuple[float, ...]
    shares: int
    bound: int | None
    damped: bool = False
    in_order: bool = False
    decay: float = 1.0

    @property
    def updates(self) -> int:
        """Of the whole phase."""
        return len(self.lrs)

    @property
    def size(self) -> int:
        """Shares of the whole phase."""
        return self.updates * self.shares

    def place(self, number: int) -> tuple[int, int]:
        """Step of the epoch and share of that step."""
        return self.first_step + number // self.shares, number % self.shares


def phase_of(job: Job, epoch: int, first_step: int, lrs: tuple[float, ...], decay: float) -> Phase:
    """These steps, as the job wants them trained."""
    factor = ramp_factor(job.batch_ramp, epoch) if job.ramp_by == "accumulation" else 1
    bound = job.parallel.staleness_bound
    reads_ahead = bool(getattr(job.data, "loader_workers", 0))
    return Phase(
        id=f"{epoch}.{first_step + len(lrs)}",
        epoch=epoch,
        first_step=first_step,
        lrs=lrs,
        shares=job.workers.count * factor,
        bound=bound,
        damped=job.parallel.staleness_lr,
        in_order=bound == 0 and not reads_ahead,
        decay=decay,
    )


@dataclass(frozen=True)
class Update:
    """One update: which gradients, each times its weight, at which rate. `number` from 0."""

    phase: str
    number: int
    lr: float
    weights: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Done:
    """A share whose gradient is where the weights are: sums over its samples."""

    number: int
    loss_sum: float
    samples: int
    correct: int
    skipped: int


@dataclass(frozen=True)
class Staleness:
    """How many gradients had which staleness."""

    counts: tuple[int, ...] = ()

    @property
    def mean(self) -> float:
        """Over all gradients; 0 without any."""
        return sum(k * n for k, n in enumerate(self.counts)) / max(sum(self.counts), 1)

    def to_record(self) -> dict[str, object]:
        """For epochs.jsonl."""
        return {"counts": list(self.counts), "mean": self.mean, "max": len(self.counts) - 1}


@dataclass
class _Worker:
    heard_s: float
    longest_s: float = 0.0
    began_s: float | None = None

    def limit_s(self) -> float:
        """Of its silence."""
        return (
            max(_SILENT_SHARES * self.longest_s, _SILENT_S)
            if self.longest_s
            else _SILENT_AT_FIRST_S
        )


@dataclass
class ShareClock:
    """The books of one phase. Times are monotonic seconds, given by the caller."""

    phase: Phase
    version: int = 0
    totals: TrainTotals = TrainTotals(0, 0, 0.0, 0, 0, 0.0, 0.0)
    _next: int = 0
    _returned: list[int] = field(default_factory=list)
    _claims: dict[int, int] = field(default_factory=dict)  # share -> worker
    _begun: dict[int, int] = field(default_factory=dict)  # share -> version of its weights
    _waiting: dict[int, int] = field(default_factory=dict)  # gradients: share -> version
    _counts: Counter[int] = field(default_factory=Counter)
    _workers: dict[int, _Worker] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """Every share is in an update."""
        return self.version == self.phase.updates

    @property
    def staleness(self) -> Staleness:
        """Of the gradients in the updates so far."""
        return Staleness(tuple(self._counts[k] for k in range(max(self._counts, default=-1) + 1)))

    def heard(self, worker: int, now_s: float) -> None:
        """A sign of life."""
        self._workers.setdefault(worker, _Worker(now_s)).heard_s = now_s

    def silent(self, now_s: float, waiting: Iterable[int] = ()) -> list[int]:
        """Workers with shares of which nothing was heard for too long, without those `waiting`."""
        holders = set(self._claims.values()) - set(waiting)
        late = {w: now_s - self._workers[w].heard_s for w in holders}
        return [w for w, silent_s in late.items() if silent_s > self._workers[w].limit_s()]

    def claim(self, worker: int, now_s: float) -> int | None:
        """The next share that nobody has; None when all are claimed."""
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
        """It died, or begins anew: what it had not done is for others. Returns the updates that
        waited for it.
        """
        self._workers.pop(worker, None)
        for number in [n for n, owner in self._claims.items() if owner == worker]:
            del self._claims[number]
            self._begun.pop(number, None)
            heapq.heappush(self._returned, number)
        return self._updates()

    @property
    def has_work(self) -> bool:
        """Whether there is anything to claim."""
        return bool(self._returned) or self._next < self.phase.size

    def owns(self, worker: int, number: int) -> bool:
        """Whether this worker is the one to compute the share."""
        return self._claims.get(number) == worker

    def may_begin(self, number: int) -> bool:
        """(1), the number of shares."""
        bound = self.phase.bound
        # What a dead worker had may be missing in this step: those who wait take its place.
        in_order = self.phase.in_order and not self._returned
        if in_order and number >= self.phase.shares * (self.version + 1):
            return False
        if bound is None:
            return True
        return len(self._begun) + len(self._waiting) < self.phase.shares * (bound + 1)

    def new_enough(self, version: int) -> bool:
        """(1), the weights: whether a share may begin on them."""
        if self.phase.bound is None or version >= self.version:
            return True
        return self._in_time(
            [*self._begun.values(), *self._waiting.values(), version], self.version
        )

    def begin(self, worker: int, number: int, version: int, now_s: float) -> None:
        """The worker computes this share now, on these weights."""
        self.heard(worker, now_s)
        self._workers[worker].began_s = now_s
        self._begun[number] = version

    def done(self, worker: int, share: Done, now_s: float) -> list[Update]:
        """Its gradient is there. Returns the updates that can be made now, in their order; none
        where the share has become another's.
        """
        self.heard(worker, now_s)
        if not self.owns(worker, share.number) or share.number not in self._begun:
            return []
        at = self._workers[worker]
        if at.began_s is not None:
            at.longest_s = max(at.longest_s, now_s - at.began_s)
        del self._claims[share.number]
        self._waiting[share.number] = self._begun.pop(share.number)
        self.totals = _added(self.totals, share)
        return self._updates()

    def _updates(self) -> list[Update]:
        made = []
        while len(self._waiting) >= self.phase.shares:
            # Of equal deadlines, those that have waited longest.
            chosen = sorted(self._waiting, key=self._waiting.__getitem__)[: self.phase.shares]
            others = [v for n, v in self._waiting.items() if n not in chosen]
            if not self._in_time([*others, *self._begun.values()], self.version + 1):
                break
            made.append(self._update(chosen))
        return made

    def _update(self, chosen: list[int]) -> Update:
        weights = []
        for number in sorted(chosen):  # so that sums do not depend on who came first
            staleness = self.version - self._waiting.pop(number)
            self._counts[staleness] += 1
            damping = 1 + staleness if self.phase.damped else 1
            weights.append((number, 1 / (self.phase.shares * damping)))
        update = Update(self.phase.id, self.version, self.phase.lrs[self.version], tuple(weights))
        self.version += 1
        return update

    def _in_time(self, versions: list[int], update: int) -> bool:
        """Whether gradients of weights of these versions can all make their deadlines when the
        next update has this number.
        """
        bound = self.phase.bound
        if bound is None:
            return True
        return all(
            version + bound >= update + i // self.phase.shares
            for i, version in enumerate(sorted(versions))
        )


def _added(totals: TrainTotals, share: Done) -> TrainTotals:
    return TrainTotals(
        steps=totals.steps,
        samples=totals.samples + share.samples,
        loss_sum=totals.loss_sum + share.loss_sum,
        correct=totals.correct + share.correct,
        skipped=totals.skipped + share.skipped,
        seconds=0.0,
        data_wait_s=0.0,
    )
