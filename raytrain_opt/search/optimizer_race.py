"""Choose an optimizer and the peak of its rate before a training.

Each optimizer has a search of its own (see `peak_search`), with candidates of equal lengths:

    all   the coarse stage, from the optimizer's usual rate
    one   the fine stage: the first of the list
    one   the first candidate of the fine stage: the other one with the lowest coarse loss. It
          leaves if its loss is clearly higher, else it gets the complete stage
    then  the first of the list, or the other one if its fine candidate is better, with its peak;
          if no candidate has learned anything, the first at its usual rate (see below)

Schedules of the fine stage put optimizers in the order of full trainings where those do not
overfit (`benchmarks/RESULTS.md`); differences after the coarse stage are small, so the first of
the list, which is the preferred one, is not excluded by them. An optimizer whose candidates all
diverge leaves the race.

Whether candidates have learned enough for a decision.

    U   validation loss of the candidate that hardly trained (the highest, of several optimizers);
        of several optimizers of a classifier, at most the loss of a guess by class frequency
    L   validation loss of the best candidate
    e   standard error of L over the samples of the validation split

    decided     U - L > max(3 e, 0.01 |U|)
    replaces    another optimizer replaces the preferred one if its L is lower by more than its e

A network that hardly trained says nearly the same of every sample, so the standard error of the
differences, sample by sample, is about e. A fall of less than a hundredth is that of a network
that has learned how frequent the classes are, and nothing of their samples. The loss of a network
that starts with confident guesses falls by more than that while it learns no more: hence the limit
of U. Above it a lower loss says something about rates, but nothing about optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from raytrain_opt.errors import DivergedError
from raytrain_opt.search.peak_search import (
    COARSE,
    FINE,
    TOLERANCE,
    PeakChoice,
    PeakRequest,
    PeakSearch,
    hardly_trained,
    point_to_lr,
    steps_left,
)
from raytrain_opt.search.policy import CandidateResult, Decision, shown_failure

_ERRORS, _LEAST_FALL = 3.0, 0.01


def guessing_loss(class_counts: Sequence[int], label_smoothing: float = 0.0) -> float:
    """Return the cross entropy of a guess by the frequencies of classes; infinite without any."""
    if not class_counts:
        return math.inf
    even = label_smoothing / len(class_counts)
    shares = [even + (1 - label_smoothing) * n / sum(class_counts) for n in class_counts]
    return -math.fsum(share * math.log(share) for share in shares if share)


def noise(best: CandidateResult, untrained: float) -> float:
    """Return by how much the best loss has to be below that of a network that hardly trained."""
    return max(_ERRORS * best.val_loss_error, _LEAST_FALL * abs(untrained))


def has_learned(best: CandidateResult, untrained: float) -> bool:
    """Return whether the best candidate says anything about optimizers and rates."""
    return untrained - best.val_loss > noise(best, untrained)


def is_better(other: CandidateResult, preferred: CandidateResult) -> bool:
    """Return whether another optimizer's best candidate replaces that of the preferred one."""
    return preferred.val_loss - other.val_loss > other.val_loss_error


# Optimizers that get a fine stage, the first of the list among them.
_FINALISTS = 2

# With more times the operations of a batch, SGD makes more of the time: on a CPU, a step of
# ResNet-18 with 32 images of 32 x 32 pixels (15 times) is 7 times as long, that of an MLP with 32
# vectors (74 times) 35 times.
_MAX_STEP_COST = 4.0
# Up to this many operations in a training, a minute or two of one core, better steps are worth it.
_FEW_FLOPS = 5e12


