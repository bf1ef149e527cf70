"""How old the gradients of asynchronous training were."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raytrain_opt.report.plots import (
    Cell,
    Column,
    Plot,
    Table,
    colour,
    draw,
    legend,
    thousands,
    whole_numbers,
)
from raytrain_opt.report.records import RunRecords
from raytrain_opt.report.words import count, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def staleness_plot(run: RunRecords) -> Plot | None:
    """How old gradients were, over the whole run; None without asynchronous training."""
    counts: list[int] = []
    for epoch in run.epochs:
        for age, number in enumerate(epoch.staleness.counts if epoch.staleness else ()):
            counts += [0] * (age + 1 - len(counts))
            counts[age] += number
    total = sum(counts)
    if not total:
        return None
    mean = sum(age * number for age, number in enumerate(counts)) / total
    caption = f"Updates between a worker's pull and its push: {mean:.3g} on average, at most "
    caption += f"{len(counts) - 1}, over {total:,} updates of the whole run."

    def paint(axes: Axes) -> None:
        axes.bar(range(len(counts)), counts, color=colour("blue"), width=0.8)
        axes.axvline(mean, color=colour("orange"), linestyle="--", label=f"mean {mean:.3g}")
        axes.set(xlabel="staleness in updates", ylabel="updates")
        whole_numbers(axes)
        thousands(axes, "y")
        legend(axes)

    rows = [
        [Cell(str(age)), Cell(count(number), number), Cell(percent(number / total))]
        for age, number in enumerate(counts)
    ]
    columns = [Column("staleness"), Column("updates"), Column("share")]
    table = Table("staleness", "Updates by staleness.", columns, rows)
    return draw("staleness", "Staleness of gradients", caption, paint, table)
