"""The page: sections of plots and tables, in one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from raytrain_opt.clock import utc_now
from raytrain_opt.report.batch_size import batch_size_plots, probes_table
from raytrain_opt.report.compare import (
    comparison_plots,
    differences,
    letter,
    verdicts_table,
)
from raytrain_opt.report.epoch_time import epoch_parts_plot, epochs_table
from raytrain_opt.report.learning_rate import learning_rate_plots, rounds_table
from raytrain_opt.report.plots import Cell, Column, Plot, Table
from raytrain_opt.report.records import RunRecords
from raytrain_opt.report.staleness import staleness_plot
from raytrain_opt.report.timeline import timeline_plot
from raytrain_opt.report.usage import usage_plots
from raytrain_opt.report.verdict import Verdict, verdict_of
from raytrain_opt.report.words import count, duration, percent, plain


@dataclass(frozen=True)
class Section:
    """A part of the page. `note` says what there is, where there is nothing to show."""

    name: str
    title: str
    plots: Sequence[Plot] = ()
    tables: Sequence[Table] = ()
    note: str = ""


@dataclass(frozen=True)
class Page:
    """The HTML, and the plots in it for papers."""

    html: str
    plots: Sequence[Plot]


def report_page(run: RunRecords) -> Page:
    """Of one run."""
    verdict = verdict_of(run)
    sections = [s for s in _sections(run) if s.plots or s.tables or s.note]
    html = _render(
        title=run.name,
        lead=_lead(run, verdict),
        tiles=_tiles(verdict),
        sentences=verdict.sentences,
        warnings=verdict.warnings,
        sections=sections,
    )
    return Page(html, [plot for section in sections for plot in section.plots])


def comparison_page(runs: Sequence[RunRecords]) -> Page:
    """Of several runs, named by letters in the plots."""
    verdicts = [verdict_of(run) for run in runs]
    changed = differences([run.job for run in runs])
    sections = [
        Section("compare", "Accuracy", comparison_plots(runs), [verdicts_table(verdicts)]),
        Section(
            "jobs",
            "Jobs",
            tables=[changed] if changed.rows else [],
            note="" if changed.rows else "All runs have the same job.",
        ),
        Section("all_warnings", "Warnings", tables=[_all_warnings(verdicts)]),
    ]
    html = _render(
        title=f"{len(runs)} runs compared",
        lead=[f"{letter(i)}: {run.run_dir}" for i, run in enumerate(runs)],
        tiles=[],
        sentences=[_ranking(verdicts)],
        warnings=[],
        sections=[section for section in sections if section.name != "all_warnings"]
        + [section for section in sections[2:] if section.tables[0].rows],
    )
    return Page(html, [plot for section in sections for plot in section.plots])


def _ranking(verdicts: Sequence[Verdict]) -> str:
    known = [
        (at.test_accuracy, letter(index))
        for index, at in enumerate(verdicts)
        if at.test_accuracy is not None
    ]
    order = sorted(known, key=lambda each: -each[0])
    if not order:
        return "No run has a test accuracy yet."
    return "By final test accuracy: " + ", ".join(f"{n} ({percent(a, 2)})" for a, n in order) + "."


def _all_warnings(verdicts: Sequence[Verdict]) -> Table:
    rows = [
        [Cell(letter(index)), Cell(text)]
        for index, at in enumerate(verdicts)
        for text in at.warnings
    ]
    return Table("warnings", "Of all runs.", [Column("run"), Column("warning", wide=True)], rows)


def _lead(run: RunRecords, verdict: Verdict) -> list[str]:
    job = run.job
    what = f"{_named(job.get('model'))} on {_named(job.get('data'))}"
    policy = _section(job, "learning_rate").get("policy", "")
    status = verdict.status
    if run.result:
        status += f" {run.result.finished_utc}"
    return [
        f"{what}, {policy}, {verdict.epochs_done} of {verdict.epochs} epochs, {status}",
        run.run_dir,
    ]


def _named(section: Any) -> str:
    return str(section.get("name", section) if isinstance(section, dict) else section)


def _section(job: Any, name: str) -> dict[str, Any]:
    found = job.get(name)
    return found if isinstance(found, dict) else {}


def _tiles(verdict: Verdict) -> list[tuple[str, str, str]]:
    """Name, value and what belongs to it."""
    search, best = verdict.search, ""
    if verdict.best_test_accuracy is not None:
        best = f"best {percent(verdict.best_test_accuracy, 2)} in epoch {verdict.best_epoch}"
    low, high = plain(verdict.lr_lowest, 3), plain(verdict.lr_highest, 3)
    samples = percent(search.samples_fraction, 0) if search.rounds else "none"
    batch = f"{verdict.workers} × {verdict.batch_size_per_worker} per worker"
    return [
        ("Test accuracy", percent(verdict.test_accuracy, 2), best),
        ("Time", duration(verdict.wall_s), "from the start of the command"),
        ("Speed", f"{count(verdict.samples_per_s)} /s", "samples, median of epochs"),
        ("Global batch", count(verdict.global_batch_size), batch),
        (
            "Learning rate",
            low if low == high else f"{low} – {high}",
            "lowest – highest",
        ),
        ("Search", samples, "of the training's samples, in addition" if search.rounds else ""),
    ]


def _sections(run: RunRecords) -> list[Section]:
    rounds = [rounds_table(run)] if run.rounds else []
    staleness = staleness_plot(run)
    events = [_events_table(run)] if run.events else []
    return [
        Section("learning-rate", "Learning rate", learning_rate_plots(run), rounds),
        Section(
            "batch-size",
            "Batch size",
            batch_size_plots(run),
            [probes_table(run)] if run.probes else [],
        ),
        Section("time", "Time", _time_plots(run), [epochs_table(run)] if run.epochs else []),
        Section("asynchronous", "Asynchronous training", [staleness] if staleness else []),
        Section("failures", "Failures and recoveries", tables=events, note=_failures_note(run)),
    ]


def _time_plots(run: RunRecords) -> list[Plot]:
    """None before the first epoch; runs of old have no timeline."""
    if not run.epochs:
        return []
    parts = epoch_parts_plot(run)
    return [timeline_plot(run), parts, *usage_plots(run)] if run.spans else [parts]


def _failures_note(run: RunRecords) -> str:
    if run.events:
        return ""
    recorded = bool(run.spans)  # by the same versions
    return "Nothing died, and the run was not cut." if recorded else "No failures are recorded."


def _events_table(run: RunRecords) -> Table:
    """What happened when, and what it cost."""
    rows = [
        [
            Cell(event.utc),
            Cell(duration(event.at_s), event.at_s),
            Cell("–" if event.epoch is None else str(event.epoch)),
            Cell(event.what),
            Cell(event.text),
            Cell(duration(event.cost_s), event.cost_s),
        ]
        for event in run.events
    ]
    columns = [
        *map(Column, ("date", "at", "epoch", "what")),
        Column("text", wide=True),
        Column("silent for"),
    ]
    caption = (
        "What happened, and how long nothing was heard from a process that was started again, "
        "which is what that failure cost."
    )
    return Table("events", caption, columns, rows)


def _render(**values: Any) -> str:
    environment = _environment()
    for name in ("style.css", "page.js"):
        source, _, _ = environment.loader.get_source(environment, name)  # type: ignore[union-attr]
        values[name.replace(".", "_")] = Markup(source)
    return environment.get_template("page.html").render(written=utc_now(), **values)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("raytrain_opt.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["drawn"] = Markup  # of a plot, which has no text of a user
    return environment
