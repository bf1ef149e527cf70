"""Evaluation counts each sample once, on any number of ranks."""

from __future__ import annotations

import math
from base64 import b64decode
from collections import Counter
from dataclasses import replace
from io import BytesIO
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from raytrain_opt.data.base import Batch
from raytrain_opt.results import MAX_MISTAKES, Predictions, Steps
from raytrain_opt.train.evaluation import PredictionRecorder
from raytrain_opt.train.learner import Learner
from tests.unit.train.test_learner import (
    CLASSES,
    LRS,
    TEST_SIZE,
    all_of,
    arrays,
    learner,
    net_with_norm,
)


def cross_entropy_of_a_batch(output: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, labels)


def count_one_by_one(trained: Learner, x: Tensor, y: Tensor) -> tuple[float, int, int]:
    """Sum of losses, hits of the first guess, hits among the best five; sample by sample."""
    trained.model.eval()
    losses, top1, top5 = 0.0, 0, 0
    with torch.no_grad():
        for sample, label in zip(x, y, strict=True):
            scores = trained.model(sample[None])[0]
            losses -= float(scores.log_softmax(0)[label])
            better = int((scores > scores[label]).sum())
            top1 += better < 1
            top5 += better < 5
    return losses, top1, top5


@pytest.mark.parametrize("batch_size", [1, 8, 37, None])
def test_evaluation_counts_every_test_sample_once(batch_size: int | None) -> None:
    trained = learner(net_with_norm, evaluate={"batch_size_per_worker": batch_size})
    trained.train(1, Steps(0, LRS), all_of(1))
    totals = trained.evaluate("test")
    [batch] = trained.data.eval_batches("test", 0, 1, 100)
    assert np.array_equal(batch.y.numpy(), arrays().test_y)
    losses, top1, top5 = count_one_by_one(trained, batch.x, batch.y)
    counts = totals.sums["accuracy"], totals.sums["top5"]
    assert (totals.samples, *counts) == (TEST_SIZE, top1, top5)
    assert totals.loss == pytest.approx(losses / TEST_SIZE, rel=1e-5)
    assert 0 < top1 < top5 < TEST_SIZE
    assert totals.means["accuracy"] == top1 / TEST_SIZE


@pytest.mark.parametrize("world_size", [2, 3, 5, 37, 40])
@pytest.mark.parametrize("split", ["test", "validation"])
def test_the_ranks_evaluate_each_sample_once(world_size: int, split: Any) -> None:
    trained = learner()
    complete = trained.evaluate(split)
    parts = [trained.evaluate(split, rank, world_size) for rank in range(world_size)]
    assert sum(part.samples for part in parts) == complete.samples
    for name, value in complete.sums.items():
        assert sum(part.sums[name] for part in parts) == pytest.approx(value)
    assert sum(part.loss_squares for part in parts) == pytest.approx(complete.loss_squares)


def test_the_standard_error_of_the_loss_is_that_over_the_samples() -> None:
    trained = learner()
    [batch] = trained.data.eval_batches("test", 0, 1, 100)
    with torch.no_grad():
        losses = nn.functional.cross_entropy(trained.model(batch.x), batch.y, reduction="none")
    expected = float(losses.double().std()) / math.sqrt(len(losses))
    totals = trained.evaluate("test")
    assert totals.loss_error == pytest.approx(expected, rel=1e-4)
    assert replace(totals, samples=1).loss_error == math.inf
    own = learner(loss=nn.CrossEntropyLoss())
    assert own.evaluate("test").loss_error == pytest.approx(expected, rel=1e-4)


def test_the_standard_error_of_batch_means_is_that_over_batches() -> None:
    trained = learner(learning_rate={"policy": "stpt"}, loss=cross_entropy_of_a_batch)
    batches = trained.data.eval_batches("validation", 0, 1, 2)  # of 8 samples
    with torch.no_grad():
        means = [
            float(trained.task.validation_metrics(trained.model, b.content)["loss"][0])
            for b in batches
        ]
    totals = trained.evaluate("validation")
    assert totals.loss_error == pytest.approx(np.std(means, ddof=1) / 2, rel=1e-4)
    for size, batch_size in ((1, 2), (9, 3), (33, 3)):  # none is left alone
        info = replace(trained.data.info, validation_size=size)
        with patch.object(trained.data, "info", info):
            assert trained.evaluate("validation").samples_per_loss == batch_size


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_the_predictions_of_all_ranks_are_those_of_the_network(world_size: int) -> None:
    """The pictures of the most confident mistakes are the images of these samples."""
    trained = learner(evaluate={"batch_size_per_worker": 8})
    trained.train(1, Steps(0, LRS), all_of(1))
    parts = [trained.evaluate("test", rank, world_size).predictions for rank in range(world_size)]
    predictions = Predictions.join(parts)
    assert predictions is not None
    [batch] = trained.data.eval_batches("test", 0, 1, 100)
    with torch.no_grad():
        confidences, classes = trained.model(batch.x).softmax(dim=1).max(dim=1)
    counts = Counter(zip(arrays().test_y.tolist(), classes.tolist(), strict=True))
    assert predictions.confusion == tuple((*pair, n) for pair, n in sorted(counts.items()))
    wrong = [i for i in range(TEST_SIZE) if classes[i] != batch.y[i]]
    worst = sorted(wrong, key=lambda i: -float(confidences[i]))[:MAX_MISTAKES]
    assert [mistake.sample for mistake in predictions.mistakes] == worst
    for mistake in predictions.mistakes:
        i = mistake.sample
        assert (mistake.label, mistake.predicted) == (batch.y[i], classes[i])
        assert mistake.confidence == pytest.approx(float(confidences[i]), rel=1e-5)
        assert mistake.jpeg is not None
        image = Image.open(BytesIO(b64decode(mistake.jpeg)))
        difference = np.asarray(image, float) - arrays().test_x[mistake.sample, ..., 0]
        assert np.abs(difference).mean() < 8


def test_a_confidence_that_is_not_finite_counts_as_none() -> None:
    trained = learner()
    [batch] = trained.data.eval_batches("test", 0, 1, 100)
    recorder = PredictionRecorder(nn.Flatten(), trained.data.info.preprocessing)
    recorder(torch.full((batch.size, CLASSES), math.nan))
    recorder.add(batch)
    predictions = recorder.result(trained.data)
    assert predictions is not None
    assert [mistake.confidence for mistake in predictions.mistakes] == [0] * MAX_MISTAKES


def test_texts_of_batches_may_be_padded_to_different_lengths() -> None:
    recorder = PredictionRecorder(nn.Flatten(), None)
    for length in (5, 6):
        recorder.add(Batch(recorder(torch.eye(5, length)), torch.zeros(5, dtype=torch.int64)))


def test_evaluation_changes_nothing() -> None:
    trained, other = learner(net_with_norm), learner(net_with_norm)
    before = trained.state(copy=True).digest()
    trained.evaluate("test")
    assert trained.state(copy=True).digest() == before
    trained.train(1, Steps(0, LRS), all_of(1))
    other.train(1, Steps(0, LRS), all_of(1))
    assert trained.state(copy=True).digest() == other.state(copy=True).digest()
