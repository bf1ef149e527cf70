"""Staleness of the gradients in asynchronous training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raytrain_opt.report.axes import thousands, whole_numbers
from raytrain_opt.report.formatting import count, percent
from raytrain_opt.report.plots import Cell, Plot, Table, color, draw
from raytrain_opt.report.run_reader import RunRecords

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