@dataclass(frozen=True)
class OptimizerRace:
    """The searches of all optimizers, in the job's order, within one budget of steps.

    `guessing_loss`: of a guess by the classes' frequencies.
    """

    names: tuple[str, ...]
    searches: tuple[PeakSearch, ...]
    budget_steps: float
    guessing_loss: float = math.inf

    @property
    def is_possible(self) -> bool:
        """Whether the budget gives candidates enough steps to tell them apart."""
        steps = self.searches[0].steps
        return steps.fine >= steps.coarse

    def next(self, rounds: Sequence[Decision]) -> tuple[int, PeakRequest | PeakChoice]:
        """Return an optimizer and its next candidates, or its peak. Raises DivergedError."""
        following = {i: self._next_of(i, rounds) for i in range(len(self.searches))}
        for index, request in following.items():
            if isinstance(request, PeakRequest) and (
                len(self.searches) == 1 or request.stage == COARSE
            ):
                return index, request
        left = [index for index, request in following.items() if request is not None]
        if not left:
            raise DivergedError(
                "epoch 1: the loss of every candidate of every optimizer was not finite. Likely "
                "causes: data or a loss that is not finite."
                f"{shown_failure(result for r in rounds for result in r.tried)}"
            )
        left.sort(key=lambda i: (i > 0, _lowest_loss(rounds_of(i, rounds), COARSE)))
        first, *others = left[:_FINALISTS]
        for index in (first, *others):
            own, request = rounds_of(index, rounds), following[index]
            if isinstance(request, PeakRequest) and not _is_behind(
                own, _lowest_loss(rounds_of(first, rounds))
            ):
                return index, request if index == first else _single(request, self.names[first])
        bests = {index: _best(rounds_of(index, rounds)) for index in (first, *others)}
        chosen = next((i for i in others if is_better(bests[i], bests[first])), first)
        untrained = max(_untrained_loss(rounds_of(index, rounds)) for index in left)
        if len(self.names) > 1:
            untrained = min(untrained, self.guessing_loss)
        if not has_learned(bests[chosen], untrained):
            return first, self._usual(first, bests, untrained)
        choice = following[chosen]
        assert isinstance(choice, PeakChoice)
        return chosen, replace(choice, reason=self._compared(chosen, bests) + choice.reason)

    def _compared(self, chosen: int, bests: Mapping[int, CandidateResult]) -> str:
        """Say how the chosen optimizer compares with the other finalist, if there is one."""
        if len(bests) == 1:
            return ""
        listed = ", ".join(f"{self.names[i]} {best.val_loss:.3f}" for i, best in bests.items())
        error = max(best.val_loss_error for best in bests.values())
        listed += f"; standard error {error:.2g}" if error else ""
        is_lowest = bests[chosen].val_loss == min(best.val_loss for best in bests.values())
        how = "has the lowest loss" if is_lowest else "stays: none is better by more than noise"
        return f"{self.names[chosen]} {how} ({listed}); "

    def _usual(
        self, first: int, bests: Mapping[int, CandidateResult], untrained: float
    ) -> PeakChoice:
        """Return the usual rate of an optimizer, because no candidate has learned anything."""
        best = min(bests.values(), key=lambda result: result.val_loss)
        rate = self.searches[first].initial
        reason = (
            f"the best candidate's loss of {best.val_loss:.4g} is not below {untrained:.4g}, that "
            f"{self._of_untrained(untrained)}, by more than the noise, "
            f"{noise(best, untrained):.2g}; so {self.names[first]} trains where its search began"
        )
        return PeakChoice(bests[first], rate, reason, is_decided=False)

    def _of_untrained(self, loss: float) -> str:
        is_guess = loss == self.guessing_loss
        return "of a guess by class" if is_guess else "of a network that hardly trained"

    def _next_of(self, index: int, rounds: Sequence[Decision]) -> PeakRequest | PeakChoice | None:
        """Return what the search of one optimizer does next; None if it left the race."""
        own = rounds_of(index, rounds)
        others = [r for r in rounds if optimizer_of(r) != index]
        search = replace(self.searches[index], budget_steps=steps_left(self.budget_steps, others))
        try:
            return search.next(own)
        except DivergedError:
            if len(self.searches) == 1:
                raise
            return None


def is_too_costly(step_flops: float, batch_flops: float, steps: float) -> bool:
    """Return whether an optimizer takes too many operations beside those of its batches.

    `steps`: of the training; infinite if they depend on its speed.
    """
    return step_flops > _MAX_STEP_COST * batch_flops and step_flops * steps > _FEW_FLOPS


def all_diverged(rounds: Sequence[Decision]) -> bool:
    """Return whether all candidates of the last round's optimizer and stage diverged."""
    own = rounds_of(optimizer_of(rounds[-1]), rounds)
    return math.isinf(_lowest_loss(own))


def optimizer_of(decision: Decision) -> int:
    """Return the optimizer of a round before epoch 1: all its candidates have the same."""
    return decision.tried[0].candidate.optimizer


def rounds_of(optimizer: int, rounds: Sequence[Decision]) -> tuple[Decision, ...]:
    """Return the rounds of an optimizer, without the last one, which decided."""
    return tuple(r for r in rounds if r.tried and optimizer_of(r) == optimizer)


def _is_behind(own: Sequence[Decision], first: float) -> bool:
    """Return whether other rates would hardly bring an optimizer ahead of the first one's loss."""
    if own[-1].stage != FINE or all_diverged(own):
        return False
    return _lowest_loss(own) > first + TOLERANCE * abs(first)


def _single(request: PeakRequest, against: str) -> PeakRequest:
    """Return the middle candidate of several, which shows whether there is a need for more."""
    if len(request.points) == 1:
        return request
    middle = request.points[len(request.points) // 2]
    reason = f"{point_to_lr(middle):.3g}, the best in fewer steps, against {against}"
    return replace(request, points=(middle,), reason=reason)


def _lowest_loss(rounds: Sequence[Decision], stage: str | None = None) -> float:
    """Return the lowest loss of the candidates of a stage, by default of the last one."""
    stage = stage or rounds[-1].stage
    tried: list[CandidateResult] = [r for d in rounds if d.stage == stage for r in d.tried]
    return min((r.val_loss for r in tried if r.status == "ok"), default=float("inf"))


def _best(rounds: Sequence[Decision]) -> CandidateResult:
    """Return the best candidate of the last stage; where all of it diverged, of all."""
    tried = [r for d in rounds for r in d.tried if r.status == "ok"]
    last = {r.candidate.index for d in rounds if d.stage == rounds[-1].stage for r in d.tried}
    return min(tried, key=lambda r: (r.candidate.index not in last, r.val_loss))


def _untrained_loss(rounds: Sequence[Decision]) -> float:
    """Return the loss of an optimizer's candidate that hardly trained."""
    result = hardly_trained(rounds)
    return -math.inf if result is None else result.val_loss
