"""Search the peak learning rate of a full training before it starts.

All candidates train a full schedule, compressed into few steps, from the initial weights.

    coarse   rates a decade apart around the initial one, in few steps. Few steps favor small
             rates, so the largest rate that is hardly worse than the best gives the decade.
    fine     around that decade, two rates to a decade, in four times as many steps.
    peak     mean of the fine log rates, weighted by a power of their gain: how much lower their
             loss is than at a rate a decade below in few steps, which hardly trains

A stage is extended beyond an edge when its best rate is at the edge. Of rates that learn all there
is, the smallest is the best: their losses say nothing more. A search is a generator: it
yields requests and is sent their results. So the search of a run is repeated from the recorded
results whenever the policy has to decide. Why each rule is there: docs/learning-rate.md.

Source: Wu et al., ICLR 2018 (short-horizon bias); the rules are ours (benchmarks/RESULTS.md).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from raytrain_opt.search.policy import CandidateResult

COARSE, FINE = "coarse", "fine"

# Points of the lattice: two a decade. The spacing is the distance between candidates of a stage,
# which begins with one on each side of its center.
_PER_DECADE = 2
_SPACING = {COARSE: _PER_DECADE, FINE: 1}
_FIRST_OFFSETS = (-1, 0, 1)

# A candidate is hardly worse than the best if its loss is higher by at most this fraction. It has
# learned all there is with at most this fraction of the loss of the smallest rate.
TOLERANCE, _NOTHING_LEFT = 0.02, 0.01
# The weight of a fine candidate is this power of its gain.
_GAIN_POWER = 4
# In the mean of the logarithms, a lower usual rate counts as this many steps of a candidate, and
# any usual rate as the square of the doubt.
_USUAL_STEPS = 8

# Steps of a fine candidate where the budget allows, and as a part of a long epoch; with fewer,
# single rates are unreliable.
_FINE_STEPS, _HORIZON = 96, 0.5
# Steps of a coarse candidate, as a fraction of a fine one's. With fewer than the minimum there is
# no search, because a schedule of so few steps shows nothing.
_COARSE_FRACTION, _MIN_STEPS = 0.25, 5
# Candidates the budget is divided among: the first ones of a stage, and extensions.
_COARSE_CANDIDATES, _FINE_CANDIDATES = 3 + 2, 3 + 1
# Eight extensions reach eight decades from the initial rate: beyond that, the cause is another.
_MAX_EXTENSIONS = 8


def point_to_lr(point: float) -> float:
    """Return the learning rate of a point of the lattice, or of one between two points."""
    return math.pow(10.0, point / _PER_DECADE)


@dataclass(frozen=True)
class PeakRequest:
    """Candidates of one optimizer to train next, `steps` each, from the start of epoch 1."""

    optimizer: int
    stage: str
    points: tuple[int, ...]
    steps: int
    reason: str


@dataclass(frozen=True)
class PeakChoice:
    """The optimizer and the peak to train with, and the result of the candidate nearest to it."""

    optimizer: int
    lr: float
    result: CandidateResult
    untrained_loss: float
    reason: str
    is_decided: bool = True  # by the candidates; else it is the usual rate
    is_clear: bool = False  # longer candidates would hardly change it


# Of a stage: whether a candidate has trained.
_Requests = Generator[PeakRequest, Sequence[CandidateResult], bool]


class CandidateSteps(NamedTuple):
    """The steps of a candidate's schedule in each stage."""

    coarse: int
    fine: int


def divide_budget(budget_steps: float, epoch_steps: int, optimizers: int) -> CandidateSteps | None:
    """Divide the steps that all candidates may have together; None if they tell nothing apart.

    `epoch_steps`: steps of an epoch. Of several `optimizers`, all have a coarse stage, and
    two a fine one. The initial rate must not change the length of the fine candidates, so what
    extensions would cost is set aside, used or not.
    """
    coarse_count = _COARSE_CANDIDATES + (optimizers - 1) * len(_FIRST_OFFSETS)
    fine_count = _FINE_CANDIDATES + (len(_FIRST_OFFSETS) if optimizers > 1 else 0)
    longest = max(_FINE_STEPS, _HORIZON * epoch_steps)
    affordable = budget_steps / (_COARSE_FRACTION * coarse_count + fine_count)
    coarse = max(_MIN_STEPS, int(_COARSE_FRACTION * min(longest, affordable)))
    fine = int(min(longest, (budget_steps - coarse_count * coarse) / fine_count))
    return CandidateSteps(coarse, fine) if fine >= coarse else None


