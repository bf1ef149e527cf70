"""The page of a report: sections of plots and tables in one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from raytrain_opt.clock import utc_now
from raytrain_opt.config.section import is_instance
from raytrain_opt.errors import printable
from raytrain_opt.recording.records import (
    BatchSizeProbeRecord,
    CandidateRecord,
    EpochRecord,
    PredictionsRecord,
    RoundRecord,
)
from raytrain_opt.report.plots import Section, Table, count, duration, percent, plain, rate, times
from raytrain_opt.report.run_plots import batch_size_plots, learning_rate_plots, training_plots
from raytrain_opt.report.run_reader import RunRecords
from raytrain_opt.report.summary import all_warnings, sentences, tiles
from raytrain_opt.results import Metric


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


def epochs_table(run: RunRecords) -> Table:
    """Return a row per epoch."""
    metrics = list(dict.fromkeys(name for epoch in run.epochs for name in epoch.test_metrics))
    columns = (
        "epoch", "LR", "train loss", *(f"test {name}" for name in metrics), "samples/s", "time",
        "pre-train", "main train", "data wait", "evaluate",
    )  # fmt: skip
    rows = [_epoch_row(epoch, metrics) for epoch in run.epochs]
    return Table("epochs", "All epochs.", columns, rows)


def _epoch_row(epoch: EpochRecord, metrics: Sequence[str]) -> list[str]:
    parts = ("pretrain_s", "main_train_s", "main_data_wait_s", "evaluate_s")
    return [
        str(epoch.epoch),
        rate(epoch.lr),
        plain(epoch.train_loss),
        *(Metric(name).text(epoch.test_metrics.get(name)) for name in metrics),
        count(epoch.samples_per_s),
        duration(epoch.duration_s),
        *(duration(epoch.timings_s.get(part)) for part in parts),
    ]


def rounds_table(run: RunRecords) -> Table:
    """Return a row per round, with all candidates."""
    name = run.metric.name
    columns = (
        "epoch", "stage", "steps", "base LR", "next LR", name, f"candidates: LR, {name}", "reason",
    )  # fmt: skip
    optimizers = {c.optimizer for record in run.rounds for c in record.candidates}
    rows = [_round_row(record, several=len(optimizers) > 1) for record in run.rounds]
    caption = f"All rounds with all candidates (★: winner), and {name} on the validation split."
    return Table("rounds", caption, columns, rows, wide=columns[-2:])


def _round_row(record: RoundRecord, *, several: bool) -> list[str]:
    """Return the cells of a round. `several`: candidates differ in their optimizers."""
    chosen, metric = record.chosen, record.metric
    tried = (_candidate(c, metric, several=several, won=c is chosen) for c in record.candidates)
    return [
        str(record.epoch),
        record.stage or "–",
        str(record.pretrain_steps),
        rate(record.base_lr),
        rate(record.next_base_lr),
        metric.text(None if chosen is None else chosen.val_metric),
        ";  ".join(tried),
        record.reason,
    ]


def _candidate(candidate: CandidateRecord, metric: Metric, *, several: bool, won: bool) -> str:
    name = f"{candidate.optimizer if several else ''} {rate(candidate.lr)}".strip()
    if candidate.weight_decay_factor != 1:
        name += f" (weight decay × {plain(candidate.weight_decay_factor)})"
    result = metric.text(candidate.val_metric) if candidate.status == "ok" else candidate.status
    return f"{'★ ' if won else ''}{name} → {result}".replace(" ", "\N{NO-BREAK SPACE}")


def probes_table(run: RunRecords) -> Table:
    """Return a row per probe, in order."""
    columns = ("probe", "batch size", "samples/s", "±", "busy", "memory", "reason")
    rows = [_probe_row(record) for record in run.probes]
    caption = "All probes in order. Busy: utilization of the device, mean of the larger half."
    return Table("probes", caption, columns, rows, wide=("reason",))


def _probe_row(record: BatchSizeProbeRecord) -> list[str]:
    busy, memory = record.utilization_pct, record.peak_memory_mib
    return [
        f"{record.probe}{' (check)' if record.check else ''}",
        str(record.batch_size),
        count(record.samples_per_s) if record.status == "ok" else "out of memory",
        plain(record.samples_per_s_error, 3),
        "–" if busy is None else f"{busy:.0f} %",
        "–" if memory is None else f"{memory:,.0f} MiB",
        record.reason + (f"; {record.error}" if record.error else ""),
    ]


# Rows of the table.
_WORST_CLASSES = 100


def classes_table(record: PredictionsRecord) -> Table:
    """Return the classes that occur in the test split, lowest accuracy first."""
    labels, predicted, counts = np.array(record.confusion, int).T
    names, is_wrong = record.class_names, labels != predicted
    samples = np.bincount(labels, counts, len(names))
    wrong = np.bincount(labels[is_wrong], counts[is_wrong], len(names))
    accuracies = 1 - wrong / np.maximum(samples, 1)
    order = [c for c in np.argsort(accuracies, kind="stable") if samples[c]]
    rows = []
    for c in order[:_WORST_CLASSES]:
        mistaken = np.where(is_wrong & (labels == c), counts, 0)
        worst, taken = mistaken.argmax(), "–"
        if mistaken[worst]:
            taken = f"{names[predicted[worst]]} ({mistaken[worst]:,})"
        rows.append([names[c], count(samples[c]), percent(accuracies[c]), taken])
    shown = "All" if len(rows) == len(order) else f"The {len(rows)} worst"
    columns = ("class", "samples", "accuracy", "most often taken for")
    return Table("classes", f"{shown} classes by accuracy.", columns, rows)


def events_table(run: RunRecords) -> Table:
    """Return a row per event."""
    rows = [
        [e.utc, duration(e.time_s), str(e.epoch), e.kind, e.text, duration(e.silent_s)]
        for e in run.events
    ]
    columns = ("date", "time", "epoch", "kind", "text", "silent for")
    caption = (
        "All events. Silent for: time between the last sign of life of a process and its restart, "
        "which is what the failure cost."
    )
    return Table("events", caption, columns, rows, wide=("text",))
