"""Which peak learning rate suits a whole training: candidates train the whole schedule, squeezed
into few steps, all from the start weights.

Rates are points of one lattice, 4 a decade: where the search begins does not change which rates
it can end at.

    coarse   3 decades around the start (2 for short trainings), sqrt(10) apart, in few steps.
             The best at an edge: the grid is extended beyond it. All diverged: further down.
    fine     from the best upward (few steps favour small rates), half as far apart, in more
             steps; below what did worse than hardly training. Also extended at an edge.
    repeat   where noise leaves it open: the contested ones again, on other batches.

So candidates race: hopeless ones never get the longer schedule, which is fair to all that do.
The *largest* rate within the noise of the best is chosen: short schedules favour small rates
still, and neighbours of the optimum differ by less than the noise. Very short ones favour them by
more than noise: there the next larger point is taken.

Sources: Wu et al., ICLR 2018 (short-horizon bias); the trial that compared the rules is ours.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from raytrain_opt.errors import DivergedError
from raytrain_opt.search.paired import (
    Losses,
    averaged,
    behind_best,
    errors_behind,
    losses_of,
    lowest,
)
from raytrain_opt.search.policy import CandidateResult, Round

COARSE, FINE, REPEAT = "coarse", "fine", "repeat"

_PER_DECADE = 4

# (points between candidates, candidates, reserve for extending): the first that the budget allows.
_GRIDS = ((2, 7, 3), (2, 5, 3), (4, 3, 2))
# Most of the budget that the coarse stage and its reserve take, and of the horizon.
_COARSE_SHARE = 0.5
_COARSE_HORIZON = 0.25
# Steps of a coarse and a fine candidate where the budget allows; with fewer than the last there
# is no search, because a schedule of so few steps says nothing.
_COARSE_STEPS, _FINE_STEPS, _FEWEST_STEPS = 16, 32, 5
# Fine candidates, and at most, before any extension.
_FINE_RUNS, _MOST_FINE = 3, 4
_MOST_EXTENSIONS = 4
# In standard errors of the paired differences: noise, and what a repeat may still turn over.
_NOISE, _OPEN = 2.0, (1.0, 3.0)
# A choice is at most so many points above the best: noise must not carry it far.
_MOST_ABOVE = 2

# Schedules of fewer steps favour small rates. Measured (benchmarks/RESULTS.md): the best peak of
# 12 to 24 steps is about half that of 48 to 400.
_UNBIASED_STEPS = 32

# The most candidates that a round can have.
MOST_CANDIDATES = max(count for _, count, _ in _GRIDS)


def lr_of(point: int) -> float:
    """The rate of a point of the lattice."""
    return math.pow(10.0, point / _PER_DECADE)


@dataclass(frozen=True)
class Ask:
    """Train these points, `steps` each, from `first_step` of the first epoch on."""

    stage: str
    points: tuple[int, ...]
    steps: int
    reason: str
    first_step: int = 0


@dataclass(frozen=True)
class Found:
    """The choice: the best peak as it was last tried, and the one to train with."""

    result: CandidateResult
    lr: float
    reason: str


@dataclass(frozen=True)
class _Trials:
    """What became of the points of a stage."""

    alive: dict[int, Losses]
    diverged: frozenset[int]

    @classmethod
    def of(cls, rounds: Sequence[Round], stage: str) -> _Trials:
        tried = [result for r in rounds if r.stage == stage for result in r.tried]
        alive = {_point(r): losses_of(r) for r in tried if r.status == "ok"}
        return cls(alive, frozenset(_point(r) for r in tried if r.status != "ok"))

    def pooled_with(self, first: _Trials) -> _Trials:
        """A repeat of some of the `first`: the mean of both. All of the first, if it was lost."""
        pooled = {p: averaged([first.alive[p], self.alive[p]]) for p in self.alive}
        return _Trials(pooled or first.alive, frozenset())

    @property
    def hopeless(self) -> frozenset[int]:
        """What diverged, or ended above the best and clearly worse than the lowest rate, which
        hardly trains.
        """
        if not self.alive:
            return self.diverged
        best, least = lowest(self.alive), self.alive[min(self.alive)]
        above = (p for p in self.alive if p > best)
        return self.diverged.union(
            p for p in above if errors_behind(self.alive[p], least) > _NOISE
        )

    def ceiling(self, point: int) -> float:
        """The lowest hopeless point above this one."""
        return min((p for p in self.hopeless if p > point), default=math.inf)

    def beyond_edge(self, spacing: int, count: int) -> tuple[int, ...]:
        """New points past the best one, where that is at an edge; below all where all diverged."""
        tried = self.diverged | self.alive.keys()
        best = lowest(self.alive) if self.alive else min(tried)
        if best == max(self.alive, default=None):
            above = _ladder(best, spacing, count)
            free = tuple(point for point in above if point < self.ceiling(best))
            if free:
                return free
        return _ladder(best, -spacing, count) if best == min(tried) else ()

    def pick(self, most_above: int) -> tuple[int, str]:
        """The largest within the noise of the best, and why."""
        best, behind = lowest(self.alive), behind_best(self.alive)
        near = [p for p in behind if behind[p] <= _NOISE and p <= best + most_above]
        pick = max(near)
        if pick <= best:
            return best, f"{lr_of(best):.3g} is best"
        return pick, (
            f"{lr_of(pick):.3g} is the largest within noise of the best, {lr_of(best):.3g} "
            f"({behind[pick]:.1f} standard errors behind)"
        )

    def is_settled_above(self, points: Sequence[int]) -> bool:
        """Whether these are lower than the best, and a larger one is as good: so lower ones are
        not wanted.
        """
        if not points or not self.alive:
            return False
        best = lowest(self.alive)
        return max(points) < best and self.pick(_MOST_ABOVE)[0] > best

    def contested(self) -> tuple[int, ...]:
        """What a repeat should compare: empty when the choice is clear."""
        best, behind = lowest(self.alive), behind_best(self.alive)
        above = [p for p in sorted(behind) if best < p <= best + _MOST_ABOVE]
        if not any(_OPEN[0] <= behind[p] <= _OPEN[1] for p in above):
            return ()
        return (best, *(p for p in above if behind[p] <= _OPEN[1]))


@dataclass(frozen=True)
class _Grid:
    spacing: int
    count: int
    extension: int
    steps: int

    @property
    def reserve(self) -> int:
        """Steps of all candidates and of one extension."""
        return (self.count + self.extension) * self.steps


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
        return self._grid is not None

    def is_lost(self, rounds: Sequence[Round]) -> bool:
        """Whether all candidates of the last stage diverged, so that it has to go on."""
        stage = rounds[-1].stage
        return stage != REPEAT and not _Trials.of(rounds, stage).alive

    def next(self, rounds: Sequence[Round]) -> Ask | Found:
        """What follows after these rounds.

        Within the budget, but for more of what was lost: without a rate that trains there is
        no training. Raises DivergedError when that has been tried often enough.
        """
        grid = self._grid
        assert grid is not None
        if not rounds:
            return self._first(grid)
        if rounds[-1].stage == COARSE:
            return self._after_coarse(rounds, grid)
        return self._after_fine(rounds, grid)

    @property
    def _grid(self) -> _Grid | None:
        wanted = max(_COARSE_STEPS, round(_COARSE_HORIZON * self.horizon * self.epoch_steps))
        for spacing, count, extension in _GRIDS:
            affordable = int(_COARSE_SHARE * self.budget_steps / (count + extension))
            steps = min(wanted, affordable, self.epoch_steps)
            if steps >= _FEWEST_STEPS:
                return _Grid(spacing, count, extension, steps)
        return None

    def _first(self, grid: _Grid) -> Ask:
        centre = grid.spacing * round(_PER_DECADE * math.log10(self.initial) / grid.spacing)
        points = tuple(centre + grid.spacing * (i - grid.count // 2) for i in range(grid.count))
        return Ask(COARSE, points, grid.steps, f"{_span(points)}, around the initial rate")

    def _after_coarse(self, rounds: Sequence[Round], grid: _Grid) -> Ask | Found:
        trials, left = _Trials.of(rounds, COARSE), self.steps_left(rounds)
        points = trials.beyond_edge(grid.spacing, grid.extension)
        keeps = (len(points) + _FINE_RUNS + 1) * grid.steps <= left
        if points and self._may_extend(rounds, trials, affordable=keeps):
            return _extension(COARSE, points, grid.steps, trials)
        pick, why = trials.pick(grid.spacing)
        points = _fine_points(lowest(trials.alive), pick, trials, max(1, grid.spacing // 2))
        left = min(left, self.budget_steps - grid.reserve)
        wanted = max(_FINE_STEPS, round(self.horizon * self.epoch_steps))
        steps = min(wanted, int(left / (len(points) + 1)), self.epoch_steps)
        if steps < grid.steps:
            return _found(rounds, pick, why)
        return Ask(FINE, points, steps, f"{why}, in {grid.steps} steps: next {_span(points)}")

    def _after_fine(self, rounds: Sequence[Round], grid: _Grid) -> Ask | Found:
        trials, steps, left = _Trials.of(rounds, FINE), rounds[-1].steps, self.steps_left(rounds)
        if rounds[-1].stage == REPEAT:
            return _found(
                rounds, *_Trials.of(rounds, REPEAT).pooled_with(trials).pick(_MOST_ABOVE)
            )
        bounds = _Trials(trials.alive, trials.diverged | _Trials.of(rounds, COARSE).hopeless)
        points = bounds.beyond_edge(max(1, grid.spacing // 2), 1)
        if trials.is_settled_above(points):
            points = ()
        affordable = len(points) * steps <= left
        if points and self._may_extend(rounds, trials, affordable=affordable):
            return _extension(FINE, points, steps, trials)
        points = trials.contested()
        if points and len(points) * steps <= left and 2 * steps <= self.epoch_steps:
            reason = f"noise leaves {_span(points)} open: again, on other batches"
            return Ask(REPEAT, points, steps, reason, first_step=steps)
        return _found(rounds, *trials.pick(_MOST_ABOVE))

    def steps_left(self, rounds: Sequence[Round]) -> float:
        """Of the budget."""
        return self.budget_steps - sum(len(r.scores) * r.steps for r in rounds)

    def _may_extend(self, rounds: Sequence[Round], trials: _Trials, *, affordable: bool) -> bool:
        """Where nothing is alive, it has to be; raises DivergedError after too many times."""
        done = sum(r.stage == rounds[-1].stage for r in rounds) - 1
        if trials.alive:
            return affordable and done < _MOST_EXTENSIONS
        if done < _MOST_EXTENSIONS:
            return True
        tried = sorted(result.candidate.lr for r in rounds for result in r.tried)
        raise DivergedError(
            "epoch 1: the loss of every candidate was not finite, at each of these peak learning "
            f"rates: {', '.join(f'{lr:.3g}' for lr in tried)}. Likely causes: data that are not "
            "finite, a loss that is not, or learning_rate.initial "
            f"({self.initial:g}) far too large."
        )


def _fine_points(best: int, pick: int, coarse: _Trials, spacing: int) -> tuple[int, ...]:
    """From the best upward, below what diverged; downward too where that leaves too few."""
    top = min(pick + 2 * spacing, best + (_MOST_FINE - 1) * spacing)
    while top >= coarse.ceiling(best):
        top -= spacing
    bottom = min(best, top - (_FINE_RUNS - 1) * spacing)
    return tuple(range(bottom, top + 1, spacing))


def _extension(stage: str, points: tuple[int, ...], steps: int, trials: _Trials) -> Ask:
    why = "the best is at the edge" if trials.alive else "all diverged"
    return Ask(stage, points, steps, f"{why}: next {_span(points)}")


def _found(rounds: Sequence[Round], point: int, reason: str) -> Found:
    tried = [
        (r, result)
        for r in rounds
        for result in r.tried
        if result.status == "ok" and _point(result) == point
    ]
    last, result = tried[-1]
    runs = "two runs" if last.stage == REPEAT else "a run"
    reason = f"{reason}, in {runs} of {last.steps} steps"
    larger = _point(result) + 1
    if last.steps >= _UNBIASED_STEPS or larger in _hopeless(rounds):
        return Found(result, result.candidate.lr, reason)
    return Found(result, lr_of(larger), f"{reason}, and so few favour small rates")


def _hopeless(rounds: Sequence[Round]) -> frozenset[int]:
    return _Trials.of(rounds, COARSE).hopeless | _Trials.of(rounds, FINE).hopeless


def _ladder(start: int, spacing: int, count: int) -> tuple[int, ...]:
    """Ascending points next to `start`; downward for a negative spacing."""
    return tuple(sorted(start + spacing * (i + 1) for i in range(count)))


def _span(points: Collection[int]) -> str:
    return ", ".join(f"{lr_of(point):.3g}" for point in points)


def _point(result: CandidateResult) -> int:
    return round(_PER_DECADE * math.log10(result.candidate.lr))
