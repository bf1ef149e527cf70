"""Which peak learning rate suits a whole training: candidates train the whole schedule, squeezed
into few steps, all from the start weights.

    coarse   a decade apart around the start, in few steps. Few steps favour small rates, so the
             largest that is hardly worse than the best tells the decade.
    fine     around that, two to a decade, in four times as many steps.

Both are extended beyond the edge where the best is there. So candidates race: only the best
decade's neighbours get the longer schedule. Rates are points of one lattice: where the search
begins does not change where it ends.

The peak is the centre of what gains: the mean of the fine candidates' log rates, weighted by a
power of how much lower their loss is than that of a rate a decade below in few steps, which hardly
trains. The best single candidate is a worse choice: trainings of one rate on other batches differ
by more than those of neighbouring rates, and the mean averages that out. What diverged gains
nothing, so it needs no rule of its own.

Sources: Wu et al., ICLR 2018 (short-horizon bias); the trials that compared rules are ours
(benchmarks/RESULTS.md).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from raytrain_opt.errors import DivergedError
from raytrain_opt.search.policy import CandidateResult, Round

COARSE, FINE = "coarse", "fine"

# Points of the lattice: two a decade. So many are between candidates of a stage, which begins
# with one to each side of its centre.
_PER_DECADE = 2
_SPACING = {COARSE: _PER_DECADE, FINE: 1}
_FIRST = (-1, 0, 1)

# A coarse candidate is hardly worse than the best with so much more loss, as a share.
_HARDLY = 0.02
# The weight of a fine candidate is this power of its gain.
_POWER = 4

# Steps of a fine candidate where the budget allows; of fewer than that, single rates say little.
_FINE_STEPS = 48
# A coarse candidate's, as a share of a fine one's; with fewer than the last there is no search,
# because a schedule of so few steps says nothing.
_COARSE_SHARE, _FEWEST_STEPS = 0.25, 5
# Candidates that the budget is divided between: what is tried anyway, and extensions.
_COARSE_RUNS, _FINE_RUNS = 3 + 2, 3 + 1
_MOST_EXTENSIONS = 8

# The most candidates that a round can have.
MOST_CANDIDATES = len(_FIRST)


def lr_of(point: float) -> float:
    """The rate of a point of the lattice, or between two."""
    return math.pow(10.0, point / _PER_DECADE)


@dataclass(frozen=True)
class Ask:
    """Train these points, `steps` each, from the first step of the first epoch on."""

    stage: str
    points: tuple[int, ...]
    steps: int
    reason: str


@dataclass(frozen=True)
class Found:
    """The peak to train with, and the candidate that was tried nearest to it."""

    result: CandidateResult
    lr: float
    reason: str


@dataclass(frozen=True)
class _Trials:
    """What became of the points of a stage: the losses of those that are finite."""

    alive: dict[int, CandidateResult]
    diverged: frozenset[int]

    @classmethod
    def of(cls, rounds: Sequence[Round], stage: str) -> _Trials:
        tried = [result for r in rounds if r.stage == stage for result in r.tried]
        alive = {_point(r): r for r in tried if r.status == "ok"}
        return cls(alive, frozenset(_point(r) for r in tried if r.status != "ok"))

    @property
    def tried(self) -> frozenset[int]:
        return self.diverged.union(self.alive)

    def loss(self, point: int) -> float:
        return self.alive[point].val_loss

    def largest(self, hardly: float) -> int:
        """The largest point whose loss is above the lowest by at most this share of it."""
        least = min(map(self.loss, self.alive))
        return max(p for p in self.alive if self.loss(p) <= least + hardly * abs(least))

    def beyond_edge(self, centre: int, spacing: int) -> int | None:
        """The point next to the centre, where it is at an edge of what was tried."""
        if centre == max(self.tried):
            return centre + spacing
        return centre - spacing if centre == min(self.tried) else None


@dataclass(frozen=True)
class PeakSearch:
    """The search of one training. Lengths in steps of its first epoch, which has
    `epoch_steps`; `horizon` in epochs.
    """

    initial: float
    horizon: float
    epoch_steps: int
    budget_steps: float

    @property
    def is_possible(self) -> bool:
        """Whether the budget lets candidates have enough steps."""
        return self._fine_steps >= self._coarse_steps

    def is_lost(self, rounds: Sequence[Round]) -> bool:
        """Whether all candidates of the last stage diverged, so that it has to go on."""
        return not _Trials.of(rounds, rounds[-1].stage).alive

    def next(self, rounds: Sequence[Round]) -> Ask | Found:
        """What follows after these rounds.

        Within the budget, but for more of what was lost: without a rate that trains there is
        no training. Raises DivergedError when that has been tried often enough.
        """
        if not rounds:
            start = _PER_DECADE * round(math.log10(self.initial))
            points = _around(start, COARSE)
            return Ask(COARSE, points, self._coarse_steps, f"{_span(points)}, around the start")
        stage = rounds[-1].stage
        trials = _Trials.of(rounds, stage)
        beyond = self._beyond(rounds, trials)
        if beyond is not None and self._may_extend(rounds, trials):
            why = "the best is at the edge" if trials.alive else "all diverged"
            return Ask(stage, (beyond,), rounds[-1].steps, f"{why}: next {lr_of(beyond):.3g}")
        if stage == COARSE:
            return self._fine(trials, rounds)
        return _found(trials, rounds)

    def _beyond(self, rounds: Sequence[Round], trials: _Trials) -> int | None:
        """The point past the edge, where the best is there, and the coarse stage has not found it
        worse; below all, where all diverged.
        """
        spacing = _SPACING[rounds[-1].stage]
        if not trials.alive:
            return min(trials.tried) - spacing
        hardly = _HARDLY if rounds[-1].stage == COARSE else 0.0
        beyond = trials.beyond_edge(trials.largest(hardly), spacing)
        coarse = _Trials.of(rounds, COARSE)
        worse = [point for point in coarse.tried if point > coarse.largest(_HARDLY)]
        return None if beyond in worse else beyond

    @property
    def _most_steps(self) -> float:
        return min(max(_FINE_STEPS, self.horizon * self.epoch_steps), self.epoch_steps)

    @property
    def _coarse_steps(self) -> int:
        affordable = self.budget_steps / (_COARSE_SHARE * _COARSE_RUNS + _FINE_RUNS)
        return max(_FEWEST_STEPS, int(_COARSE_SHARE * min(self._most_steps, affordable)))

    @property
    def _fine_steps(self) -> int:
        """Of what the coarse ones and their extensions leave, so that where the search begins
        does not change it.
        """
        left = self.budget_steps - _COARSE_RUNS * self._coarse_steps
        return int(min(self._most_steps, left / _FINE_RUNS))

    def _fine(self, coarse: _Trials, rounds: Sequence[Round]) -> Ask | Found:
        centre, few = coarse.largest(_HARDLY), rounds[-1].steps
        points = _around(centre, FINE)
        steps = min(self._fine_steps, int(self.steps_left(rounds) / len(points)))
        if steps < few:
            return _found(coarse, rounds)
        reason = f"about {lr_of(centre):.3g} is best in {few} steps: next {_span(points)}"
        return Ask(FINE, points, steps, reason)

    def steps_left(self, rounds: Sequence[Round]) -> float:
        """Of the budget."""
        return self.budget_steps - sum(len(r.scores) * r.steps for r in rounds)

    def _may_extend(self, rounds: Sequence[Round], trials: _Trials) -> bool:
        """Where nothing is alive, it has to be; raises DivergedError after too many times."""
        stage, steps = rounds[-1].stage, rounds[-1].steps
        done = sum(r.stage == stage for r in rounds) - 1
        if trials.alive:
            after = _FINE_RUNS * steps if stage == COARSE else 0
            return done < _MOST_EXTENSIONS and steps + after <= self.steps_left(rounds)
        if done < _MOST_EXTENSIONS:
            return True
        tried = sorted(result.candidate.lr for r in rounds for result in r.tried)
        raise DivergedError(
            "epoch 1: the loss of every candidate was not finite, at each of these peak learning "
            f"rates: {', '.join(f'{lr:.3g}' for lr in tried)}. Likely causes: data that are not "
            "finite, a loss that is not, or learning_rate.initial "
            f"({self.initial:g}) far too large."
        )


def _found(trials: _Trials, rounds: Sequence[Round]) -> Found:
    """The mean log rate, weighted by the powers of gains; the best rate where nothing gains."""
    coarse = _Trials.of(rounds, COARSE)
    decade = coarse.largest(_HARDLY)
    hardly_trained = max((p for p in coarse.alive if p < decade), default=decade)
    gains = {p: max(0.0, coarse.loss(hardly_trained) - trials.loss(p)) for p in trials.alive}
    best = trials.largest(0.0)
    if gains[best] == 0:
        centre, gains = float(best), {best: 1.0}
    else:
        weights = {point: (gain / gains[best]) ** _POWER for point, gain in gains.items()}
        centre = math.fsum(p * w for p, w in weights.items()) / math.fsum(weights.values())
    gaining = [lr_of(point) for point, gain in gains.items() if 2 * gain >= gains[best]]
    reason = (
        f"the centre of what gains, {min(gaining):.3g} to {max(gaining):.3g} (best "
        f"{lr_of(best):.3g}), in runs of {rounds[-1].steps} steps"
    )
    nearest = min(trials.alive, key=lambda point: abs(point - centre))
    return Found(trials.alive[nearest], lr_of(centre), reason)


def _around(point: int, stage: str) -> tuple[int, ...]:
    return tuple(point + _SPACING[stage] * offset for offset in _FIRST)


def _span(points: Collection[int]) -> str:
    return ", ".join(f"{lr_of(point):.3g}" for point in points)


def _point(result: CandidateResult) -> int:
    return round(_PER_DECADE * math.log10(result.candidate.lr))
