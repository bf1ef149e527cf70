"""Search the peak learning rate of a full training before it starts.

All candidates train a full schedule, compressed into few steps, from the initial weights.

    coarse   rates a decade apart around the initial one, in few steps. Few steps favor small
             rates, so the largest rate that is hardly worse than the best gives the decade.
    fine     around that decade, two rates to a decade, in four times as many steps.

A stage is extended beyond an edge when its best rate is at the edge. So candidates race: only the
neighborhood of the best decade gets the longer schedule. Rates are points of one lattice: the
initial rate decides where the search begins, not where it ends.

The peak is the weighted mean of all rates that reduce the loss: the mean of the fine candidates'
log rates, weighted by a power of their gain. The gain is how much lower their loss is than that of
a rate a decade below in few steps, which hardly trains. The best single candidate is a worse
choice: trainings of one rate on other batches differ by more than trainings of neighboring rates,
and the mean averages that out. A candidate that diverged has no gain, so it needs no rule of its
own. The policy makes the peak smaller for some networks (`peak_factor`). Short candidates bear
rates that a training does not, so the optimizer's usual rate, if it is lower, counts as some more
of their steps.

Sources: Wu et al., ICLR 2018 (short-horizon bias); the trials that compared rules are ours
(benchmarks/RESULTS.md).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from raytrain_opt.errors import DivergedError
from raytrain_opt.search.policy import CandidateResult, Decision, shown_failure

COARSE, FINE = "coarse", "fine"

# Points of the lattice: two a decade. The spacing is the distance between candidates of a stage,
# which begins with one on each side of its center.
_PER_DECADE = 2
_SPACING = {COARSE: _PER_DECADE, FINE: 1}
_FIRST_OFFSETS = (-1, 0, 1)

# A candidate is hardly worse than the best if its loss is higher by at most this fraction.
TOLERANCE = 0.02
# The weight of a fine candidate is this power of its gain.
_GAIN_POWER = 4

# A usual rate below the peak counts as this many steps of a candidate, in the mean of the
# logarithms.
_USUAL_STEPS = 8

# Steps of a fine candidate where the budget allows; with fewer, single rates are unreliable.
_FINE_STEPS = 96
# Steps of a coarse candidate, as a fraction of a fine one's. With fewer than the minimum there is
# no search, because a schedule of so few steps shows nothing.
_COARSE_FRACTION, _MIN_STEPS = 0.25, 5
# Candidates the budget is divided among: the first ones of a stage, and extensions.
_COARSE_CANDIDATES, _FINE_CANDIDATES = 3 + 2, 3 + 1
# Steps of the shortest search of one optimizer.
FEWEST_STEPS = _MIN_STEPS * (_COARSE_CANDIDATES + _FINE_CANDIDATES)
# Eight extensions reach eight decades from the initial rate: beyond that, the cause is another.
_MAX_EXTENSIONS = 8


def point_to_lr(point: float) -> float:
    """Return the learning rate of a point of the lattice, or of one between two points."""
    return math.pow(10.0, point / _PER_DECADE)


def steps_left(budget_steps: float, rounds: Sequence[Decision]) -> float:
    """Return the steps of a budget that these rounds have not used."""
    return budget_steps - sum(len(r.scores) * r.steps for r in rounds)


@dataclass(frozen=True)
class PeakRequest:
    """Candidates to train next, `steps` each, from the first step of the first epoch."""

    stage: str
    points: tuple[int, ...]
    steps: int
    reason: str


@dataclass(frozen=True)
class PeakChoice:
    """The peak to train with, and the result of the candidate nearest to it."""

    result: CandidateResult
    lr: float
    reason: str
    is_decided: bool = True  # by the candidates; else it is the usual rate


@dataclass(frozen=True)
class _Trials:
    """The results of a stage by point: scored ones in `alive`; others diverged."""

    alive: dict[int, CandidateResult]
    failed: frozenset[int]

    @classmethod
    def of(cls, rounds: Sequence[Decision], stage: str) -> _Trials:
        tried = [result for r in rounds if r.stage == stage for result in r.tried]
        alive = {_point(r): r for r in tried if r.status == "ok"}
        return cls(alive, frozenset(_point(r) for r in tried if r.status != "ok"))

    @property
    def tried(self) -> frozenset[int]:
        return self.failed.union(self.alive)

    def loss(self, point: int) -> float:
        return self.alive[point].val_loss

    def largest(self, tolerance: float) -> int:
        """Return the largest point whose loss exceeds the lowest by at most this fraction."""
        lowest = min(map(self.loss, self.alive))
        return max(p for p in self.alive if self.loss(p) <= lowest + tolerance * abs(lowest))

    def beyond_edge(self, center: int, spacing: int) -> int | None:
        """Return the point next to the center if the center is at an edge; None otherwise."""
        if center == max(self.tried):
            return center + spacing
        return center - spacing if center == min(self.tried) else None


@dataclass(frozen=True)
class CandidateSteps:
    """The steps of a candidate's schedule in each stage."""

    coarse: int
    fine: int

    @classmethod
    def within(
        cls, budget_steps: float, *, horizon: float, epoch_steps: int, optimizers: int = 1
    ) -> CandidateSteps:
        """Divide a budget, the steps that all candidates may have together.

        `horizon` in epochs; `epoch_steps`: steps of the first epoch. Of several `optimizers`, all
        have a coarse stage, and two a fine one. The initial rate must not change the length of
        the fine candidates, so what extensions would cost is set aside, used or not.
        """
        coarse_count = _COARSE_CANDIDATES + (optimizers - 1) * len(_FIRST_OFFSETS)
        fine_count = _FINE_CANDIDATES + (len(_FIRST_OFFSETS) if optimizers > 1 else 0)
        longest = min(max(_FINE_STEPS, horizon * epoch_steps), epoch_steps)
        affordable = budget_steps / (_COARSE_FRACTION * coarse_count + fine_count)
        coarse = max(_MIN_STEPS, int(_COARSE_FRACTION * min(longest, affordable)))
        left = budget_steps - coarse_count * coarse
        return cls(coarse, int(min(longest, left / fine_count)))


