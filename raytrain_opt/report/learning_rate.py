"""Plots and the table of the learning-rate search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from typing import TYPE_CHECKING

from raytrain_opt.report.plots import (
    Cell,
    Column,
    Plot,
    Table,
    colour,
    draw,
    few,
    legend,
    percent_axis,
    plain_log,
    thousands,
)
from raytrain_opt.report.records import CandidateLine, RoundLine, RunRecords
from raytrain_opt.report.words import percent, plain, rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# More cannot be told apart in a plot.
_MOST_ROUNDS, _MOST_POINTS = 1000, 25_000
_DOTS, _DOT_SIZE = 150, 3


@dataclass
class _Line:
    """Points of one line, in pieces."""

    x: list[float]
    y: list[float]

    @classmethod
    def empty(cls) -> _Line:
        return cls([], [])

    def add(self, *points: tuple[float, float | None]) -> None:
        """A piece."""
        for x, y in (*points, (nan, nan)):
            self.x.append(x)
            self.y.append(nan if y is None else y)


def learning_rate_plots(run: RunRecords) -> list[Plot]:
    """Accuracy over iterations, and the rates over epochs; none before there is either."""
    if not run.epochs and not run.rounds:
        return []
    return [_accuracy(run), _rates(run)]


def _accuracy(run: RunRecords) -> Plot:
    caption = (
        "Main line: the training that went on, by test accuracy at the ends of epochs"
        + (" and selection accuracy of each round's winner" if run.rounds else "")
        + ". "
    )
    if run.rounds:
        caption += (
            "Short lines: every candidate, from the state it started from to its accuracy on the "
            "selection split after its pre-training (as figure 2 of the STPT paper). "
        )
    caption += _thinned(run) + _where_data(run)

    def paint(axes: Axes) -> None:
        others, winners = _Line.empty(), _Line.empty()
        for line in few(run.rounds, _MOST_ROUNDS):
            for candidate in line.candidates:
                piece = others if candidate is not line.chosen else winners
                piece.add(*_short_line(run, line, candidate))
        steps, accuracies = _main_line(run)
        marker = "." if len(run.epochs) <= _DOTS else ""
        axes.plot(steps, accuracies, marker=marker, color=colour("blue"), label="training")
        axes.plot(others.x, others.y, color=colour("grey"), linewidth=0.9, label=_label(others))
        axes.plot(winners.x, winners.y, color=colour("orange"), label=_label(winners, 1))
        if len(run.rounds) <= _DOTS:
            for line, shade in ((others, "grey"), (winners, "orange")):
                ends = [i - 1 for i, x in enumerate(line.x) if x != x]
                x, y = ([values[i] for i in ends] for values in (line.x, line.y))
                axes.plot(x, y, ".", color=colour(shade), markersize=_DOT_SIZE)
        axes.set(xlabel="iteration", ylabel="accuracy")
        thousands(axes, "x")
        percent_axis(axes)
        legend(axes)

    return draw("accuracy", "Accuracy over iterations", caption, paint)


def _label(line: _Line, winner: int = 0) -> str:
    if not line.x:
        return "_nothing"
    return ("other candidates", "winning candidate")[winner]


def _short_line(
    run: RunRecords, line: RoundLine, candidate: CandidateLine
) -> tuple[tuple[float, float | None], ...]:
    first = run.first_step(line.epoch)
    end = (first + line.pretrain_steps, candidate.val_accuracy)
    before = _accuracy_before(run, line.epoch)
    return (end,) if before is None else ((first, before), end)


def _accuracy_before(run: RunRecords, epoch: int) -> float | None:
    """At the start of the epoch, as the test split says."""
    if not 1 < epoch <= len(run.epochs) + 1:
        return None
    return run.epochs[epoch - 2].test_accuracy


def _main_line(run: RunRecords) -> tuple[list[float], list[float]]:
    steps: list[float] = []
    accuracies: list[float] = []
    for epoch in run.epochs:
        points = [
            (run.first_step(line.epoch) + line.kept_steps, line.chosen.val_accuracy)
            for line in run.rounds_of.get(epoch.epoch, ())
            if line.kept_steps == line.pretrain_steps and line.chosen is not None
        ]
        points.append((run.first_step(epoch.epoch + 1), epoch.test_accuracy))
        for step, accuracy in points:
            if accuracy is not None:
                steps.append(step)
                accuracies.append(accuracy)
    return steps, accuracies


def _rates(run: RunRecords) -> Plot:
    caption = "The rate of each step of the training"
    caption += ", and every candidate that was tried. " if run.rounds else ". "
    caption += _thinned(run) + _where_data(run)

    def paint(axes: Axes) -> None:
        shown = [(at, c) for at in few(run.rounds, _MOST_ROUNDS) for c in at.candidates]
        for status, marker, name in (("ok", "o", "candidates"), ("diverged", "x", "diverged")):
            of_status = [(at.epoch, c.lr) for at, c in shown if c.status == status]
            if of_status:
                _dots(axes, of_status, marker, name)
        epochs, rates = _taken(run)
        axes.plot(epochs, rates, color=colour("blue"), linewidth=1.6, label="training")
        axes.set(xlabel="epoch", ylabel="learning rate")
        plain_log(axes, "y")
        legend(axes)

    return draw("learning_rate", "Learning rate over epochs", caption, paint)


def _dots(axes: Axes, points: Sequence[tuple[float, float]], marker: str, name: str) -> None:
    """Short dashes in one path where there are so many that markers would take megabytes."""
    shade = colour("grey") if name == "candidates" else colour("orange")
    if len(points) <= 8 * _DOTS:
        x, y = zip(*[(epoch - 1, lr) for epoch, lr in points], strict=True)
        axes.plot(x, y, marker, color=shade, markersize=3, linestyle="none", label=name)
        return
    dashes, half = _Line.empty(), 0.002 * max(epoch for epoch, _ in points)
    for epoch, lr in points:
        dashes.add((epoch - 1 - half, lr), (epoch - 1 + half, lr))
    axes.plot(dashes.x, dashes.y, color=shade, linewidth=1.0, label=name)


def _taken(run: RunRecords) -> tuple[list[float], list[float]]:
    """Epochs (a step's share of one) and the rates of the training; zero is left out."""
    if run.schedule is None:
        return [], []
    x: list[float] = []
    y: list[float] = []
    position = _Position(run.schedule.epoch_steps)
    for segment in run.schedule.segments:
        lr = segment.lr or nan
        x += [position.epoch, position.after(segment.steps)]
        y += [lr, lr]
    return few(x, _MOST_POINTS), few(y, _MOST_POINTS)


class _Position:
    """Where in the training a step is, in epochs; asked in ascending order."""

    def __init__(self, epoch_steps: Sequence[int]) -> None:
        self._steps, self._done, self._into = epoch_steps, 0, 0

    @property
    def epoch(self) -> float:
        of_this = self._steps[self._done] if self._done < len(self._steps) else 1
        return self._done + self._into / of_this

    def after(self, steps: int) -> float:
        self._into += steps
        while self._done < len(self._steps) and self._into >= self._steps[self._done]:
            self._into -= self._steps[self._done]
            self._done += 1
        return self.epoch


def _thinned(run: RunRecords) -> str:
    shown = len(few(run.rounds, _MOST_ROUNDS))
    if shown == len(run.rounds):
        return ""
    return f"{shown:,} of {len(run.rounds):,} rounds are drawn. "


def _where_data(run: RunRecords) -> str:
    return f"Data: {'tables of rounds and' if run.rounds else 'table of'} epochs."


def rounds_table(run: RunRecords) -> Table:
    """A row for each round, losers included."""
    with_stage = any(line.stage for line in run.rounds)
    names = ("epoch", *(("for",) if with_stage else ()), "steps", "base LR", "chosen LR")
    columns = [
        *map(Column, names),
        Column("accuracy"),
        Column("ahead"),
        Column("candidates: LR, accuracy", wide=True),
        Column("why", wide=True),
    ]
    rows = [_row(line, with_stage=with_stage) for line in run.rounds]
    caption = (
        "Every round with all its candidates; accuracies are of the selection split. Ahead: "
        "points that the winner's accuracy is above the best other's."
    )
    return Table("rounds", caption, columns, rows)


def _row(line: RoundLine, *, with_stage: bool) -> list[Cell]:
    chosen = line.chosen
    accuracy = None if chosen is None else chosen.val_accuracy
    others = [c.val_accuracy for c in line.candidates if c is not chosen]
    known = [value for value in others if value is not None]
    ahead = None if accuracy is None or not known else 100 * (accuracy - max(known))
    return [
        Cell(str(line.epoch)),
        *([Cell(line.stage or "–")] if with_stage else []),
        Cell(str(line.pretrain_steps)),
        Cell(rate(line.base_lr)),
        Cell(rate(line.next_base_lr)),
        Cell(percent(accuracy)),
        Cell("–" if ahead is None else f"{ahead:+.1f}", mark="low" if (ahead or 0) < 0 else ""),
        Cell(";  ".join(_candidate(c, c is chosen) for c in line.candidates)),
        Cell(line.reason),
    ]


def _candidate(candidate: CandidateLine, won: bool) -> str:
    name = f"{rate(candidate.lr)}"
    if candidate.decay != 1:
        name += f" (decay × {plain(candidate.decay)})"
    result = percent(candidate.val_accuracy) if candidate.status == "ok" else candidate.status
    text = f"{'★ ' if won else ''}{name} → {result}"
    return text.replace(" ", "\N{NO-BREAK SPACE}")
