"""Utilization and memory of the processes over time."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from raytrain_opt.recording.records import SpanRecord
from raytrain_opt.report.formatting import percent
from raytrain_opt.report.plots import (
    Cell,
    Column,
    Plot,
    Table,
    color,
    draw,
    legend,
    percent_axis,
    thousands,
)
from raytrain_opt.report.run_reader import RunRecords

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# More points cannot be distinguished in a plot of this size.
_MAX_POINTS, _MAX_DOTS = 240, 60
# A command that computes nothing: its utilization says nothing about the training.
_SEND = "send_candidate_state"


def utilization_plots(run: RunRecords) -> list[Plot]:
    """Plot utilization and memory. Needs a span."""
    series = _Series.from_run(run)
    return [_utilization(series), _memory(series)]


class _Series:
    """Values by pool, at the end of each epoch in seconds from the first span."""

    def __init__(self) -> None:
        self.end_s: dict[str, list[float]] = defaultdict(list)
        self.utilization: dict[str, list[float]] = defaultdict(list)
        self.memory_mib: dict[str, list[float]] = defaultdict(list)

    @classmethod
    def from_run(cls, run: RunRecords) -> _Series:
        """Return means of utilization weighted by time, and maxima of memory over processes."""
        series, start_s = cls(), min(span.start_s for span in run.spans)
        groups: dict[tuple[str, int], list[SpanRecord]] = defaultdict(list)
        epochs_per_point = max(-(-len(run.epochs) // _MAX_POINTS), 1)
        for span in run.spans:
            groups[span.pool, span.epoch // epochs_per_point].append(span)
        for (pool, _), spans in sorted(groups.items()):
            known = [s for s in spans if s.utilization_pct is not None and s.command != _SEND]
            memory_mib = [s.memory_mib for s in spans if s.memory_mib is not None]
            if known or memory_mib:
                series.end_s[pool].append(max(s.start_s + s.duration_s for s in spans) - start_s)
                series.utilization[pool].append(_mean_utilization(known))
                series.memory_mib[pool].append(max(memory_mib, default=math.nan))
        return series


def _mean_utilization(spans: Sequence[SpanRecord]) -> float:
    total_s = math.fsum(span.duration_s for span in spans)
    busy_s = math.fsum((s.utilization_pct or 0.0) / 100 * s.duration_s for s in spans)
    return busy_s / total_s if total_s > 0 else math.nan


_POOLS = {"worker": ("workers", "blue"), "slot": ("slots", "orange")}


def _utilization(series: _Series) -> Plot:
    caption = (
        "Utilization of a process's compute threads (or its GPU) during commands, mean of each "
        "epoch. The timeline shows the idle time between commands."
    )

    def paint(axes: Axes) -> None:
        _lines(axes, series, series.utilization)
        axes.set(xlabel="seconds", ylabel="utilization", ylim=(0, 1.04))
        percent_axis(axes)
        legend(axes)

    table = _table(series)
    return draw("utilization", "Utilization over time", caption, paint, table)


def _memory(series: _Series) -> Plot:
    caption = (
        "Largest memory of any process of a pool: memory of tensors on a GPU, otherwise resident "
        "memory including shared pages. Data: table of the utilization plot."
    )

    def paint(axes: Axes) -> None:
        _lines(axes, series, series.memory_mib)
        axes.set(xlabel="seconds", ylabel="MiB")
        axes.set_ylim(bottom=0)
        thousands(axes, "y")
        legend(axes)

    return draw("memory", "Memory over time", caption, paint)


def _lines(axes: Axes, series: _Series, values: Mapping[str, Sequence[float]]) -> None:
    for pool, (name, color_name) in _POOLS.items():
        if pool in values:
            marker = "." if len(values[pool]) <= _MAX_DOTS else ""
            x = series.end_s[pool]
            axes.plot(x, values[pool], marker=marker, color=color(color_name), label=name)


def _table(series: _Series) -> Table:
    rows = [
        [
            Cell(_POOLS[pool][0] if pool in _POOLS else pool),
            Cell(f"{end_s:.1f}"),
            Cell("–" if math.isnan(utilization) else percent(utilization, 0)),
            Cell(f"{memory_mib:,.0f}", memory_mib),
        ]
        for pool in series.end_s
        for end_s, utilization, memory_mib in zip(
            series.end_s[pool], series.utilization[pool], series.memory_mib[pool], strict=True
        )
    ]
    columns = [*map(Column, ("pool", "seconds", "utilization", "memory, MiB"))]
    return Table("utilization", "Utilization and memory by epoch.", columns, rows)
