"""The page of a report: sections of plots and tables in one self-contained HTML file."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from raytrain_opt.clock import utc_now
from raytrain_opt.config.section import is_instance
from raytrain_opt.errors import printable
from raytrain_opt.recording.records import PredictionsRecord
from raytrain_opt.report.plots import Section, percent, times
from raytrain_opt.report.run_plots import batch_size_plots, learning_rate_plots, training_plots
from raytrain_opt.report.run_reader import RunRecords
from raytrain_opt.report.run_tables import (
    classes_table,
    epochs_table,
    events_table,
    probes_table,
    rounds_table,
)
from raytrain_opt.report.summary import all_warnings, sentences, tiles


def report_page(run: RunRecords) -> str:
    """Return the page of a run; columns, tables and sections without content are left out."""
    environment = Environment(
        loader=PackageLoader("raytrain_opt.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    sections = [
        replace(section, tables=[table.without_empty() for table in section.tables if table.rows])
        for section in _sections(run)
    ]
    html = environment.get_template("page.html").render(
        title=run.name,
        lead=_lead(run),
        tiles=tiles(run),
        sentences=list(sentences(run)),
        warnings=all_warnings(run),
        sections=[s for s in sections if s.plots or s.tables or s.note],
        written=utc_now(),
    )
    # A browser, too, obeys characters that change the direction of text.
    return printable(html)


def _lead(run: RunRecords) -> list[str]:
    job, status = run.job, "not finished"
    if run.result is not None:
        status = f"finished {run.result.finished_utc}"
    elif run.is_batch_size_search:
        status = "batch size found"
    return [
        f"{_name(job.get('model'))} on {_name(job.get('data'))}, learning-rate policy "
        f"{job['learning_rate'].get('policy', '')}, {len(run.epochs)} of "
        f"{run.epochs_to_train or '?'} epochs, {status}",
        run.run_dir,
    ]


def _name(section: Any) -> str:
    name = str(section.get("name", section) if isinstance(section, dict) else section)
    return name.rpartition(":")[2] if is_instance(name) else name


def _sections(run: RunRecords) -> list[Section]:
    no_events = "" if run.events else "No process failed, and the run was not interrupted."
    return [
        Section("training", "Training", training_plots(run), [epochs_table(run)]),
        Section("learning-rate", "Learning rate", learning_rate_plots(run), [rounds_table(run)]),
        *([] if run.predictions is None else [_predictions(run.predictions)]),
        Section("batch-size", "Batch size", batch_size_plots(run), [probes_table(run)]),
        Section("failures", "Failures and recoveries", [], [events_table(run)], no_events),
    ]


def _predictions(record: PredictionsRecord) -> Section:
    """Return accuracies of classes and the most confident mistakes."""
    names = record.class_names
    samples = sum(count for _, _, count in record.confusion)
    note = (
        f"Predictions on the {times(samples, 'test sample')} after epoch {record.epoch}. A "
        "prediction is the most probable class, its confidence the probability of that class."
    )
    mistakes = [
        (
            mistake.jpeg,
            f"{names[mistake.predicted]} ({percent(mistake.confidence)})",
            f"labeled {names[mistake.label]}; {mistake.file or f'test sample {mistake.sample}'}",
        )
        for mistake in record.mistakes
    ]
    return Section("predictions", "Predictions", [], [classes_table(record)], note, mistakes)