@dataclass
class Budget:
    """The steps that candidates of all optimizers may still train."""

    left: float


@dataclass
class _Stage:
    """The candidates of one length, by point."""

    name: str
    steps: int
    coarse: _Stage | None = None  # the stage before
    results: dict[int, CandidateResult] = field(default_factory=dict)

    @property
    def alive(self) -> dict[int, CandidateResult]:
        """Those that did not diverge."""
        return {point: r for point, r in self.results.items() if r.status == "ok"}

    @property
    def best(self) -> CandidateResult:
        return min(self.alive.values(), key=lambda result: result.val_loss)

    @property
    def lowest_loss(self) -> float:
        return min((result.val_loss for result in self.alive.values()), default=math.inf)

    @property
    def solved(self) -> tuple[int, ...]:
        """The points whose candidates have learned all there is; none if losses are negative."""
        coarse = (self.coarse or self).alive
        limit = _NOTHING_LEFT * max(coarse[min(coarse)].val_loss, 0.0)
        points = (p for p, result in self.alive.items() if result.val_loss <= limit)
        return tuple(points) if self.lowest_loss >= 0 else ()

    def largest(self, tolerance: float) -> int:
        """Return the largest point whose loss is hardly higher, or the smallest that is solved."""
        if self.solved:
            return min(self.solved)
        limit = self.lowest_loss + tolerance * abs(self.lowest_loss)
        return max(point for point, result in self.alive.items() if result.val_loss <= limit)

    def beyond_edge(self) -> int | None:
        """Return the point past the edge where the best is; below all points if all diverged."""
        spacing = _SPACING[self.name]
        if not self.alive:
            return min(self.results) - spacing
        center = self.largest(TOLERANCE if self.name == COARSE else 0.0)
        if center == max(self.results) and not self.solved:
            return center + spacing
        return center - spacing if center == min(self.results) else None


