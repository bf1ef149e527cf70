"""Time of each epoch by part, what each process did when, and the staleness of gradients."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from raytrain_opt.recording.records import EpochRecord
from raytrain_opt.recording.spans import SpanRecord
from raytrain_opt.report.formatting import count, duration, percent, plain, rate
from raytrain_opt.report.plots import (
    Cell,
    Plot,
    Table,
    color,
    draw,
    duration_cell,
    stacked_bars,
    thousands,
    whole_numbers,
)
from raytrain_opt.report.run_reader import RunRecords
from raytrain_opt.results import Metric

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Parts of an epoch's time in records, and their names.
_EPOCH_PARTS = {
    "pretrain_s": "pre-train",
    "take_state_s": "send winner's state",
    "main_load_s": "load state",
    "compute_s": "main train",
    "main_data_wait_s": "data wait",
    "evaluate_s": "evaluate",
    "checkpoint_wait_s": "wait for storage",
}
# More cannot be distinguished in a plot of this size.
_MAX_BARS = 60


def epoch_parts(epoch: EpochRecord) -> dict[str, float]:
    """Return an epoch's seconds by part, without overlap; `communicate` and `other` are rests."""
    timings_s = {name: duration_s or 0.0 for name, duration_s in epoch.timings_s.items()}
    wait_s = timings_s.get("main_data_wait_s", 0.0)
    parts = {name: timings_s.get(name, 0.0) for name in _EPOCH_PARTS}
    parts["compute_s"] = max(0.0, timings_s.get("main_compute_s", 0.0) - wait_s)
    main_s = timings_s.get("main_train_s", 0.0)
    parts["communicate"] = max(0.0, main_s - parts["compute_s"] - wait_s - parts["main_load_s"])
    search_s = parts["pretrain_s"] + parts["take_state_s"]
    beside_s = parts["evaluate_s"] + parts["checkpoint_wait_s"]
    parts["other"] = max(0.0, epoch.duration_s - search_s - beside_s - main_s)
    return parts


def epoch_parts_plots(run: RunRecords) -> list[Plot]:
    """Plot stacked bars, of many epochs means over groups; no plot before the first epoch."""
    if not run.epochs:
        return []
    parts = [epoch_parts(epoch) for epoch in run.epochs]
    startup_s = _remove_startup(run, parts)
    bars = np.array_split(range(len(parts)), min(len(parts), _MAX_BARS))
    epochs_per_bar = len(parts) / len(bars)
    names = {**_EPOCH_PARTS, "communicate": "communicate", "other": "other"}
    caption = "Seconds of an epoch by part, as measured by the driver"
    caption += " (a bar is the mean of several epochs)" if epochs_per_bar > 1 else ""
    caption += f". Not included: {duration(startup_s)} to start the processes. "
    caption += "Data: table of epochs."

    def paint(axes: Axes) -> None:
        heights = {
            name: [fmean(parts[i][part] for i in bar) for bar in bars]
            for part, name in names.items()
        }
        x = [fmean(run.epochs[i].epoch for i in bar) for bar in bars]
        stacked_bars(axes, x, heights, 0.8 * epochs_per_bar)
        axes.set(xlabel="epoch", ylabel="seconds")
        whole_numbers(axes)

    return [draw("time_parts", "Time of each epoch by part", caption, paint)]


def _remove_startup(run: RunRecords, parts: Sequence[dict[str, float]]) -> float:
    """Remove the `other` time of epochs in which processes were started; return its sum."""
    started = {1, *(event.epoch for event in run.events if event.kind == "resumed")}
    startup_s = 0.0
    for epoch, of_epoch in zip(run.epochs, parts, strict=True):
        if epoch.epoch in started:
            startup_s += of_epoch["other"]
            of_epoch["other"] = 0.0
    return startup_s


