"""Plots and the table of a batch-size search."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from raytrain_opt.recording.records import BatchSizeProbeRecord
from raytrain_opt.report.formatting import count, plain
from raytrain_opt.report.plots import (
    Cell,
    Plot,
    Table,
    color,
    draw,
    duration_cell,
    plain_log,
    thousands,
)
from raytrain_opt.report.run_reader import RunRecords
from raytrain_opt.results import Probe
from raytrain_opt.search.batch_size.throughput_model import combine, draw_curves

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
