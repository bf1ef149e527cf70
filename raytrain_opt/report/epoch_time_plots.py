"""Time of each epoch by part, and the table of epochs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from raytrain_opt.recording.records import EpochRecord
from raytrain_opt.report.formatting import count, duration, percent, plain, rate
from raytrain_opt.report.plots import (
    SERIES,
    Cell,
    Column,
    Plot,
    Table,
    color,
    draw,
    legend,
    whole_numbers,
)
from raytrain_opt.report.run_reader import RunRecords

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
}
# More bars cannot be distinguished in a plot of this size.
_MAX_BARS = 60


def epoch_parts(epoch: EpochRecord) -> dict[str, float]:
    """Return the seconds of an epoch by part, without overlap.

    Of the main training, `compute_s` is what the slowest worker computed and `communicate` the
    rest; `other` is time outside all parts.
    """
    timings_s = {name: duration_s or 0.0 for name, duration_s in epoch.timings_s.items()}
    wait_s = timings_s.get("main_data_wait_s", 0.0)
    parts = {name: timings_s.get(name, 0.0) for name in _EPOCH_PARTS}
    parts["compute_s"] = max(0.0, timings_s.get("main_compute_s", 0.0) - wait_s)
    main_s = timings_s.get("main_train_s", 0.0)
    parts["communicate"] = max(0.0, main_s - parts["compute_s"] - wait_s - parts["main_load_s"])
    search_s = parts["pretrain_s"] + parts["take_state_s"]
    parts["other"] = max(0.0, epoch.duration_s - search_s - parts["evaluate_s"] - main_s)
    return parts


def epoch_parts_plot(run: RunRecords) -> Plot:
    """Plot stacked bars, of many epochs means over groups. Needs an epoch."""
    parts = [epoch_parts(epoch) for epoch in run.epochs]
    startup_s = _remove_startup(run, parts)
    bars = _group(list(zip((e.epoch for e in run.epochs), parts, strict=True)))
    epochs_per_bar = -(-len(parts) // _MAX_BARS)
    names = {**_EPOCH_PARTS, "communicate": "communicate", "other": "other"}
    caption = "Seconds of an epoch by part, as measured by the driver"
    caption += f" (means of {epochs_per_bar} epochs)" if epochs_per_bar > 1 else ""
    caption += f". Not included: {duration(startup_s)} to start the processes. "
    caption += "Data: table of epochs."

    def paint(axes: Axes) -> None:
        x, bottom = [epoch for epoch, _ in bars], [0.0] * len(bars)
        colors = (*SERIES[:6], "grey", "grid")
        for (part, name), color_name in zip(names.items(), colors, strict=True):
            heights = [means[part] for _, means in bars]
            if not any(heights):
                continue
            width = 0.8 * epochs_per_bar
            axes.bar(x, heights, width, bottom=bottom, color=color(color_name), label=name)
            bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
        axes.set(xlabel="epoch", ylabel="seconds")
        axes.grid(visible=False, axis="x")
        whole_numbers(axes)
        legend(axes)

    return draw("time_parts", "Time of each epoch by part", caption, paint)


def _remove_startup(run: RunRecords, parts: Sequence[dict[str, float]]) -> float:
    """Remove the `other` time of epochs in which processes were started; return its sum."""
    started = {1, *(event.epoch for event in run.events if event.kind == "resumed")}
    startup_s = 0.0
    for epoch, of_epoch in zip(run.epochs, parts, strict=True):
        if epoch.epoch in started:
            startup_s += of_epoch["other"]
            of_epoch["other"] = 0.0
    return startup_s


def _group(
    parts: Sequence[tuple[int, Mapping[str, float]]],
) -> list[tuple[float, dict[str, float]]]:
    """Return the mean epoch and mean parts of consecutive epochs, at most `_MAX_BARS` groups."""
    size = -(-len(parts) // _MAX_BARS)
    groups = []
    for first in range(0, len(parts), size):
        group = parts[first : first + size]
        center = math.fsum(epoch for epoch, _ in group) / len(group)
        means = {n: math.fsum(p[n] for _, p in group) / len(group) for n in group[0][1]}
        groups.append((center, means))
    return groups


def epochs_table(run: RunRecords) -> Table:
    """Return a row per epoch."""
    names = (
        "epoch", "LR", "train loss", "test accuracy", "top 5", "samples/s", "seconds",
        "pre-train", "main train", "data wait", "evaluate",
    )  # fmt: skip
    rows = [_epoch_row(epoch) for epoch in run.epochs]
    return Table("epochs", "All epochs.", [*map(Column, names)], rows)


def _epoch_row(epoch: EpochRecord) -> list[Cell]:
    timings_s = epoch.timings_s
    parts = ("pretrain_s", "main_train_s", "main_data_wait_s", "evaluate_s")
    return [
        Cell(str(epoch.epoch)),
        Cell(rate(epoch.lr)),
        Cell(plain(epoch.train_loss)),
        Cell(percent(epoch.test_accuracy, 2)),
        Cell(percent(epoch.test_top5, 2)),
        Cell(count(epoch.samples_per_s)),
        Cell(f"{epoch.duration_s:.2f}"),
        *(Cell(duration(timings_s.get(part)), timings_s.get(part)) for part in parts),
    ]
