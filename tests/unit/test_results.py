"""Predictions of the parts of a split, joined."""

from __future__ import annotations

from collections import Counter

from raytrain_opt.results import Mistake, Predictions


def predictions(rows: list[tuple[int, int, float]]) -> Predictions:
    """Rows of label, predicted class, confidence; every mistake is kept, without a picture."""
    confusion = tuple((*pair, count) for pair, count in Counter(row[:2] for row in rows).items())
    mistakes = tuple(
        Mistake(sample=i, label=label, predicted=predicted, confidence=confidence, jpeg=None)
        for i, (label, predicted, confidence) in enumerate(rows)
        if label != predicted
    )
    return Predictions(confusion=confusion, mistakes=mistakes)


ROWS = [(0, 0, 0.95), (1, 0, 0.75), (1, 0, 1.0), (1, 1, 0.7), (2, 2, 0.0)]


def test_the_parts_of_a_split_are_joined_in_order() -> None:
    joined = Predictions.join([predictions(ROWS[:2]), None, predictions(ROWS[2:])])
    assert joined == Predictions.join([predictions(ROWS)])
    assert joined is not None
    assert joined.confusion == ((0, 0, 1), (1, 0, 2), (1, 1, 1), (2, 2, 1))
    assert [(m.sample, m.label, m.predicted) for m in joined.mistakes] == [(2, 1, 0), (1, 1, 0)]
