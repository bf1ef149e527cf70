"""What each epoch's time was spent on, and the table of epochs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
    whole_numbers,
)
from raytrain_opt.report.records import EpochLine, RunRecords
from raytrain_opt.report.words import count, duration, percent, plain, rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Of an epoch, as the driver measures them: names, and the part that a part belongs to.
_EPOCH_PARTS = {
    "pretrain_s": "pre-train",
    "take_state_s": "take state",
    "main_load_s": "load state",
    "compute_s": "main train",
    "main_data_wait_s": "data wait",
    "evaluate_s": "evaluate",
}
_MOST_BARS = 60


def epoch_parts(epoch: EpochLine) -> dict[str, float]:
    """Seconds by part, without overlap: of the main training what the slowest worker computed,
    and the rest of it under `communicate`; what nothing else explains under `other`.
    """
    given = {name: seconds or 0.0 for name, seconds in epoch.parts_s.items()}
    wait_s = given.get("main_data_wait_s", 0.0)
    parts = {name: given.get(name, 0.0) for name in _EPOCH_PARTS}
    parts["compute_s"] = max(0.0, given.get("main_compute_s", 0.0) - wait_s)
    main_s = given.get("main_train_s", 0.0)
    inside = parts["compute_s"] + wait_s + parts["main_load_s"]
    parts["communicate"] = max(0.0, main_s - inside)
    known = math.fsum(given.get(n, 0.0) for n in ("pretrain_s", "take_state_s", "evaluate_s"))
    parts["other"] = max(0.0, epoch.seconds - known - main_s)
    return parts


def epoch_parts_plot(run: RunRecords) -> Plot:
    """Stacked; needs an epoch. Of many epochs, means of some at a time."""
    begun = {1, *(event.epoch for event in run.events if event.what == "resumed")}
    parts = [epoch_parts(epoch) for epoch in run.epochs]
    left_s = 0.0
    for epoch, of_epoch in zip(run.epochs, parts, strict=True):
        if epoch.epoch in begun:
            left_s += of_epoch["other"]
            of_epoch["other"] = 0.0
    groups = _grouped(list(zip((e.epoch for e in run.epochs), parts, strict=True)))
    names = {**_EPOCH_PARTS, "communicate": "communicate", "other": "other"}
    caption = "Seconds of an epoch by part, as the driver saw them"
    caption += f" (means of {groups[0][2]} epochs)" if groups[0][2] > 1 else ""
    caption += f"; the start of processes, {duration(left_s)}, is left out. "
    caption += "Data: table of epochs."

    def paint(axes: Axes) -> None:
        x, bottom = [at for at, _, _ in groups], [0.0] * len(groups)
        width = 0.8 * groups[0][2]
        shades = (*SERIES[:6], "grey", "grid")
        for (part, name), shade in zip(names.items(), shades, strict=True):
            heights = [of_group[part] for _, of_group, _ in groups]
            if not any(heights):
                continue
            axes.bar(x, heights, width, bottom=bottom, color=colour(shade), label=name)
            bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
        axes.set(xlabel="epoch", ylabel="seconds")
        axes.grid(visible=False, axis="x")
        whole_numbers(axes)
        legend(axes)

    return draw("time_parts", "Parts of each epoch", caption, paint)


def _grouped(
    parts: Sequence[tuple[int, Mapping[str, float]]],
) -> list[tuple[float, dict[str, float], int]]:
    """Means of so many epochs that no more bars than can be seen are left: where, what, how
    many.
    """
    size = -(-len(parts) // _MOST_BARS)
    found = []
    for first in range(0, len(parts), size):
        some = parts[first : first + size]
        at = math.fsum(epoch for epoch, _ in some) / len(some)
        means = {n: math.fsum(each[n] for _, each in some) / len(some) for n in some[0][1]}
        found.append((at, means, size))
    return found


def epochs_table(run: RunRecords) -> Table:
    """A row for each epoch."""
    names = (
        "epoch", "LR", "train loss", "test accuracy", "top 5", "samples/s", "seconds",
        "pre-train", "main train", "data wait", "evaluate",
    )  # fmt: skip
    rows = [_epoch_row(epoch) for epoch in run.epochs]
    return Table("epochs", "Every epoch.", [*map(Column, names)], rows)


def _epoch_row(epoch: EpochLine) -> list[Cell]:
    parts = epoch.parts_s
    timed = ("pretrain_s", "main_train_s", "main_data_wait_s", "evaluate_s")
    return [
        Cell(str(epoch.epoch)),
        Cell(rate(epoch.lr)),
        Cell(plain(epoch.train_loss)),
        Cell(percent(epoch.test_accuracy, 2)),
        Cell(percent(epoch.test_top5, 2)),
        Cell(count(epoch.samples_per_s)),
        Cell(f"{epoch.seconds:.2f}"),
        *(Cell(duration(parts.get(part)), parts.get(part)) for part in timed),
    ]
