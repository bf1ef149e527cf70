"""Plots and the table of the learning-rate search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan, nan
from typing import TYPE_CHECKING

from raytrain_opt.recording.records import CandidateRecord, RoundRecord
from raytrain_opt.report.formatting import percent, plain, rate
from raytrain_opt.report.plots import (
    Cell,
    Column,
    Plot,
    Table,
    color,
    draw,
    legend,
    percent_axis,
    plain_log,
    thin_out,
    thousands,
)
from raytrain_opt.report.run_reader import RunRecords

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# More cannot be distinguished in a plot.
_MAX_ROUNDS, _MAX_POINTS = 1000, 25_000
# With more epochs or rounds than this, single points are not marked.
_MAX_DOTS, _DOT_SIZE = 150, 3


@dataclass
class _Line:
    """Points of one line in separate pieces: matplotlib breaks a line at NaN."""

    x: list[float]
    y: list[float]

    @classmethod
    def empty(cls) -> _Line:
        return cls([], [])

    def add(self, *points: tuple[float, float | None]) -> None:
        """Add a piece."""
        for x, y in (*points, (nan, nan)):
            self.x.append(x)
            self.y.append(nan if y is None else y)


def learning_rate_plots(run: RunRecords) -> list[Plot]:
    """Plot accuracy over steps and learning rates over epochs; none without records."""
    if not run.epochs and not run.rounds:
        return []
    return [_accuracy(run), _learning_rates(run)]


def _accuracy(run: RunRecords) -> Plot:
    caption = (
        "Blue: the training, by test accuracy after each epoch"
        + (" and validation accuracy of each round's winner" if run.rounds else "")
        + ". "
    )
    if run.rounds:
        caption += (
            "Short lines: all candidates, from their common initial state to their accuracy on "
            "the validation split after pre-training (as in figure 2 of the STPT paper). "
        )
    caption += _thinned(run) + _data_location(run)

    def paint(axes: Axes) -> None:
        others, winners = _Line.empty(), _Line.empty()
        for record in thin_out(run.rounds, _MAX_ROUNDS):
            for candidate in record.candidates:
                line = winners if candidate is record.chosen else others
                line.add(*_candidate_points(run, record, candidate))
        steps, accuracies = _main_line(run)
        marker = "." if len(run.epochs) <= _MAX_DOTS else ""
        axes.plot(steps, accuracies, marker=marker, color=color("blue"), label="training")
        axes.plot(
            others.x,
            others.y,
            color=color("grey"),
            linewidth=0.9,
            label=_label(others, "other candidates"),
        )
        axes.plot(winners.x, winners.y, color=color("orange"), label=_label(winners, "winner"))
        if len(run.rounds) <= _MAX_DOTS:
            for line, color_name in ((others, "grey"), (winners, "orange")):
                ends = [i - 1 for i, x in enumerate(line.x) if isnan(x)]
                x, y = ([values[i] for i in ends] for values in (line.x, line.y))
                axes.plot(x, y, ".", color=color(color_name), markersize=_DOT_SIZE)
        axes.set(xlabel="step", ylabel="accuracy")
        thousands(axes, "x")
        percent_axis(axes)
        legend(axes)

    return draw("accuracy", "Accuracy over steps", caption, paint)


def _label(line: _Line, name: str) -> str:
    """Return the name, or for an empty line a label that the legend leaves out."""
    return name if line.x else "_empty"


def _candidate_points(
    run: RunRecords, record: RoundRecord, candidate: CandidateRecord
) -> tuple[tuple[float, float | None], ...]:
    """Return (step, accuracy) before (if known) and after the candidate's pre-training."""
    first_step = run.first_step(record.epoch)
    end = (first_step + record.pretrain_steps, candidate.val_accuracy)
    before = _accuracy_before(run, record.epoch)
    return (end,) if before is None else ((first_step, before), end)


def _accuracy_before(run: RunRecords, epoch: int) -> float | None:
    """Return the test accuracy at the start of the epoch; None when not measured."""
    if not 1 < epoch <= len(run.epochs) + 1:
        return None
    return run.epochs[epoch - 2].test_accuracy


def _main_line(run: RunRecords) -> tuple[list[float], list[float]]:
    """Return steps and accuracies of the training: of kept winners and after each epoch."""
    steps: list[float] = []
    accuracies: list[float] = []
    for epoch in run.epochs:
        points = [
            (run.first_step(record.epoch) + record.kept_steps, record.chosen.val_accuracy)
            for record in run.rounds_by_epoch.get(epoch.epoch, ())
            if record.kept_steps == record.pretrain_steps and record.chosen is not None
        ]
        points.append((run.first_step(epoch.epoch + 1), epoch.test_accuracy))
        for step, accuracy in points:
            if accuracy is not None:
                steps.append(step)
                accuracies.append(accuracy)
    return steps, accuracies


def _learning_rates(run: RunRecords) -> Plot:
    caption = "Learning rate of each step"
    caption += ", and all candidates. " if run.rounds else ". "
    caption += _thinned(run) + _data_location(run)

    def paint(axes: Axes) -> None:
        candidates = [
            (r.epoch, c) for r in thin_out(run.rounds, _MAX_ROUNDS) for c in r.candidates
        ]
        for status, marker, name in (("ok", "o", "candidates"), ("diverged", "x", "diverged")):
            points = [(epoch, c.lr) for epoch, c in candidates if c.status == status]
            if points:
                _draw_points(axes, points, marker, name)
        epochs, rates = _rates_of_training(run)
        axes.plot(epochs, rates, color=color("blue"), linewidth=1.6, label="training")
        axes.set(xlabel="epoch", ylabel="learning rate")
        plain_log(axes, "y")
        legend(axes)

    return draw("learning_rate", "Learning rate over epochs", caption, paint)