def epochs_table(run: RunRecords) -> Table:
    """Return a row per epoch."""
    metrics = list(dict.fromkeys(name for epoch in run.epochs for name in epoch.test_metrics))
    columns = (
        "epoch", "LR", "train loss", *(f"test {name}" for name in metrics), "samples/s", "seconds",
        "pre-train", "main train", "data wait", "evaluate",
    )  # fmt: skip
    rows = [_epoch_row(epoch, metrics) for epoch in run.epochs]
    return Table("epochs", "All epochs.", columns, rows)


def _epoch_row(epoch: EpochRecord, metrics: Sequence[str]) -> list[Cell]:
    parts = ("pretrain_s", "main_train_s", "main_data_wait_s", "evaluate_s")
    return [
        Cell(str(epoch.epoch)),
        Cell(rate(epoch.lr)),
        Cell(plain(epoch.train_loss)),
        *(Cell(Metric(name).text(epoch.test_metrics.get(name))) for name in metrics),
        Cell(count(epoch.samples_per_s)),
        Cell(f"{epoch.duration_s:.2f}"),
        *(duration_cell(epoch.timings_s.get(part)) for part in parts),
    ]


def staleness_plots(run: RunRecords) -> list[Plot]:
    """Plot the staleness of all gradients of the run; no plot without asynchronous training."""
    counts: list[int] = []
    for epoch in run.epochs:
        for staleness, gradients in enumerate(epoch.staleness.counts if epoch.staleness else ()):
            counts += [0] * (staleness + 1 - len(counts))
            counts[staleness] += gradients
    total = sum(counts)
    if not total:
        return []
    mean = sum(staleness * gradients for staleness, gradients in enumerate(counts)) / total
    caption = (
        "Staleness of a micro-batch's gradient: the number of updates between the weights that "
        f"it was computed on and the update it went into. Mean {mean:.3g}, at most "
        f"{len(counts) - 1}, over {total:,} gradients of all epochs."
    )

    def paint(axes: Axes) -> None:
        axes.bar(range(len(counts)), counts, color=color("blue"), width=0.8)
        axes.axvline(mean, color=color("orange"), linestyle="--", label=f"mean {mean:.3g}")
        axes.set(xlabel="staleness, in updates", ylabel="gradients")
        whole_numbers(axes)
        thousands(axes, "y")

    rows = [
        [Cell(str(staleness)), Cell(count(gradients), gradients), Cell(percent(gradients / total))]
        for staleness, gradients in enumerate(counts)
    ]
    columns = ("staleness, in updates", "gradients", "fraction")
    table = Table("staleness", "Gradients by staleness.", columns, rows)
    return [draw("staleness", "Staleness of gradients", caption, paint, table)]


# Activities and their colors, in the order of the columns of the table.
_COLORS = {
    "communicate": "orange",
    "wait for data": "pink",
    "compute": "blue",
    "score": "sky",
    "checkpoint": "green",
}
# Parts of a command of a worker or slot, in the order in which they are drawn.
_PARTS = {
    "load_s": "communicate",
    "data_wait_s": "wait for data",
    "compute_s": "compute",
    "score_s": "score",
    "stash_s": "communicate",
    "average_s": "communicate",
    "hand_over_s": "communicate",
}
# Commands without parts. The rest of any other command is communication.
_COMMANDS = {"evaluate": "score", "checkpoint": "checkpoint"}

# More than this is too dense to read.
_WINDOW_EPOCHS, _WINDOW_SPANS, _MOST_PROCESSES = 3, 400, 40


