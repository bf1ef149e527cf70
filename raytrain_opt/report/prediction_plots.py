"""What the weights predict on the test split: confusions, classes, mistakes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from raytrain_opt.recording.predictions import PredictionsRecord
from raytrain_opt.report.formatting import count, percent, times
from raytrain_opt.report.plots import Cell, Plot, Section, Table, color, draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# More classes are too many for a matrix, and for their names along an axis.
_MAX_CLASSES, _MAX_NUMBERS, _MAX_NAME = 30, 12, 14
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
    """Return confusions, accuracies of classes and the most confident mistakes."""
    name, title = "predictions", "Predictions"
    if record is None:
        return Section(name, title)
    classes = _Classes(record)
    matrix = [_confusion_matrix(classes)] if len(classes.names) <= _MAX_CLASSES else []
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
    return Section(
        name,
        title,
        matrix,
        [_classes_table(classes)],
        note,
        mistakes,
    )


def _confusion_matrix(classes: _Classes) -> Plot:
    from matplotlib.colors import LinearSegmentedColormap, to_rgba

    size = len(classes.names)
    counts = np.zeros((size, size), int)
    counts[classes.labels, classes.predicted] = classes.counts
    fractions = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    correct = np.eye(size, dtype=bool)

    def paint(axes: Axes) -> None:
        most_wrong = fractions[~correct].max(initial=0) or 1
        for shown, hue, darkest in ((correct, "blue", 1), (~correct, "orange", most_wrong)):
            # Not darker, so that the numbers stay readable.
            shades = [to_rgba(color(hue), opacity) for opacity in (0.1, 0.5)]
            colors = LinearSegmentedColormap.from_list(hue, shades)
            cells = np.ma.masked_where(~shown | (counts == 0), fractions)
            axes.pcolormesh(cells, cmap=colors, vmin=0, vmax=darkest)
        if size <= _MAX_NUMBERS:
            for label, predicted in np.argwhere(counts):
                text = str(counts[label, predicted])
                place = (predicted + 0.5, label + 0.5)
                axes.annotate(text, place, ha="center", va="center", fontsize=8)
        for which in ("x", "y"):
            _name_ticks(axes, which, classes.names)
        axes.invert_yaxis()
        axes.set(xlabel="predicted", ylabel="label")
        axes.grid(visible=False)

    caption = (
        "Samples by label and prediction. Blue: correct, darker for a larger fraction of the "
        "label's samples. Orange: mistakes, darker for more frequent ones. Data: table below."
    )
    return draw("confusion", "Confusion matrix", caption, paint)


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


def _name_ticks(axes: Axes, which: str, names: Sequence[str]) -> None:
    """Name the cells along an axis, in small letters if there are many."""
    axis = getattr(axes, f"{which}axis")
    texts = [n if len(n) <= _MAX_NAME else f"{n[: _MAX_NAME - 1]}…" for n in names]
    axis.set_ticks([i + 0.5 for i in range(len(texts))], texts)
    if which == "x" and max(map(len, texts)) > 2:
        axis.set_tick_params(rotation=90)
    if len(texts) > _MAX_NUMBERS:
        axis.set_tick_params(labelsize=6.5)
