"""Time of each epoch by part, utilization and memory of the processes, and the table of epochs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from raytrain_opt.recording.records import EpochRecord
from raytrain_opt.recording.spans import SpanRecord
from raytrain_opt.report.axes import percent_axis, stacked_bars, thousands, whole_numbers
from raytrain_opt.report.formatting import count, duration, percent, plain, rate
from raytrain_opt.report.plots import Cell, Plot, Table, color, draw, duration_cell
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
_MAX_BARS, _MAX_POINTS, _MAX_DOTS = 60, 240, 60
_POOLS = {"worker": ("workers", "blue"), "slot": ("slots", "orange")}
# A command that computes nothing: its utilization says nothing about the training.
_SEND = "send_candidate_state"


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


class _Point(NamedTuple):
    """A pool in one epoch, or in several of a long run; NaN stands for an unknown value."""

    pool: str
    end_s: float
    utilization: float
    memory_mib: float


def utilization_plots(run: RunRecords) -> list[Plot]:
    """Plot utilization and memory of the pools over time; none where they were not measured."""
    points = _points(run) if run.epochs else []
    if not points:
        return []
    utilization_caption = (
        "Utilization of a process's compute threads (or its GPU) during commands, mean of each "
        "epoch. The timeline shows the idle time between commands."
    )
    memory_caption = (
        "Largest memory of any process of a pool: memory of tensors on a GPU, otherwise resident "
        "memory including shared pages. Data: table of the utilization plot."
    )

    def paint_utilization(axes: Axes) -> None:
        _lines(axes, points, "utilization")
        axes.set(xlabel="seconds", ylabel="utilization", ylim=(0, 1.04))
        percent_axis(axes)

    def paint_memory(axes: Axes) -> None:
        _lines(axes, points, "memory_mib")
        axes.set(xlabel="seconds", ylabel="MiB")
        axes.set_ylim(bottom=0)
        thousands(axes, "y")

    table = _utilization_table(points)
    return [
        draw(
            "utilization", "Utilization over time", utilization_caption, paint_utilization, table
        ),
        draw("memory", "Memory over time", memory_caption, paint_memory),
    ]


def _points(run: RunRecords) -> list[_Point]:
    """Return utilization weighted by time, and the largest memory, where one is known."""
    start_s = min((span.start_s for span in run.spans), default=0.0)
    epochs_per_point = max(-(-len(run.epochs) // _MAX_POINTS), 1)
    groups: dict[tuple[str, int], list[SpanRecord]] = defaultdict(list)
    for span in run.spans:
        if span.pool in _POOLS:
            groups[span.pool, span.epoch // epochs_per_point].append(span)
    points = []
    for (pool, _), spans in sorted(groups.items()):
        end_s = max(span.start_s + span.duration_s for span in spans) - start_s
        memory_mib = [span.memory_mib for span in spans if span.memory_mib is not None]
        points.append(
            _Point(pool, end_s, _mean_utilization(spans), max(memory_mib, default=math.nan))
        )
    return [p for p in points if not (math.isnan(p.utilization) and math.isnan(p.memory_mib))]


def _mean_utilization(spans: Sequence[SpanRecord]) -> float:
    known = [s for s in spans if s.utilization_pct is not None and s.command != _SEND]
    total_s = math.fsum(span.duration_s for span in known)
    busy_s = math.fsum((s.utilization_pct or 0.0) / 100 * s.duration_s for s in known)
    return busy_s / total_s if total_s > 0 else math.nan


def _lines(axes: Axes, points: Sequence[_Point], field: str) -> None:
    for pool, (name, color_name) in _POOLS.items():
        x = [point.end_s for point in points if point.pool == pool]
        y = [getattr(point, field) for point in points if point.pool == pool]
        if x:
            marker = "." if len(x) <= _MAX_DOTS else ""
            axes.plot(x, y, marker=marker, color=color(color_name), label=name)


def _utilization_table(points: Sequence[_Point]) -> Table:
    rows = [
        [
            Cell(_POOLS[point.pool][0]),
            Cell(f"{point.end_s:.1f}"),
            Cell("–" if math.isnan(point.utilization) else percent(point.utilization, 0)),
            Cell(f"{point.memory_mib:,.0f}", point.memory_mib),
        ]
        for point in points
    ]
    columns = ("pool", "seconds", "utilization", "memory, MiB")
    return Table("utilization", "Utilization and memory by epoch.", columns, rows)
