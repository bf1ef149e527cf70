"""Choose an optimizer and the peak of its rate before a training.

Each optimizer has a search of its own (see `peak_search`), with candidates of equal lengths:

    all   the coarse stage, from the optimizer's usual rate
    one   the fine stage: the preferred one, the first of the list
    one   the first candidate of the fine stage: of the others, the first whose coarse loss ties
          with the lowest. It leaves if its loss is clearly higher, else it gets the complete stage
    then  the preferred one with its peak, or the other one if its fine candidate is better, or
          the only one that has learned; if none has, `fallback` at its usual rate

The choice is clear if its loss is the lowest, and the fine stage has learned more than the coarse.

    U   validation loss of the candidate that hardly trained (the highest, of several optimizers);
        of several optimizers of a classifier, at most the loss of a guess by class frequency
    L   validation loss of the best candidate        e   its standard error

    learned     U - L > max(2 e, 0.01 |U|)          better      its L is lower by more than its e

A network that hardly trained says nearly the same of every sample, so the standard error of the
differences, sample by sample, is about e. A fall of less than a hundredth is typical of a network
that has learned how frequent the classes are, and nothing of their samples.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

from raytrain_opt.search.peak_search import (
    TOLERANCE,
    Budget,
    CandidateSteps,
    PeakChoice,
    PeakRequest,
    PeakSearch,
)
from raytrain_opt.search.policy import CandidateResult, all_diverged

_ERRORS, _LEAST_FALL = 2.0, 0.01
# Optimizers that get a fine stage, the preferred one among them.
_FINALISTS = 2

# With more times the operations of a batch, SGD makes more of the time: on a CPU, a step of
# ResNet-18 with 32 images of 32 x 32 pixels (15 times) is 7 times as long, a step of an MLP with
# 32 vectors (74 times) 35 times.
_MAX_STEP_COST = 4.0
# Up to this many operations in a training, a minute or two of one core, better steps are worth it.
_FEW_FLOPS = 5e12


@dataclass(frozen=True)
class OptimizerRace:
    """The searches of all optimizers, in the job's order, within one budget of steps."""

    names: tuple[str, ...]
    searches: tuple[PeakSearch, ...]
    guessing_loss: float = math.inf  # of a guess by the classes' frequencies
    fallback: int = 0  # the optimizer that trains where nothing is decided, if it trains at all

    @property
    def budget(self) -> Budget:
        """The updates that all candidates may have together."""
        return self.searches[0].budget

    @property
    def steps(self) -> CandidateSteps:
        """The lengths of the candidates."""
        return self.searches[0].steps

    def run(self, why: str) -> Generator[PeakRequest, Sequence[CandidateResult], PeakChoice]:
        """Yield candidates to train, the first with `why`; return the choice, or DivergedError."""
        left = []
        for search in self.searches:
            if (yield from search.coarse(why)):
                left.append(search)
            why = ""
        finalists = list[PeakSearch]()
        while left and len(finalists) < _FINALISTS:
            lowest = min((other.best for other in left), key=lambda best: best.val_loss)
            tied = [other for other in left if not is_better(lowest, other.best)]
            preferred = self.searches[0]
            search, against, limit = preferred if preferred in left else tied[0], "", math.inf
            left.remove(search)
            if finalists:
                against, loss = self.names[finalists[0].optimizer], finalists[0].best.val_loss
                limit = loss + TOLERANCE * abs(loss)
            if (yield from search.fine(against, limit)):
                finalists.append(search)
        if not finalists:
            tried = [result for search in self.searches for result in search.tried]
            raise all_diverged(1, sorted({result.candidate.lr for result in tried}), tried)
        return self._choose(finalists, left)

    def _choose(self, finalists: Sequence[PeakSearch], left: Sequence[PeakSearch]) -> PeakChoice:
        trained = (*finalists, *left)
        untrained = max(search.untrained_loss for search in trained)
        if len(self.names) > 1:
            untrained = min(untrained, self.guessing_loss)
        first, *others = finalists
        if doubt(first.best, untrained) < 1:
            others = [other for other in others if is_better(other.best, first.best)]
        chosen = next(iter(others), first)
        best = min((search.best for search in finalists), key=lambda result: result.val_loss)
        if doubt(chosen.best, untrained) < 1:
            choice = chosen.peak(doubt(chosen.best, untrained))
            return replace(
                choice,
                reason=self._compared(chosen, finalists) + choice.reason,
                is_clear=chosen.is_solved
                or (chosen.best == best and doubt(best, chosen.best_coarse.val_loss) < 1),
            )
        is_guess = untrained == self.guessing_loss
        kind = "of a guess by class" if is_guess else "of a network that hardly trained"
        usual = min(trained, key=lambda one: (one.optimizer != self.fallback, one.optimizer))
        reason = (
            f"the best candidate's loss of {best.val_loss:.4g} is not below {untrained:.4g}, that "
            f"{kind}, by more than the noise, {noise(best, untrained):.2g}; so "
            f"{self.names[usual.optimizer]} trains at its usual rate, or at learning_rate.initial"
        )
        lr = usual.undecided_lr
        return PeakChoice(usual.optimizer, lr, usual.best, usual.untrained_loss, reason, False)

    def _compared(self, chosen: PeakSearch, finalists: Sequence[PeakSearch]) -> str:
        """Say how the chosen optimizer compares with the other finalist, if there is one."""
        if len(finalists) == 1:
            return ""
        bests = [(self.names[search.optimizer], search.best) for search in finalists]
        listed = ", ".join(f"{name} {best.val_loss:.3f}" for name, best in bests)
        error = max(best.val_loss_error for _, best in bests)
        is_lowest = chosen.best.val_loss == min(best.val_loss for _, best in bests)
        how = "has the lowest loss" if is_lowest else "trains: none is better by more than noise"
        return f"{self.names[chosen.optimizer]} {how} ({listed}; standard error {error:.2g}); "


def class_entropy(class_counts: Sequence[int], label_smoothing: float = 0.0) -> float:
    """Return the cross entropy of a guess by the frequencies of classes."""
    even = label_smoothing / len(class_counts)
    shares = [even + (1 - label_smoothing) * n / sum(class_counts) for n in class_counts]
    return -math.fsum(share * math.log(share) for share in shares if share)


def noise(best: CandidateResult, untrained: float) -> float:
    """Return by how much the best loss has to be below an untrained network's."""
    return max(_ERRORS * best.val_loss_error, _LEAST_FALL * abs(untrained))


def doubt(best: CandidateResult, untrained: float) -> float:
    """Return the noise of the best loss over its gain; with 1 or more it has learned nothing."""
    gain = untrained - best.val_loss
    return noise(best, untrained) / gain if gain > 0 else math.inf


def is_better(other: CandidateResult, preferred: CandidateResult) -> bool:
    """Return whether another optimizer's best candidate replaces the preferred one's."""
    return preferred.val_loss - other.val_loss > other.val_loss_error


def why_without_muon(step_flops: float | None, batch_flops: float, steps: float) -> str | None:
    """Return why Muon is not worth trying, or None. Without `step_flops` it cannot train.

    `steps`: of the training; infinite if they depend on its speed.
    """
    if step_flops is None:
        return "Muon is left out: this model has complex parameters, which it cannot train"
    if not (step_flops > _MAX_STEP_COST * batch_flops and step_flops * steps > _FEW_FLOPS):
        return None
    return (
        f"Muon is left out: orthogonalizing takes {step_flops / batch_flops:.0f} "
        "times as many operations as training a batch; optimizer.candidates can name it"
    )
