"""What the weights predict on the test split: classes and mistakes."""

from __future__ import annotations

import numpy as np

from raytrain_opt.recording.predictions import PredictionsRecord
from raytrain_opt.report.formatting import count, percent, times
from raytrain_opt.report.plots import Cell, Section, Table

# Rows of the table.
_WORST_CLASSES = 100


class _Classes:
    """The classes that occur in the test split, lowest accuracy first, and their numbers."""

    def __init__(self, record: PredictionsRecord) -> None:
        self.names = record.class_names
        self.labels, self.predicted, self.counts = np.array(record.confusion, int).T
        is_correct, size = self.labels == self.predicted, len(self.names)
        self.samples = np.bincount(self.labels, self.counts, size)
        self.predictions = np.bincount(self.predicted, self.counts, size)
        self.correct = np.bincount(self.labels, self.counts * is_correct, size)
        self.accuracy = self.correct / np.maximum(self.samples, 1)
        order = np.argsort(self.accuracy, kind="stable")
        self.order = [int(i) for i in order if self.samples[i]]
        # Wrong pairs, the most frequent first.
        self.confusions = [i for i in np.argsort(-self.counts, kind="stable") if not is_correct[i]]


def predictions_section(record: PredictionsRecord | None) -> Section:
    """Return accuracies of classes and the most confident mistakes."""
    name, title = "predictions", "Predictions"
    if record is None:
        return Section(name, title)
    classes = _Classes(record)
    note = (
        f"Predictions on the {times(int(classes.samples.sum()), 'test sample')} after epoch "
        f"{record.epoch}. A prediction is the most probable class, its confidence the probability "
        "of that class."
    )
    mistakes = [
        (
            mistake.jpeg,
            f"{classes.names[mistake.predicted]} ({percent(mistake.confidence)})",
            f"labeled {classes.names[mistake.label]}; test sample {mistake.sample}",
        )
        for mistake in record.mistakes
    ]
    return Section(name, title, [], [_classes_table(classes)], note, mistakes)


def _classes_table(classes: _Classes) -> Table:
    """Return the classes with the lowest accuracies."""
    worst: dict[int, int] = {}
    for i in classes.confusions:
        worst.setdefault(int(classes.labels[i]), i)
    rows = []
    for c in classes.order[:_WORST_CLASSES]:
        taken, predictions = "–", classes.predictions[c]
        if c in worst:
            taken = f"{classes.names[classes.predicted[worst[c]]]} ({classes.counts[worst[c]]:,})"
        rows.append(
            [
                Cell(classes.names[c]),
                Cell(count(classes.samples[c])),
                Cell(percent(classes.accuracy[c])),
                Cell(percent(classes.correct[c] / predictions if predictions else None)),
                Cell(taken),
            ]
        )
    shown = "All" if len(rows) == len(classes.order) else f"The {len(rows)} worst"
    caption = (
        f"{shown} classes by accuracy. Precision: fraction of the predictions of this class that "
        "are correct."
    )
    columns = ("class", "samples", "accuracy", "precision", "most often taken for")
    return Table("classes", caption, columns, rows)
