"""What a trained network thinks of the test split, and errors of one network or of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from raytrain_opt.train.learner import Learner


@dataclass(frozen=True, eq=False)
class Predictions:
    """Of every test sample, in the order of the split: probabilities [samples, classes] float32
    and labels [samples], on the CPU.
    """

    probabilities: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Errors:
    """Shares of the samples whose label is not the best guess, or not among the five best."""

    samples: int
    top1_error: float
    top5_error: float


@torch.no_grad()
def predictions(learner: Learner) -> Predictions:
    """Of the learner's present weights."""
    learner.model.eval()
    probabilities, labels = [], []
    for batch in learner.data.evaluate("test", 0, 1, learner.eval_batch_size):
        with learner.autocast():
            output = learner.model(batch.x)
        probabilities.append(output.float().softmax(dim=1).cpu())
        labels.append(batch.y.cpu())
    return Predictions(torch.cat(probabilities), torch.cat(labels))


def errors(of: Predictions) -> Errors:
    """Of equal probabilities, the lower class is the better guess."""
    order = of.probabilities.sort(dim=1, descending=True, stable=True).indices
    hits = order[:, :5] == of.labels.unsqueeze(1)
    samples = len(of.labels)
    return Errors(
        samples,
        1 - int(hits[:, 0].sum()) / samples,
        1 - int(hits.any(dim=1).sum()) / samples,
    )


def ensemble(members: Sequence[Predictions]) -> Predictions:
    """The mean of their probabilities. Raises ValueError unless all have the same labels."""
    first = members[0]
    if any(not torch.equal(member.labels, first.labels) for member in members):
        raise ValueError("the members were asked about different samples")
    mean = torch.stack([member.probabilities for member in members]).mean(dim=0)
    return Predictions(mean, first.labels)
