"""The record of predictions, computed from those of every sample."""

from __future__ import annotations

import numpy as np

from raytrain_opt.recording.records import PredictionsRecord
from raytrain_opt.results import Predictions


def predictions(rows: list[tuple[int, int, float]]) -> Predictions:
    """Rows of label, predicted class, confidence; every mistake is kept, without a picture."""
    labels, classes = np.array([row[:2] for row in rows], np.int32).T
    mistakes: dict[int, tuple[bytes | None, str | None]] = {
        i: (None, None) for i, (label, predicted, _) in enumerate(rows) if label != predicted
    }
    return Predictions(labels, classes, np.array([row[2] for row in rows], np.float32), mistakes)


ROWS = [(0, 0, 0.95), (1, 0, 0.75), (1, 0, 1.0), (1, 1, 0.7), (2, 2, 0.0)]


def test_samples_are_counted_by_label_and_prediction() -> None:
    record = PredictionsRecord.of(3, ["cat", "dog", "eel", "fox"], predictions(ROWS))
    assert record.epoch == 3
    assert record.confusion == ((0, 0, 1), (1, 0, 2), (1, 1, 1), (2, 2, 1))
    assert [(m.sample, m.label, m.predicted) for m in record.mistakes] == [(2, 1, 0), (1, 1, 0)]


def test_a_confidence_that_is_not_finite_counts_as_none() -> None:
    record = PredictionsRecord.of(1, ["cat", "dog"], predictions([(0, 1, float("nan"))]))
    assert record.mistakes[0].confidence == 0


def test_the_parts_of_a_split_are_joined_in_order() -> None:
    joined = Predictions.join([predictions(ROWS[:2]), None, predictions(ROWS[2:])])
    assert joined is not None
    assert np.array_equal(joined.labels, [0, 1, 1, 1, 2])
    assert joined.mistakes.keys() == {1, 2}