@dataclass
class PeakSearch:
    """The search of the rate of one optimizer, the job's n-th, from `initial`."""

    optimizer: int
    initial: float
    steps: CandidateSteps
    budget: Budget
    usual_lr: float | None  # of this optimizer and so long a training, if it is known
    undecided_lr: float  # which trains if the candidates have learned nothing
    peak_factor: float = 1.0  # of the peak, relative to what the candidates say

    def __post_init__(self) -> None:
        self._coarse = self._last = _Stage(COARSE, self.steps.coarse)
        self.tried: list[CandidateResult] = []

    @property
    def best(self) -> CandidateResult:
        """The best candidate of the last stage."""
        return self._last.best

    @property
    def is_solved(self) -> bool:
        """Whether that has learned all there is."""
        return bool(self._last.solved)

    @property
    def best_coarse(self) -> CandidateResult:
        """The best candidate of the coarse stage."""
        return self._coarse.best

    @property
    def untrained_loss(self) -> float:
        """The loss of a rate a decade below the best coarse one, which hardly trains."""
        decade = self._coarse.largest(TOLERANCE)
        below = max((p for p in self._coarse.alive if p < decade), default=decade)
        return self._coarse.alive[below].val_loss

    def coarse(self, why: str) -> _Requests:
        """Try rates a decade apart; `why` begins the reason."""
        points = _around(_PER_DECADE * round(math.log10(self.initial)), COARSE)
        reason = f"{why}{_span(points)}, around the start, in {self._coarse.steps} steps"
        return self._try(points, reason)

    def fine(self, against: str = "", limit: float = math.inf) -> _Requests:
        """Try rates around the best decade, as far as the budget allows.

        `against`: the optimizer that this one has to beat. Then only the best rate is tried, and
        others once its loss is at most `limit`.
        """
        center, coarse_steps = self._coarse.largest(TOLERANCE), self._coarse.steps
        points = _around(center, FINE)
        steps = min(self.steps.fine, int(self.budget.left / len(points)))
        if steps < coarse_steps:
            return True
        lr = f"{point_to_lr(center):.3g}"
        reason = f"about {lr} is best in {coarse_steps} steps: next {_span(points)}"
        if against:
            points, reason = (center,), f"{lr}, the best in fewer steps, against {against}"
        self._last = _Stage(FINE, steps, self._coarse)
        return (yield from self._try(points, reason, limit))

    def _try(self, points: tuple[int, ...], reason: str, limit: float = math.inf) -> _Requests:
        """Try these points of the last stage, and others while the best one is at an edge.

        Stays within the budget, except when all diverged: without a rate that trains there is no
        training.
        """
        stage = self._last
        for _ in range(1 + _MAX_EXTENSIONS):
            results = yield PeakRequest(self.optimizer, stage.name, points, stage.steps, reason)
            self.tried += results
            stage.results |= zip(points, results, strict=True)
            self.budget.left -= len(points) * stage.steps
            beyond = stage.beyond_edge()
            if beyond is None or (stage.alive and not self._may_extend(beyond, limit)):
                break
            why = "the best is at the edge" if stage.alive else "all diverged"
            points, reason = (beyond,), f"{why}: next {point_to_lr(beyond):.3g}"
        return bool(stage.alive)

    def _may_extend(self, point: int, limit: float) -> bool:
        """Return whether a point is affordable and did not diverge in the coarse stage."""
        stage, coarse = self._last, self._coarse
        candidates = 1 + (_FINE_CANDIDATES if stage is coarse else 0)
        is_affordable = candidates * stage.steps <= self.budget.left
        has_diverged = point in coarse.results and point not in coarse.alive
        return is_affordable and not has_diverged and stage.lowest_loss <= limit

    def peak(self, doubt: float) -> PeakChoice:
        """Choose `peak_factor` times the weighted mean of the rates, drawn to the usual one.

        doubt: the noise of the best loss over what it has gained, from 0 to 1.
        """
        stage, best = self._last, self._last.largest(0.0)
        gains = {p: max(0.0, self.untrained_loss - r.val_loss) for p, r in stage.alive.items()}
        highest = gains[best]
        weights = {best: 1.0}
        reason = f"smallest rate that learns all there is, {point_to_lr(best):.3g}"
        if not stage.solved:
            if highest:
                weights = {point: (gain / highest) ** _GAIN_POWER for point, gain in gains.items()}
            gaining = [point_to_lr(p) for p, gain in gains.items() if 2 * gain >= highest]
            reason = (
                f"weighted mean of the rates that reduce the loss, {min(gaining):.3g} to "
                f"{max(gaining):.3g} (best {point_to_lr(best):.3g})"
            )
        center = math.fsum(p * w for p, w in weights.items()) / math.fsum(weights.values())
        if self.peak_factor != 1:
            center += _PER_DECADE * math.log10(self.peak_factor)
            reason = f"{self.peak_factor:g} x the {reason}"
        if self.usual_lr is not None:
            usual, pull = _PER_DECADE * math.log10(self.usual_lr), doubt**2
            if usual < center:
                pull = max(pull, _USUAL_STEPS / (_USUAL_STEPS + stage.steps))
            center += pull * (usual - center)
            if pull >= 0.01:
                reason += f", drawn by {pull:.0%} to the usual rate {self.usual_lr:g}"
        nearest = stage.alive[min(stage.alive, key=lambda point: abs(point - center))]
        reason += f", in {stage.steps} steps"
        lr = point_to_lr(center)
        return PeakChoice(self.optimizer, lr, nearest, self.untrained_loss, reason)


def _around(point: int, stage: str) -> tuple[int, ...]:
    return tuple(point + _SPACING[stage] * offset for offset in _FIRST_OFFSETS)


def _span(points: Collection[int]) -> str:
    return ", ".join(f"{point_to_lr(point):.3g}" for point in points)
