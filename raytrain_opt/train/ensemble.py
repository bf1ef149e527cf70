"""Predictions on the test split, and the error rates of one model or of an ensemble."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from raytrain_opt.train.learner import Learner


@dataclass(frozen=True, eq=False)
class Predictions:
    """Probabilities, float32 [samples, classes], and labels, int64 [samples], in order, on CPU."""

    probabilities: Tensor
    labels: Tensor


@dataclass(frozen=True)
class ErrorRates:
    """Fractions of the samples whose label is not the top prediction, or not in the top five."""

    samples: int
    top1_error: float
    top5_error: float


@torch.no_grad()
def predict(learner: Learner) -> Predictions:
    """Evaluate the learner's current weights on the test split."""
    learner.model.eval()
    probabilities, labels = [], []
    for batch in learner.data.eval_batches("test", 0, 1, learner.eval_batch_size):
        with learner.autocast():
            output = learner.model(batch.x)
        probabilities.append(output.float().softmax(dim=1).cpu())
        labels.append(batch.y.cpu())
    return Predictions(torch.cat(probabilities), torch.cat(labels))


def error_rates(predictions: Predictions) -> ErrorRates:
    """Return the top-1 and top-5 error; of equal probabilities, the lower class ranks first."""
    ranking = predictions.probabilities.sort(dim=1, descending=True, stable=True).indices
    hits = ranking[:, :5] == predictions.labels.unsqueeze(1)
    samples = len(predictions.labels)
    return ErrorRates(
        samples, 1 - int(hits[:, 0].sum()) / samples, 1 - int(hits.any(dim=1).sum()) / samples
    )


def average_predictions(models: Sequence[Predictions]) -> Predictions:
    """Average the probabilities of models. Raises ValueError if their labels differ."""
    first = models[0]
    if any(not torch.equal(predictions.labels, first.labels) for predictions in models):
        raise ValueError("the ensemble's models were evaluated on different samples")
    mean = torch.stack([predictions.probabilities for predictions in models]).mean(dim=0)
    return Predictions(mean, first.labels)
