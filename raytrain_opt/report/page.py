"""The page of a report: sections of plots and tables in one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from raytrain_opt.clock import utc_now
from raytrain_opt.config.load import flatten
from raytrain_opt.errors import printable
from raytrain_opt.recording.predictions import PredictionsRecord
from raytrain_opt.report.learning_rate_plots import (
    learning_rate_plots,
    rounds_table,
    search_plots,
    training_plots,
)
from raytrain_opt.report.plots import (
    SERIES,
    Cell,
    Plot,
    Section,
    Table,
    color,
    count,
    draw,
    draw_line,
    duration,
    duration_cell,
    percent,
    percent_axis,
    plain,
    rate,
    thousands,
    times,
)
from raytrain_opt.report.run_reader import RunRecords
from raytrain_opt.report.summary import RunSummary, summarize
from raytrain_opt.report.time_plots import (
    batch_size_plots,
    epoch_parts_plots,
    epochs_table,
    probes_table,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def report_page(run: RunRecords) -> str:
    """Return the page of one run."""
    summary = summarize(run)
    return _render(
        _sections(run),
        title=run.name,
        lead=_lead(run, summary),
        tiles=_tiles(summary),
        sentences=summary.sentences,
        warnings=summary.warnings,
    )


def comparison_page(runs: Sequence[RunRecords]) -> str:
    """Return the page that compares several runs, named by letters."""
    summaries = [summarize(run) for run in runs]
    changed = differences([run.job for run in runs])
    note = "" if changed.rows else "The jobs do not differ."
    sections = [
        Section("compare", "Results", comparison_plots(runs), [summaries_table(summaries)]),
        Section("jobs", "Jobs", tables=[changed], note=note),
        Section("warnings", "Warnings", tables=[_warnings_table(summaries)]),
    ]
    return _render(
        sections,
        title=f"{len(runs)} runs compared",
        lead=[f"{letter(i)}: {run.run_dir}" for i, run in enumerate(runs)],
        tiles=[],
        sentences=[],
        warnings=[],
    )


def _warnings_table(summaries: Sequence[RunSummary]) -> Table:
    rows = [
        [Cell(letter(index)), Cell(text)]
        for index, summary in enumerate(summaries)
        for text in summary.warnings
    ]
    return Table("warnings", "Warnings of all runs.", ("run", "warning"), rows, wide=("warning",))


def _lead(run: RunRecords, summary: RunSummary) -> list[str]:
    job = run.job
    policy = job["learning_rate"].get("policy", "")
    status = summary.status
    if run.result:
        status += f" {run.result.finished_utc}"
    return [
        f"{_name(job.get('model'))} on {_name(job.get('data'))}, learning-rate policy {policy}, "
        f"{summary.epochs_done} of {summary.epochs or '?'} epochs, {status}",
        run.run_dir,
    ]


def _name(section: Any) -> str:
    return str(section.get("name", section) if isinstance(section, dict) else section)


def _tiles(summary: RunSummary) -> list[tuple[str, str, str]]:
    """Return name, value and remark of each tile."""
    search, best = summary.search, ""
    metric = summary.metric
    if summary.best_test_metric is not None:
        best = f"best {metric.text(summary.best_test_metric)} in epoch {summary.best_epoch}"
    low, high = plain(summary.min_lr, 3), plain(summary.max_lr, 3)
    samples = percent(search.samples_fraction, 0) if search.rounds else "none"
    batch = f"{summary.workers} workers × {summary.batch_size_per_worker}"
    return [
        (f"Test {metric.name}", metric.text(summary.test_metric), best),
        ("Time", duration(summary.wall_s), "since the start of the command"),
        ("Speed", f"{count(summary.samples_per_s)} /s", "samples, median over epochs"),
        ("Global batch size", count(summary.global_batch_size), batch),
        ("Learning rate", low if low == high else f"{low} – {high}", "lowest – highest"),
        ("Search cost", samples, "of the training's samples" if search.rounds else ""),
    ]


def _sections(run: RunRecords) -> list[Section]:
    learning_rate = [*search_plots(run), *learning_rate_plots(run)]
    no_events = "" if run.events else "No process failed, and the run was not interrupted."
    return [
        Section("training", "Training", training_plots(run), [epochs_table(run)]),
        Section("learning-rate", "Learning rate", learning_rate, [rounds_table(run)]),
        predictions_section(run.predictions),
        Section("batch-size", "Batch size", batch_size_plots(run), [probes_table(run)]),
        Section("time", "Time", epoch_parts_plots(run)),
        Section(
            "failures", "Failures and recoveries", tables=[_events_table(run)], note=no_events
        ),
    ]


def _events_table(run: RunRecords) -> Table:
    rows = [
        [
            Cell(event.utc),
            duration_cell(event.time_s),
            Cell(str(event.epoch)),
            Cell(event.kind),
            Cell(event.text),
            duration_cell(event.silent_s),
        ]
        for event in run.events
    ]
    columns = ("date", "time", "epoch", "kind", "text", "silent for")
    caption = (
        "All events. Silent for: time between the last sign of life of a process and its restart, "
        "which is what the failure cost."
    )
    return Table("events", caption, columns, rows, wide=("text",))


def _render(sections: Sequence[Section], **values: Any) -> str:
    """Fill the template; columns, tables and sections without content are left out."""
    filled = [replace(s, tables=[t.without_empty() for t in s.tables if t.rows]) for s in sections]
    values["sections"] = [s for s in filled if s.plots or s.tables or s.note]
    environment = Environment(
        loader=PackageLoader("raytrain_opt.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    html = environment.get_template("page.html").render(written=utc_now(), **values)
    # A browser, too, obeys characters that change the direction of text.
    return printable(html)


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
        [(epoch.end_s, epoch.test_metric) for epoch in run.epochs if epoch.test_metric is not None]
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
