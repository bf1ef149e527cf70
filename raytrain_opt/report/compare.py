"""Plots and tables that compare several runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raytrain_opt.config.load import flatten
from raytrain_opt.report.formatting import count, percent, rate
from raytrain_opt.report.plots import (
    SERIES,
    Cell,
    Plot,
    Table,
    color,
    draw,
    draw_line,
    duration_cell,
    percent_axis,
    thousands,
)
from raytrain_opt.report.run_reader import RunRecords
from raytrain_opt.report.summary import RunSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ABSENT = "not set"
_STYLES = ("-", "--", ":", "-.")


def letter(index: int) -> str:
    """Return a run's short name in plots: A, B, … Z, A1, and so on."""
    number, position = divmod(index, 26)
    return chr(ord("A") + position) + (str(number) if number else "")


def comparison_plots(runs: Sequence[RunRecords]) -> list[Plot]:
    """Plot the metric that decides over wall time; none if metrics differ."""
    if any(run.metric != runs[0].metric for run in runs):
        return []
    points = [
        [
            (end_s, epoch.test_metric)
            for end_s, epoch in zip(run.ends_s, run.epochs, strict=True)
            if epoch.test_metric is not None
        ]
        for run in runs
    ]
    metric = runs[0].metric
    label = f"test {metric.name}"

    def paint(axes: Axes) -> None:
        for index, curve in enumerate(points):
            style = _STYLES[index // len(SERIES) % len(_STYLES)]
            hue = color(SERIES[index % len(SERIES)])
            marker = "." if len(curve) < 100 else ""
            draw_line(axes, curve, style, color=hue, marker=marker, label=letter(index))
        axes.set(xlabel="seconds", ylabel=label)
        thousands(axes, "x")
        if metric.is_fraction:
            percent_axis(axes)

    rows = [
        [Cell(letter(index)), Cell(count(x), x), Cell(metric.text(value))]
        for index, curve in enumerate(points)
        for x, value in curve
    ]
    caption = f"Test {metric.name} over time since the start of each run, searches included."
    name, title = "metric_over_time", f"Test {metric.name} over seconds"
    return [
        draw(name, title, caption, paint, Table(name, caption, ("run", "seconds", label), rows))
    ]


def summaries_table(summaries: Sequence[RunSummary]) -> Table:
    """Return a row per run."""
    columns = (
        "run", "name", "test metric", "best", "time", "samples/s", "global batch", "LR",
        "search samples", "search time", "warnings",
    )  # fmt: skip
    rows = [
        [
            Cell(letter(index)),
            Cell(summary.name),
            Cell(f"{summary.metric.name} {summary.metric.text(summary.test_metric)}"),
            Cell(summary.metric.text(summary.best_test_metric)),
            duration_cell(summary.wall_s),
            Cell(count(summary.samples_per_s), summary.samples_per_s),
            Cell(str(summary.global_batch_size)),
            Cell(f"{rate(summary.min_lr)} to {rate(summary.max_lr)}", summary.max_lr),
            Cell(percent(summary.search.samples_fraction, 0)),
            Cell(percent(summary.search.time_fraction)),
            Cell(str(len(summary.warnings))),
        ]
        for index, summary in enumerate(summaries)
    ]
    caption = "Results. Search samples: as a fraction of the training's samples."
    return Table("runs", caption, columns, rows)


def differences(jobs: Sequence[Mapping[str, Any]]) -> Table:
    """Return the fields in which the resolved jobs differ."""
    fields = [{name: str(value) for name, value in flatten(job).items()} for job in jobs]
    names = dict.fromkeys(name for job in fields for name in job)
    rows = [
        [Cell(name), *(Cell(job.get(name, _ABSENT)) for job in fields)]
        for name in names
        if len({job.get(name, _ABSENT) for job in fields}) > 1
    ]
    letters = [letter(index) for index in range(len(jobs))]
    caption = "Fields in which the jobs differ, defaults included."
    return Table("differences", caption, ["field", *letters], rows, wide=letters)
