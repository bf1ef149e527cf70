"""Plots and tables of time and speed: parts of each epoch, and the probes of batch sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from raytrain_opt.recording.records import BatchSizeProbeRecord, EpochRecord
from raytrain_opt.report.plots import (
    Cell,
    Plot,
    Table,
    color,
    count,
    draw,
    duration,
    duration_cell,
    plain,
    plain_log,
    rate,
    stacked_bars,
    thousands,
    whole_numbers,
)
from raytrain_opt.report.run_reader import RunRecords
from raytrain_opt.results import Metric, Probe
from raytrain_opt.search.batch_size.throughput_knee import combine, draw_curves

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


# Parts of a training step in records (train.step_timer), and their names.
_PARTS = {
    "data_wait_s": "data wait",
    "copy_s": "copy",
    "forward_s": "forward",
    "backward_s": "backward",
    "update_s": "update",
}
_CURVE_POINTS = 40


def batch_size_plots(run: RunRecords) -> list[Plot]:
    """Plot the probes; no plot before the first one that fits into memory."""
    measured = [record for record in run.probes if record.status == "ok" and record.samples_per_s]
    if not measured:
        return []
    return [_speed(run, measured)]


def _speed(run: RunRecords, measured: Sequence[BatchSizeProbeRecord]) -> Plot:
    caption = (
        "Each probe with its standard error. Curve and 90 % band: the model that strategy "
        "throughput_knee fits to the probes. Dashed: the chosen size. Data: table of probes."
    )

    def paint(axes: Axes) -> None:
        _curve(axes, measured)
        axes.errorbar(
            [record.batch_size for record in measured],
            [record.samples_per_s or 0.0 for record in measured],
            [record.samples_per_s_error or 0.0 for record in measured],
            fmt="o",
            color=color("blue"),
            markersize=4,
            label="probes",
        )
        if run.batch_size is not None:
            chosen = run.batch_size.batch_size_per_worker
            axes.axvline(chosen, color=color("orange"), linestyle="--", label=f"chosen: {chosen}")
        axes.set(xlabel="batch size per worker", ylabel="samples/s")
        plain_log(axes, "x", 2)
        thousands(axes, "y")
        axes.set_ylim(bottom=0)

    return draw("batch_size_speed", "Speed over batch size", caption, paint)


def _curve(axes: Axes, measured: Sequence[BatchSizeProbeRecord]) -> None:
    points = combine([_measurement(record) for record in measured])
    sizes = [point.batch_size for point in points]
    if len(sizes) < 2:
        return
    spread = np.geomspace(sizes[0], sizes[-1], _CURVE_POINTS).round().astype(int)
    grid = sorted({*map(int, spread), *sizes})
    low, middle, high = np.exp(np.quantile(draw_curves(points, grid), [0.05, 0.5, 0.95], axis=0))
    axes.fill_between(grid, low, high, color=color("sky"), alpha=0.25, linewidth=0)
    axes.plot(grid, middle, color=color("sky"), linewidth=1.4, label="fitted curve")


def _measurement(record: BatchSizeProbeRecord) -> Probe:
    speed, error = record.samples_per_s, record.samples_per_s_error
    return Probe(record.batch_size, "ok", speed or math.nan, error or math.nan)


def probes_table(run: RunRecords) -> Table:
    """Return a row per probe, in order."""
    columns = ("probe", "batch size", "samples/s", "±", "busy", "memory", *_PARTS.values())
    rows = [_row(record) for record in run.probes]
    caption = (
        "All probes in order. Parts: mean times of a step. Busy: utilization of the device, mean "
        "of the larger half of its samples."
    )
    return Table("probes", caption, (*columns, "reason"), rows, wide=("reason",))


def _row(record: BatchSizeProbeRecord) -> list[Cell]:
    speed = Cell(count(record.samples_per_s)) if record.status == "ok" else Cell("out of memory")
    busy, memory = record.utilization_pct, record.peak_memory_mib
    return [
        Cell(f"{record.probe}{' (check)' if record.check else ''}", record.probe),
        Cell(str(record.batch_size)),
        speed,
        Cell(plain(record.samples_per_s_error, 3)),
        Cell("–" if busy is None else f"{busy:.0f} %"),
        Cell("–" if memory is None else f"{memory:,.0f} MiB", memory),
        *(duration_cell(record.timings_s.get(part)) for part in _PARTS),
        Cell(record.reason + (f"; {record.error}" if record.error else "")),
    ]