@dataclass(frozen=True)
class PeakSearch:
    """The search of one optimizer's rate from `initial`, within `budget_steps` of candidates."""

    initial: float
    steps: CandidateSteps
    budget_steps: float
    usual_lr: float | None  # of this optimizer, if it is known
    peak_factor: float = 1.0  # of the peak, relative to what the candidates say

    def next(self, rounds: Sequence[Decision]) -> PeakRequest | PeakChoice:
        """Return the next candidates after these rounds, or the peak.

        Stays within the budget, except when all diverged: without a rate that trains there is
        no training. Raises DivergedError after `_MAX_EXTENSIONS` such extensions.
        """
        if not rounds:
            start = _PER_DECADE * round(math.log10(self.initial))
            points = _around(start, COARSE)
            return PeakRequest(
                COARSE, points, self.steps.coarse, f"{_span(points)}, around the start"
            )
        stage = rounds[-1].stage
        trials = _Trials.of(rounds, stage)
        beyond = self._beyond(rounds, trials)
        if beyond is not None and self._may_extend(rounds, trials):
            why = "the best is at the edge" if trials.alive else "all diverged"
            reason = f"{why}: next {point_to_lr(beyond):.3g}"
            return PeakRequest(stage, (beyond,), rounds[-1].steps, reason)
        if stage == COARSE:
            return self._fine(trials, rounds)
        return self._choose_peak(trials, rounds)

    def _beyond(self, rounds: Sequence[Decision], trials: _Trials) -> int | None:
        """Return the point past the edge if the best is at the edge; below all if all diverged.

        None otherwise, and where that point diverged in the coarse stage.
        """
        spacing = _SPACING[rounds[-1].stage]
        if not trials.alive:
            return min(trials.tried) - spacing
        tolerance = TOLERANCE if rounds[-1].stage == COARSE else 0.0
        beyond = trials.beyond_edge(trials.largest(tolerance), spacing)
        return None if beyond in _Trials.of(rounds, COARSE).failed else beyond

    def _fine(self, coarse: _Trials, rounds: Sequence[Decision]) -> PeakRequest | PeakChoice:
        center, coarse_steps = coarse.largest(TOLERANCE), rounds[-1].steps
        points = _around(center, FINE)
        steps = min(self.steps.fine, int(steps_left(self.budget_steps, rounds) / len(points)))
        if steps < coarse_steps:
            return self._choose_peak(coarse, rounds)
        reason = (
            f"about {point_to_lr(center):.3g} is best in {coarse_steps} steps: "
            f"next {_span(points)}"
        )
        return PeakRequest(FINE, points, steps, reason)

    def _may_extend(self, rounds: Sequence[Decision], trials: _Trials) -> bool:
        """Return whether one more candidate is affordable. Raises DivergedError after too many."""
        stage, steps = rounds[-1].stage, rounds[-1].steps
        done = sum(r.stage == stage for r in rounds) - 1
        if trials.alive:
            reserved = _FINE_CANDIDATES * steps if stage == COARSE else 0
            return done < _MAX_EXTENSIONS and steps + reserved <= steps_left(
                self.budget_steps, rounds
            )
        if done < _MAX_EXTENSIONS:
            return True
        tried = sorted(result.candidate.lr for r in rounds for result in r.tried)
        raise DivergedError(
            "epoch 1: the loss of every candidate was not finite, at each of these peak learning "
            f"rates: {', '.join(f'{lr:.3g}' for lr in tried)}. Likely causes: data or a loss that "
            f"is not finite, or a learning_rate.initial ({self.initial:g}) far too large."
            f"{shown_failure(result for r in rounds for result in r.tried)}"
        )

    def _choose_peak(self, trials: _Trials, rounds: Sequence[Decision]) -> PeakChoice:
        """Return `peak_factor` times the weighted mean of the rates, drawn down to the usual."""
        hardly, steps, best = hardly_trained(rounds), rounds[-1].steps, trials.largest(0.0)
        assert hardly is not None
        gains = {p: max(0.0, hardly.val_loss - trials.loss(p)) for p in trials.alive}
        highest = gains[best]
        if highest > 0:
            weights = {point: (gain / highest) ** _GAIN_POWER for point, gain in gains.items()}
            center = math.fsum(p * w for p, w in weights.items()) / math.fsum(weights.values())
            gaining = [point_to_lr(p) for p, gain in gains.items() if 2 * gain >= highest]
            reason = (
                f"weighted mean of the rates that reduce the loss, {min(gaining):.3g} to "
                f"{max(gaining):.3g} (best {point_to_lr(best):.3g})"
            )
        else:
            center, reason = float(best), f"best rate {point_to_lr(best):.3g}, without any gain"
        if self.peak_factor != 1:
            center += _PER_DECADE * math.log10(self.peak_factor)
            reason = f"{self.peak_factor:g} x the {reason}"
        usual = math.inf if self.usual_lr is None else _PER_DECADE * math.log10(self.usual_lr)
        if usual < center:
            center += (usual - center) * _USUAL_STEPS / (_USUAL_STEPS + steps)
            reason += f", drawn down to the usual rate {self.usual_lr:g}"
        nearest = min(trials.alive, key=lambda point: abs(point - center))
        return PeakChoice(
            trials.alive[nearest], point_to_lr(center), f"{reason}, in {steps} steps"
        )


def hardly_trained(rounds: Sequence[Decision]) -> CandidateResult | None:
    """Return the result of a rate a decade below the best coarse one, which hardly trains.

    The rounds are those of one optimizer; None without a coarse candidate that trained. A
    search that began some decades away has tried this rate, too.
    """
    coarse = _Trials.of(rounds, COARSE)
    if not coarse.alive:
        return None
    decade = coarse.largest(TOLERANCE)
    return coarse.alive[max((p for p in coarse.alive if p < decade), default=decade)]


def _around(point: int, stage: str) -> tuple[int, ...]:
    return tuple(point + _SPACING[stage] * offset for offset in _FIRST_OFFSETS)


def _span(points: Collection[int]) -> str:
    return ", ".join(f"{point_to_lr(point):.3g}" for point in points)


def _point(result: CandidateResult) -> int:
    return round(_PER_DECADE * math.log10(result.candidate.lr))
