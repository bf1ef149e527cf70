"""Several runs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from raytrain_opt.report.plots import (
    SERIES,
    Cell,
    Column,
    Plot,
    Table,
    colour,
    draw,
    legend,
    percent_axis,
    thousands,
)
from raytrain_opt.report.records import EpochLine, RunRecords
from raytrain_opt.report.verdict import Verdict
from raytrain_opt.report.words import count, duration, percent, rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ABSENT = "not set"
_STYLES = ("-", "--", ":", "-.")


def letter(index: int) -> str:
    """A short name that stands for a run in plots: A, B, … Z, A1, …"""
    number, place = divmod(index, 26)
    return chr(ord("A") + place) + (str(number) if number else "")


def comparison_plots(runs: Sequence[RunRecords]) -> list[Plot]:
    """Accuracy against wall time and against samples."""
    time = _curves(
        "accuracy_over_time",
        "Accuracy over wall time",
        "Test accuracy; the time counts from the start of each run, with all of its search.",
        "seconds",
        [(run.ends_s, run.epochs) for run in runs],
    )
    samples = _curves(
        "accuracy_over_samples",
        "Accuracy over samples",
        "Test accuracy; samples of the search are counted as those of the training.",
        "samples",
        [(samples_at_ends(run), run.epochs) for run in runs],
    )
    return [time, samples]


def samples_at_ends(run: RunRecords) -> list[int]:
    """Training and search samples until the end of each epoch."""
    section = run.job.get("learning_rate", {})
    local = section.get("candidate_batch") == "local"
    found = []
    for epoch in run.epochs:
        rounds = run.rounds_of.get(epoch.epoch, ())
        steps = run.first_step(epoch.epoch + 1) - run.first_step(epoch.epoch)
        kept = sum(line.kept_steps for line in rounds)
        main_steps = max(steps - kept, 0)
        batch = epoch.samples / main_steps if main_steps else run.global_batch_size
        tried = sum(line.pretrain_steps * len(line.candidates) for line in rounds)
        found.append(round(steps * batch + tried * batch / (run.workers if local else 1)))
    return list(accumulate(found))


def _curves(
    name: str,
    title: str,
    caption: str,
    unit: str,
    curves: Sequence[tuple[Sequence[float], Sequence[EpochLine]]],
) -> Plot:
    points = [
        [(x, e.test_accuracy) for x, e in zip(*curve, strict=True) if e.test_accuracy is not None]
        for curve in curves
    ]

    def paint(axes: Axes) -> None:
        for index, of_run in enumerate(points):
            axes.plot(
                [x for x, _ in of_run],
                [accuracy for _, accuracy in of_run],
                _STYLES[index // len(SERIES) % len(_STYLES)],
                color=colour(SERIES[index % len(SERIES)]),
                marker="." if len(of_run) < 100 else "",
                label=letter(index),
            )
        axes.set(xlabel=unit, ylabel="test accuracy")
        thousands(axes, "x")
        percent_axis(axes)
        legend(axes)

    rows = [
        [Cell(letter(index)), Cell(count(x), x), Cell(percent(accuracy, 2))]
        for index, of_run in enumerate(points)
        for x, accuracy in of_run
    ]
    columns = [Column("run"), Column(unit), Column("test accuracy")]
    return draw(name, title, caption, paint, Table(name, caption, columns, rows))


def verdicts_table(verdicts: Sequence[Verdict]) -> Table:
    """A row for each run."""
    names = (
        "run", "name", "accuracy", "best", "time", "samples/s", "global batch", "LR",
        "search samples", "search time", "warnings",
    )  # fmt: skip
    rows = [
        [
            Cell(letter(index)),
            Cell(at.name),
            Cell(percent(at.test_accuracy, 2)),
            Cell(percent(at.best_test_accuracy, 2)),
            Cell(duration(at.wall_s), at.wall_s),
            Cell(count(at.samples_per_s), at.samples_per_s),
            Cell(str(at.global_batch_size)),
            Cell(f"{rate(at.lr_lowest)} to {rate(at.lr_highest)}", at.lr_highest),
            Cell(percent(at.search.samples_fraction, 0)),
            Cell(percent(at.search.seconds_fraction)),
            Cell(str(len(at.warnings))),
        ]
        for index, at in enumerate(verdicts)
    ]
    caption = "What came of each run; search samples as a share of the training's."
    return Table("runs", caption, [*map(Column, names)], rows)


def differences(jobs: Sequence[Mapping[str, Any]]) -> Table:
    """Fields of the resolved jobs that are not the same in all."""
    fields = [_flat(job) for job in jobs]
    names = dict.fromkeys(name for each in fields for name in each)
    rows = [
        [Cell(name), *(Cell(each.get(name, _ABSENT)) for each in fields)]
        for name in names
        if len({each.get(name, _ABSENT) for each in fields}) > 1
    ]
    columns = [Column("field"), *(Column(letter(index), wide=True) for index in range(len(jobs)))]
    caption = "Fields of the jobs, with all defaults filled in, that are not the same in all runs."
    return Table("differences", caption, columns, rows)


def _flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in section.items():
        name = f"{prefix}{key}"
        found |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: str(value)}
    return found
