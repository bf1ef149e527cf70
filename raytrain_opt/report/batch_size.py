"""Plots and the table of a batch-size search."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

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
    plain_log,
    thousands,
    whole_numbers,
)
from raytrain_opt.report.records import ProbeLine, RunRecords
from raytrain_opt.report.words import count, duration, plain
from raytrain_opt.search.batch_size import Measurement
from raytrain_opt.search.throughput_model import combine, draw_curves

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Of a training step, as train.timing has them.
_PARTS = {
    "data_wait_s": "data wait",
    "copy_s": "copy",
    "forward_s": "forward",
    "backward_s": "backward",
    "update_s": "update",
}
_CURVE_POINTS = 40


def batch_size_plots(run: RunRecords) -> list[Plot]:
    """None without a search, or before its first probe that fitted."""
    measured = [line for line in run.probes if line.status == "ok" and line.samples_per_s]
    if not measured:
        return []
    plots = [_speed(run, measured), _time_parts(measured)]
    if any(line.utilization_pct is not None for line in measured):
        plots.append(_utilization(measured))
    return [*plots, _order(run)]


def _speed(run: RunRecords, measured: Sequence[ProbeLine]) -> Plot:
    caption = (
        "Each probe with its standard error; the curve and its band (90 %) are throughput_knee's "
        "model of the probes. Dashed: the size that was chosen. Data: table of probes."
    )

    def paint(axes: Axes) -> None:
        _curve(axes, measured)
        axes.errorbar(
            [line.batch_size for line in measured],
            [line.samples_per_s or 0.0 for line in measured],
            [line.samples_per_s_error or 0.0 for line in measured],
            fmt="o",
            color=colour("blue"),
            markersize=4,
            label="probes",
        )
        _mark_chosen(run, axes)
        axes.set(xlabel="batch size per worker", ylabel="samples/s")
        plain_log(axes, "x", 2)
        thousands(axes, "y")
        axes.set_ylim(bottom=0)
        legend(axes)

    return draw("batch_size_speed", "Speed over batch size", caption, paint)


def _curve(axes: Axes, measured: Sequence[ProbeLine]) -> None:
    import numpy as np

    points = combine([_measurement(line) for line in measured])
    sizes = [point.batch_size for point in points]
    if len(sizes) < 2:
        return
    spread = np.geomspace(sizes[0], sizes[-1], _CURVE_POINTS).round().astype(int)
    wanted = sorted({*map(int, spread), *sizes})
    low, middle, high = np.exp(np.quantile(draw_curves(points, wanted), [0.05, 0.5, 0.95], axis=0))
    axes.fill_between(wanted, low, high, color=colour("sky"), alpha=0.25, linewidth=0)
    axes.plot(wanted, middle, color=colour("sky"), linewidth=1.4, label="fitted curve")


def _measurement(line: ProbeLine) -> Measurement:
    speed, error = line.samples_per_s, line.samples_per_s_error
    return Measurement(line.batch_size, "ok", speed or math.nan, error or math.nan)


def _mark_chosen(run: RunRecords, axes: Axes) -> None:
    if run.batch_size is not None:
        chosen = run.batch_size.batch_size_per_worker
        axes.axvline(chosen, color=colour("orange"), linestyle="--", label=f"chosen: {chosen}")


def _time_parts(measured: Sequence[ProbeLine]) -> Plot:
    last = {line.batch_size: line for line in measured}
    lines = [last[size] for size in sorted(last)]
    caption = (
        "Where the time of a sample goes: mean of the steps, divided by the batch size (the "
        "latest probe of each size). Data: table of probes."
    )

    def paint(axes: Axes) -> None:
        names, bottom = [str(line.batch_size) for line in lines], [0.0] * len(lines)
        for (part, name), shade in zip(_PARTS.items(), SERIES, strict=False):
            heights = [1e3 * (at.parts_s.get(part) or 0.0) / at.batch_size for at in lines]
            axes.bar(names, heights, bottom=bottom, color=colour(shade), label=name, width=0.7)
            bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
        axes.set(xlabel="batch size per worker", ylabel="ms per sample")
        axes.grid(visible=False, axis="x")
        if len(names) > 8:
            axes.tick_params(axis="x", labelrotation=60)
        legend(axes)

    return draw("batch_size_time_parts", "Time per sample by part", caption, paint)


def _utilization(measured: Sequence[ProbeLine]) -> Plot:
    known = sorted((m for m in measured if m.utilization_pct is not None), key=_size)
    caption = (
        "How busy the device was: mean of the top half of the samples, and of all. Data: table of "
        "probes."
    )

    def paint(axes: Axes) -> None:
        for pick, name, shade, marker in (
            ("utilization_pct", "top half", "blue", "o"),
            ("utilization_mean_pct", "all", "grey", "."),
        ):
            y = [(getattr(line, pick) or 0.0) / 100 for line in known]
            axes.plot([m.batch_size for m in known], y, marker, color=colour(shade), label=name)
        axes.set(xlabel="batch size per worker", ylabel="utilisation", ylim=(0, 1.04))
        plain_log(axes, "x", 2)
        percent_axis(axes)
        legend(axes)

    return draw("batch_size_utilization", "Utilisation over batch size", caption, paint)


def _size(line: ProbeLine) -> int:
    return line.batch_size


def _order(run: RunRecords) -> Plot:
    caption = "Which size was probed when. Data, with the reasons: table of probes."
    groups = (
        ("measured", "o", "blue", [p for p in run.probes if p.status == "ok" and not p.check]),
        ("check of the choice", "D", "orange", [p for p in run.probes if p.check]),
        ("out of memory", "x", "pink", [p for p in run.probes if p.status != "ok"]),
    )

    def paint(axes: Axes) -> None:
        numbers = [line.probe for line in run.probes]
        axes.plot(numbers, [p.batch_size for p in run.probes], color=colour("grid"), linewidth=1)
        for name, marker, shade, lines in groups:
            if lines:
                x, y = [line.probe for line in lines], [line.batch_size for line in lines]
                axes.plot(x, y, marker, color=colour(shade), label=name, linestyle="none")
        axes.set(xlabel="probe", ylabel="batch size per worker")
        whole_numbers(axes)
        plain_log(axes, "y", 2)
        legend(axes)

    return draw("batch_size_order", "Order of probes", caption, paint)


def probes_table(run: RunRecords) -> Table:
    """A row for each probe, in their order."""
    names = ("probe", "batch size", "samples/s", "±", "busy", "memory", *_PARTS.values())
    columns = [*map(Column, names), Column("why this size", wide=True)]
    caption = (
        "Every probe in its order. Parts are mean times of a step; busy: the device, mean of the "
        "top half of the samples."
    )
    return Table("probes", caption, columns, [_row(line) for line in run.probes])


def _row(line: ProbeLine) -> list[Cell]:
    speed = Cell(count(line.samples_per_s)) if line.status == "ok" else Cell("out of memory")
    busy, memory = line.utilization_pct, line.peak_memory_mib
    return [
        Cell(f"{line.probe}{' (check)' if line.check else ''}", line.probe),
        Cell(str(line.batch_size)),
        speed,
        Cell(plain(line.samples_per_s_error, 3)),
        Cell("–" if busy is None else f"{busy:.0f} %"),
        Cell("–" if memory is None else f"{memory:,.0f} MiB", memory),
        *(Cell(duration(line.parts_s.get(part)), line.parts_s.get(part)) for part in _PARTS),
        Cell(line.reason + (f"; {line.why}" if line.why else "")),
    ]
