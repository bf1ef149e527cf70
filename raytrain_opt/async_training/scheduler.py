"""Assign micro-batches to workers and bound the staleness of their gradients.

Pure: no processes, no clock.

Asynchronous data parallelism (Sato): every gradient is an update, made when it arrives. Each step
of an epoch is split into a multiple of P micro-batches, P the number of workers; any worker claims
the next one, so fast workers compute more. `weight_shard` says what the rate, momentum and weight
decay of a step are for one of them.

    u        updates done so far, the version of the weights
    q        version of the weights that a micro-batch's gradient is computed on
    s        bound of the staleness, u - q at the gradient's update (Ho et al., SSP, NIPS 2013)

With a bound, a micro-batch begins only if all gradients that are being computed meet it even if
they arrive last: with n of them, the new one included, u + n - 1 - q <= s. Each update raises u by
one and lowers n by one, so that stays true. P equal workers have a staleness of about P.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from dataclasses import dataclass, field, replace

from raytrain_opt.optim.epoch_steps import ramp_factor
from raytrain_opt.pools.commands import MainTrain
from raytrain_opt.results import Steps, TrainTotals
from raytrain_opt.train.learner_config import LearnerConfig


@dataclass(frozen=True)
class EpochPhase:
    """Steps of `epoch`, each in `micro_batches` parts."""

    id: str
    epoch: int
    steps: Steps
    micro_batches: int
    bound: int | None  # s; None for no bound

    @property
    def size(self) -> int:
        """Number of micro-batches of all steps, each of which is an update."""
        return len(self.steps.lrs) * self.micro_batches

    def index_of(self, number: int) -> tuple[int, int]:
        """Return the step of the epoch and the micro-batch of that step."""
        step, micro_batch = divmod(number, self.micro_batches)
        return self.steps.first + step, micro_batch


def epoch_phase(config: LearnerConfig, command: MainTrain) -> EpochPhase:
    """Return the phase of a command with the learners' settings."""
    factor = ramp_factor(config.batch_ramp, command.epoch)
    return EpochPhase(
        # No gradient of an attempt that a shard has ended may change the weights of the next.
        id=f"{command.epoch}.{command.steps.first}-{command.steps.end}.{command.attempt}",
        epoch=command.epoch,
        steps=command.steps.before(command.end),
        micro_batches=config.worker_count * config.async_updates * factor,
        bound=config.parallel.staleness_bound,
    )


@dataclass(frozen=True)
class MicroBatchDone:
    """A micro-batch whose gradient has changed the weights: sums over its samples."""

    number: int
    loss_sum: float
    samples: int
    skipped: int
    staleness: int = 0


@dataclass
class SspScheduler:
    """The state of one phase."""

    phase: EpochPhase
    version: int = 0
    end: int = field(init=False)  # number of the first micro-batch that does not belong to it
    totals: TrainTotals = TrainTotals(0, 0, (0.0,), 0, 0.0, 0.0)
    staleness: Counter[int] = field(default_factory=Counter)  # gradients by staleness
    _free: list[int] = field(init=False)
    _reached: int = 0  # number of the first micro-batch that was never claimed
    _claims: dict[int, int] = field(default_factory=dict)  # micro-batch -> worker
    _begun: dict[int, int] = field(default_factory=dict)  # micro-batch -> version of its weights

    def __post_init__(self) -> None:
        self.end = self.phase.size
        self._free = list(range(self.end))

    @property
    def finished(self) -> bool:
        return self.version == self.end

    @property
    def has_work(self) -> bool:
        return bool(self._free)

    def end_early(self) -> None:
        """Let the phase end with the step of the last micro-batch that was claimed."""
        per_step = self.phase.micro_batches
        self.end = min(self.end, max(1, math.ceil(self._reached / per_step)) * per_step)
        self._free = [number for number in self._free if number < self.end]
        heapq.heapify(self._free)

    def claim(self, worker: int) -> int | None:
        """Give the worker the next free micro-batch; None when all are claimed."""
        if not self._free:
            return None
        number = heapq.heappop(self._free)
        self._reached = max(self._reached, number + 1)
        self._claims[number] = worker
        return number

    def leave(self, worker: int) -> None:
        """Free what a worker that died or restarted had not done, for others."""
        for number in [number for number, owner in self._claims.items() if owner == worker]:
            del self._claims[number]
            self._begun.pop(number, None)
            heapq.heappush(self._free, number)

    def owns(self, worker: int, number: int) -> bool:
        return self._claims.get(number) == worker

    def has_begun(self, worker: int, number: int) -> bool:
        """Return whether this worker computes the micro-batch already."""
        return self.owns(worker, number) and number in self._begun

    def may_begin(self, version: int | None = None) -> bool:
        """Return whether the bound lets a micro-batch begin on this version, None: the current."""
        new = self.version if version is None else version
        oldest = min([new, *self._begun.values()])
        bound = self.phase.bound
        return bound is None or self.version + len(self._begun) - oldest <= bound

    def begin(self, number: int, version: int) -> None:
        """Record that a micro-batch is computed now, on weights of this version."""
        self._begun[number] = version

    def done(self, worker: int, result: MicroBatchDone) -> None:
        """Record an update, unless its micro-batch has been given to another worker."""
        if not self.has_begun(worker, result.number):
            return
        del self._claims[result.number], self._begun[result.number]
        self.version += 1
        self.staleness[result.staleness] += 1
        self.totals = replace(
            self.totals,
            samples=self.totals.samples + result.samples,
            losses=(sum(self.totals.losses) + result.loss_sum,),
            skipped=self.totals.skipped + result.skipped,
        )