def timeline_plots(run: RunRecords) -> list[Plot]:
    """Plot some epochs in the middle of the run, with a table of all; no plot before the first."""
    if not run.epochs or not run.spans:
        return []
    spans, epochs = _window(run)
    start_s = min(span.start_s for span in spans)
    processes = sorted(_main_processes(run), key=_by_pool, reverse=True)
    caption = (
        f"Activity of each process in {epochs}. White: idle. The parts of a command are drawn one "
        "after the other, although waiting and computing alternate; the time in which workers "
        "wait for each other within a step counts as compute. Data of the complete run: table "
        "below."
    )

    def paint(axes: Axes) -> None:
        labeled: set[str] = set()
        for row, process in enumerate(processes):
            bars = _bars(span for span in spans if span.process == process)
            for activity, ranges in bars.items():
                axes.broken_barh(
                    [(bar_start_s - start_s, duration_s) for bar_start_s, duration_s in ranges],
                    (row - 0.38, 0.76),
                    color=color(_COLORS[activity]),
                    # A label that begins with _ is left out of the legend.
                    label="_repeated" if activity in labeled else activity,
                    linewidth=0,
                )
                labeled.add(activity)
        axes.set_yticks(range(len(processes)), processes)
        axes.set(xlabel="seconds", ylim=(-0.6, len(processes) - 0.4))
        axes.grid(visible=False, axis="y")

    table = _processes_table(run)
    return [draw("timeline", "Timeline of the processes", caption, paint, table)]


def _main_processes(run: RunRecords) -> set[str]:
    """Return the processes with the most spans: of a large pool, some have only a few."""
    spans = Counter(span.process for span in run.spans)
    return {process for process, _ in spans.most_common(_MOST_PROCESSES)}


def _by_pool(process: str) -> tuple[str, int]:
    pool, _, index = process.partition(" ")
    return pool, int(index) if index.isdecimal() else 0


def _window(run: RunRecords) -> tuple[list[SpanRecord], str]:
    """Return the spans of some epochs in the middle, without the first if possible; their name."""
    spans_by_epoch: dict[int, list[SpanRecord]] = defaultdict(list)
    for span in run.spans:
        spans_by_epoch[span.epoch].append(span)
    epochs = sorted(spans_by_epoch)
    middle = epochs[max(0, (len(epochs) - _WINDOW_EPOCHS + 1) // 2) :][:_WINDOW_EPOCHS]
    while len(middle) > 1 and sum(len(spans_by_epoch[e]) for e in middle) > _WINDOW_SPANS:
        middle.pop()
    spans = sorted((s for e in middle for s in spans_by_epoch[e]), key=lambda s: s.start_s)
    name = f"epoch {middle[0]}" if len(middle) == 1 else f"epochs {middle[0]} to {middle[-1]}"
    return spans[:_WINDOW_SPANS], name


def _bars(spans: Iterable[SpanRecord]) -> dict[str, list[tuple[float, float]]]:
    """Return start and duration in seconds of each part, by activity."""
    bars: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for span in spans:
        start_s = span.start_s
        for activity, duration_s in _activities(span):
            bars[activity].append((start_s, duration_s))
            start_s += duration_s
    return bars


def _activities(span: SpanRecord) -> list[tuple[str, float]]:
    """Return the parts of a span; time outside its parts is communication."""
    if span.command in _COMMANDS:
        return [(_COMMANDS[span.command], span.duration_s)]
    parts = [
        (activity, duration_s)
        for part, activity in _PARTS.items()
        if (duration_s := span.timings_s.get(part) or 0.0) > 0
    ]
    rest_s = span.duration_s - math.fsum(duration_s for _, duration_s in parts)
    return [*parts, ("communicate", rest_s)] if rest_s > 0 else parts


def _processes_table(run: RunRecords) -> Table:
    """Return the time of each process by activity, from the first span to the last."""
    start_s = min(span.start_s for span in run.spans)
    total_s = max(span.start_s + span.duration_s for span in run.spans) - start_s
    spent_s: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for span in run.spans:
        for activity, duration_s in _activities(span):
            spent_s[span.process][activity] += duration_s
    rows = []
    for process in sorted(_main_processes(run), key=_by_pool):
        by_name = spent_s[process]
        idle = max(0.0, 1 - math.fsum(by_name.values()) / max(total_s, 1e-9))
        times = [duration_cell(by_name.get(name)) for name in _COLORS]
        rows.append([Cell(process), *times, Cell(percent(idle))])
    caption = f"Time of each process over {duration(total_s)}, from the first command to the last."
    return Table("processes", caption, ("process", *_COLORS, "idle"), rows)
