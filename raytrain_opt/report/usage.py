"""How busy processes were over time, and how much memory they had."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from raytrain_opt.report.plots import (
    Cell,
    Column,
    Plot,
    Table,
    colour,
    draw,
    legend,
    percent_axis,
    thousands,
)
from raytrain_opt.report.records import RunRecords, SpanLine
from raytrain_opt.report.words import percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_POINTS, _MOST_DOTS = 240, 60


def usage_plots(run: RunRecords) -> list[Plot]:
    """Needs a span."""
    usage = _Usage.of(run)
    return [_busy(usage), _memory(usage)]


class _Usage:
    """Utilisation and memory by pool: at the end of each epoch, in seconds from the first."""

    def __init__(self) -> None:
        self.at_s: dict[str, list[float]] = defaultdict(list)
        self.busy: dict[str, list[float]] = defaultdict(list)
        self.memory_mib: dict[str, list[float]] = defaultdict(list)

    @classmethod
    def of(cls, run: RunRecords) -> _Usage:
        """Means weighted by time; of memory the most that any process had."""
        this, zero_s = cls(), min(span.at_s for span in run.spans)
        groups: dict[tuple[str, int], list[SpanLine]] = defaultdict(list)
        size = -(-len(run.epochs) // _MOST_POINTS)
        for span in run.spans:
            groups[span.pool, span.epoch // max(size, 1)].append(span)
        for (pool, _), spans in sorted(groups.items()):
            known = [s for s in spans if s.utilization_pct is not None and s.doing != "take_state"]
            seconds = math.fsum(span.seconds for span in known)
            busy = math.fsum((s.utilization_pct or 0.0) * s.seconds for s in known)
            memory = [s.memory_mib for s in spans if s.memory_mib is not None]
            if memory or known:
                this.at_s[pool].append(max(s.at_s + s.seconds for s in spans) - zero_s)
                this.busy[pool].append(busy / seconds / 100 if seconds > 0 else math.nan)
                this.memory_mib[pool].append(max(memory, default=math.nan))
        return this


_POOLS = {"worker": ("workers", "blue"), "slot": ("slots", "orange")}


def _busy(usage: _Usage) -> Plot:
    caption = (
        "How busy a process's compute threads (or its GPU) were while it had something to do: "
        "mean of each epoch. For idle time between commands see the timeline."
    )

    def paint(axes: Axes) -> None:
        _lines(axes, usage, usage.busy)
        axes.set(xlabel="seconds", ylabel="utilisation", ylim=(0, 1.04))
        percent_axis(axes)
        legend(axes)

    table = _usage_table(usage, "utilization", "Utilisation by epoch.")
    return draw("utilization", "Utilisation over time", caption, paint, table)


def _memory(usage: _Usage) -> Plot:
    caption = (
        "The most that any process of a pool had: of a GPU's memory what tensors took, otherwise "
        "resident memory, shared pages included. Data: below the utilisation."
    )

    def paint(axes: Axes) -> None:
        _lines(axes, usage, usage.memory_mib)
        axes.set(xlabel="seconds", ylabel="MiB")
        axes.set_ylim(bottom=0)
        thousands(axes, "y")
        legend(axes)

    return draw("memory", "Memory over time", caption, paint)


def _lines(axes: Axes, usage: _Usage, values: Mapping[str, Sequence[float]]) -> None:
    for pool, (name, shade) in _POOLS.items():
        if pool in values:
            marker = "." if len(values[pool]) <= _MOST_DOTS else ""
            x = usage.at_s[pool]
            axes.plot(x, values[pool], marker=marker, color=colour(shade), label=name)


def _usage_table(usage: _Usage, name: str, caption: str) -> Table:
    rows = [
        [
            Cell(_POOLS[pool][0] if pool in _POOLS else pool),
            Cell(f"{at_s:.1f}"),
            Cell("–" if busy != busy else percent(busy, 0)),
            Cell(f"{memory:,.0f}", memory),
        ]
        for pool in usage.at_s
        for at_s, busy, memory in zip(
            usage.at_s[pool], usage.busy[pool], usage.memory_mib[pool], strict=True
        )
    ]
    columns = [Column("pool"), Column("seconds"), Column("utilisation"), Column("memory, MiB")]
    return Table(name, caption, columns, rows)
