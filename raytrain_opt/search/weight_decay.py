"""Weight decay that follows the fit: none at first, more as the network fits its samples.

    f    1 - loss of the last epoch / loss of a network that has hardly trained, 0 .. 1
    E    epochs of the training
    S    sum of the rates of all its steps

    decay of the next epoch = f min(10 / S, 10 / S E / 16, 0.2)

With a decoupled weight decay d, weights forget what they were in 1 / (rate x d) steps, so a
training has S d such times (Wang and Aitchison, arXiv 2405.13698), whatever its length and rate.
A network that fits its training samples closely is about to overfit, if it sees them often, and
needs a strong decay; another is slowed by it (our trials, benchmarks/RESULTS.md). A decay of d
keeps the singular values of a matrix that Muon trains, and each weight that AdamW trains, below
about 1 / d, whatever the loss needs: hence the limit, which trainings of few steps reach.
"""

from __future__ import annotations

from raytrain_opt.search.optimizer_race import optimizer_of
from raytrain_opt.search.peak_search import hardly_trained_loss
from raytrain_opt.search.policy import History

# Times 1 / (rate x decay) in a training of a network that fits its samples perfectly.
_TIMES = 10.0
# Of this many epochs or more; in fewer, samples are repeated less.
_EPOCHS = 16
# Without it, a regression in 120 steps ends with an R2 of 0.850 in place of 0.996.
_MAX_DECAY = 0.2


def decay_by_fit(history: History, optimizer: int, sum_of_lrs: float, epochs: float) -> float:
    """Return the decoupled weight decay of the next epoch, of the job's n-th `optimizer`."""
    losses = history.epoch_losses
    untrained = _untrained_loss(history, optimizer) if losses else 0.0
    if untrained <= 0:  # nothing is known, or a loss of the user's own that may be negative
        return 0.0
    fit = 1 - losses[-1] / untrained
    times = _TIMES * min(1.0, epochs / _EPOCHS)
    return min(max(fit, 0.0), 1.0) * min(times / sum_of_lrs, _MAX_DECAY)


def _untrained_loss(history: History, optimizer: int) -> float:
    """Return the loss of a candidate that hardly trained, or without a search of epoch 1."""
    rounds = [r for r in history.decisions if r.tried and optimizer_of(r) == optimizer]
    loss = hardly_trained_loss(rounds)
    return history.epoch_losses[0] if loss is None else loss
