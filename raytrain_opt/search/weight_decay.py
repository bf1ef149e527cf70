"""Weight decay that follows the fit: none at first, more as the network fits its samples.

    E    epochs of the training          S    sum of the rates of all its steps
    f    1 - loss of the last epoch / loss of a network that has hardly trained, 0 .. 1
    g    fall of the validation loss / fall of the training loss, from a quarter to half of the
         epochs; the first half of the training leaves the validation split out
    m    2; 1 for a network that does not normalize channels

    decay of the next epoch = f min(1, E / 16) min(10 / S, 0.6 or 0.2)

From half of the epochs on, f is at least m (1 - 3 g), m at most; for a task of the user's own it
is this then, and the limit 0.2: a regression with a low loss need not know its samples by heart.
A decay of d keeps the singular values of a matrix of Muon, and each weight of AdamW, below about
1 / d: hence the limit. All other reasons: docs/optimizers.md; trials: benchmarks/RESULTS.md.
Source: a training has S d times in which weights forget (Wang and Aitchison, arXiv 2405.13698).
"""

from __future__ import annotations

from dataclasses import dataclass

from raytrain_opt.search.peak_search import TOLERANCE
from raytrain_opt.search.policy import History

# From so many epochs on, a network may memorize its samples.
MANY_EPOCHS = 16
# Times 1 / (rate x decay) in a training of a network that fits its samples perfectly.
_TIMES = 10.0
# Of a classifier or not. Without it, a regression in 120 steps has an R2 of 0.850, not 0.996.
_MAX_DECAY = {True: 0.6, False: 0.2}
# The fit of a network that memorizes (held-out samples do not improve), and of one that does not
# normalize channels.
_MEMORIZING_FIT, _WITHOUT_CHANNEL_NORM = 2.0, 1.0
# A network does not memorize if held-out samples gain this share of the training samples' gain.
_HEALTHY_SHARE = 1 / 3


@dataclass(frozen=True)
class Watch:
    """The epochs after which the validation split is scored, until `end` held out; 0: never."""

    start: int
    end: int
    channel_norm: bool = True

    @classmethod
    def of(cls, epochs: int, *, channel_norm: bool) -> Watch:
        """Return the epochs of a training; a short one is not watched."""
        return cls(epochs // 4, epochs // 2, channel_norm) if epochs >= MANY_EPOCHS else cls(0, 0)

    def falls(self, history: History) -> tuple[float, float]:
        """Return the falls of the training and the validation loss; 0 if they are not known."""
        scored, losses = dict(history.validation_losses), history.epoch_losses
        if self.start not in scored or self.end not in scored:
            return 0.0, 0.0
        return losses[self.start - 1] - losses[self.end - 1], scored[self.start] - scored[self.end]

    def fit(self, history: History, untrained: float) -> float:
        """Return a lower bound of the fit: 0 if held-out samples improve as training samples do.

        It is 0, too, if the training loss hardly falls, relative to the `untrained` network's.
        """
        learned, generalized = self.falls(history)
        if not learned > TOLERANCE * untrained:
            return 0.0
        most = _MEMORIZING_FIT if self.channel_norm else _WITHOUT_CHANNEL_NORM
        return most * min(max(1 - generalized / learned / _HEALTHY_SHARE, 0.0), 1.0)

    def finding(self, history: History) -> str:
        """Say what the losses show."""
        learned, generalized = self.falls(history)
        return (
            f"from epoch {self.start} to {self.end} the training loss fell by {learned:.3g}, that "
            f"of held-out samples by {generalized:.3g}: more weight decay"
        )


def decay_by_fit(
    history: History,
    sum_of_lrs: float,
    epochs: float,
    watch: Watch = Watch(0, 0),
    *,
    classifies: bool = True,
) -> float:
    """Return the decoupled weight decay of the next epoch."""
    losses, latest = history.epoch_losses, history.latest
    if not losses:
        return 0.0
    # Of a candidate that hardly trained, or without a search of epoch 1.
    untrained = losses[0] if latest is None else latest.untrained_loss
    if untrained is None or untrained <= 0:  # a loss of the user's own may be negative
        return 0.0
    only_watched = not classifies and any(watch.falls(history))
    fit = 0.0 if only_watched else min(1 - losses[-1] / untrained, 1.0)
    fit = max(fit, watch.fit(history, untrained))
    repeats = min(1.0, epochs / MANY_EPOCHS)
    return fit * repeats * min(_TIMES / sum_of_lrs, _MAX_DECAY[classifies])
