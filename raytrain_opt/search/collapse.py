"""Start again at a lower peak where a training collapsed.

    collapsed   the loss or the weights are not finite; or, in an epoch between a tenth and a
                quarter of them, the training loss is 0.3 % above the first epoch's or, after twice
                a candidate's steps, if one had less than half of it, above the loss of a guess

A collapsed training starts from the initial weights, for the epochs that are left; in the second
half none starts again. Why: docs/learning-rate.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from operator import itemgetter

from raytrain_opt.search.policy import History

# The next rate below, on the lattice of the search (`peak_search`).
_LR_FACTOR = 10**-0.5
# Four steps cover two decades. If these do not train, the rate is not the cause.
_MAX_RESTARTS = 4
# Losses of the first epoch are those of the warm-up.
_FEWEST_EPOCHS = 2
# Where nothing is left to learn, losses rise by less: by 0.2 % in one of 12 trainings with binary
# labels at chance.
_LEAST_RISE = 0.003


@dataclass(frozen=True)
class Attempt:
    """A training from the initial weights, after `start` epochs of earlier ones."""

    start: int = 0
    number: int = 0  # of those before
    why: str = field(default="", compare=False)  # the one before has collapsed

    @property
    def lr_factor(self) -> float:
        """The peak, relative to the one that the search chose."""
        return _LR_FACTOR**self.number

    def own(self, history: History) -> History:
        """Return the history without the epochs of earlier attempts."""
        scored = ((epoch - self.start, loss) for epoch, loss in history.validation_losses)
        return replace(
            history,
            epoch_losses=history.epoch_losses[self.start :],
            validation_losses=tuple((epoch, loss) for epoch, loss in scored if epoch > 0),
        )


def latest_attempt(
    history: History, epochs: int, guessing_loss: float = math.inf, *, may_rise: bool = False
) -> Attempt:
    """Return the attempt that the next epoch of a training of `epochs` belongs to.

    `guessing_loss`: see `optimizer_race`; infinite: no limit. `may_rise`: a sampler of the user's
    own may begin with easy samples, so that only a loss that is not finite shows a collapse.
    """
    attempt, epoch = Attempt(), len(history.epoch_losses)
    if history.restarts:
        attempt = Attempt(history.restarts[-1] - 1, len(history.restarts))
    may_start = attempt.start < epoch < last_restart(epochs) and attempt.number < _MAX_RESTARTS
    if may_start and (why := _why_collapsed(attempt, history, epochs, guessing_loss, may_rise)):
        return Attempt(epoch, attempt.number + 1, why)
    return attempt


def _why_collapsed(
    attempt: Attempt, history: History, epochs: int, guessing_loss: float, may_rise: bool
) -> str:
    """Return why the attempt has collapsed in the latest epoch; an empty text if it has not."""
    loss = history.epoch_losses[-1]
    why = f"the training loss is {loss:.3g}"
    if not math.isfinite(loss):
        return why
    first, last = (max(_FEWEST_EPOCHS, math.ceil(epochs * part)) for part in (0.1, 0.25))
    if may_rise or not first <= len(history.epoch_losses) - attempt.start <= last:
        return ""
    limits = {"the first epoch's": history.epoch_losses[attempt.start]}
    tried = (result for decision in history.decisions for result in decision.tried)
    if any(result.val_loss < guessing_loss / 2 for result in tried):
        limits["a guess's"] = guessing_loss
    whose, limit = min(limits.items(), key=itemgetter(1))
    is_above = loss > limit + _LEAST_RISE * abs(limit)
    return f"{why}, above {whose} {limit:.3g}" if is_above else ""


def last_restart(epochs: int) -> int:
    """Return the last epoch in which another attempt may begin; 0 if `epochs` is 0, unknown."""
    return epochs // 2 + 1 if epochs else 0