def _draw_points(
    axes: Axes, points: Sequence[tuple[float, float]], marker: str, name: str
) -> None:
    """Draw markers; many points as short dashes in one path: markers would take megabytes."""
    point_color = color("grey" if name == "candidates" else "orange")
    if len(points) <= 8 * _MAX_DOTS:
        x, y = zip(*[(epoch - 1, lr) for epoch, lr in points], strict=True)
        axes.plot(x, y, marker, color=point_color, markersize=3, linestyle="none", label=name)
        return
    dashes, half = _Line.empty(), 0.002 * max(epoch for epoch, _ in points)
    for epoch, lr in points:
        dashes.add((epoch - 1 - half, lr), (epoch - 1 + half, lr))
    axes.plot(dashes.x, dashes.y, color=point_color, linewidth=1.0, label=name)


def _rates_of_training(run: RunRecords) -> tuple[list[float], list[float]]:
    """Return position (in epochs) and learning rate of each segment's ends, without rates of 0."""
    if run.schedule is None:
        return [], []
    x: list[float] = []
    y: list[float] = []
    position = _Position(run.schedule.epoch_steps)
    for segment in run.schedule.segments:
        lr = segment.lr or nan
        x += [position.epoch, position.advance(segment.steps)]
        y += [lr, lr]
    return thin_out(x, _MAX_POINTS), thin_out(y, _MAX_POINTS)


class _Position:
    """Position in the training in epochs, advanced by steps."""

    def __init__(self, epoch_steps: Sequence[int]) -> None:
        self._epoch_steps, self._epochs, self._steps = epoch_steps, 0, 0

    @property
    def epoch(self) -> float:
        return self._epochs + self._steps / (1 if self._done else self._epoch_steps[self._epochs])

    @property
    def _done(self) -> bool:
        return self._epochs == len(self._epoch_steps)

    def advance(self, steps: int) -> float:
        self._steps += steps
        while not self._done and self._steps >= self._epoch_steps[self._epochs]:
            self._steps -= self._epoch_steps[self._epochs]
            self._epochs += 1
        return self.epoch


def _thinned(run: RunRecords) -> str:
    shown = len(thin_out(run.rounds, _MAX_ROUNDS))
    if shown == len(run.rounds):
        return ""
    return f"{shown:,} of {len(run.rounds):,} rounds are shown. "


def _data_location(run: RunRecords) -> str:
    return f"Data: {'tables of rounds and epochs' if run.rounds else 'table of epochs'}."


def rounds_table(run: RunRecords) -> Table:
    """Return a row per round, with all candidates."""
    with_stage = any(record.stage for record in run.rounds)
    names = ("epoch", *(("stage",) if with_stage else ()), "steps", "base LR", "chosen LR")
    columns = [
        *map(Column, names),
        Column("accuracy"),
        Column("ahead"),
        Column("candidates: LR, accuracy", wide=True),
        Column("reason", wide=True),
    ]
    optimizers = {c.optimizer for record in run.rounds for c in record.candidates}
    several = len(optimizers) > 1
    rows = [_row(record, with_stage=with_stage, several=several) for record in run.rounds]
    caption = (
        "All rounds with all candidates (★: winner). Accuracy: on the validation split. Ahead: "
        "the winner's accuracy minus that of the best other candidate, in points."
    )
    return Table("rounds", caption, columns, rows)


def _row(record: RoundRecord, *, with_stage: bool, several: bool) -> list[Cell]:
    """Return the cells of a round. `several`: candidates differ in their optimizers."""
    chosen = record.chosen
    accuracy = None if chosen is None else chosen.val_accuracy
    others = [c.val_accuracy for c in record.candidates if c is not chosen]
    known = [value for value in others if value is not None]
    ahead = None if accuracy is None or not known else 100 * (accuracy - max(known))
    return [
        Cell(str(record.epoch)),
        *([Cell(record.stage or "–")] if with_stage else []),
        Cell(str(record.pretrain_steps)),
        Cell(rate(record.base_lr)),
        Cell(rate(record.next_base_lr)),
        Cell(percent(accuracy)),
        Cell("–" if ahead is None else f"{ahead:+.1f}", mark="low" if (ahead or 0) < 0 else ""),
        Cell(
            ";  ".join(_candidate(c, several=several, won=c is chosen) for c in record.candidates)
        ),
        Cell(record.reason),
    ]


def _candidate(candidate: CandidateRecord, *, several: bool, won: bool) -> str:
    name = f"{candidate.optimizer if several else ''} {rate(candidate.lr)}".strip()
    if candidate.weight_decay_factor != 1:
        name += f" (weight decay × {plain(candidate.weight_decay_factor)})"
    result = percent(candidate.val_accuracy) if candidate.status == "ok" else candidate.status
    text = f"{'★ ' if won else ''}{name} → {result}"
    return text.replace(" ", "\N{NO-BREAK SPACE}")
