"""Where the time went: who did what when, parts of epochs, utilisation, memory, staleness."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
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
    thousands,
    whole_numbers,
)
from raytrain_opt.report.records import EpochLine, RunRecords, SpanLine
from raytrain_opt.report.words import count, duration, percent, plain, rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# What a member's span is made of, in the order in which it is drawn.
_SPAN_PARTS = {
    "load_s": ("communicate", "orange"),
    "data_wait_s": ("wait for data", "pink"),
    "compute_s": ("compute", "blue"),
    "score_s": ("score", "sky"),
    "stash_s": ("communicate", "orange"),
    "average_s": ("communicate", "orange"),
    "hand_over_s": ("communicate", "orange"),
}
_WHOLE_SPANS = {"evaluate": ("score", "sky"), "commit": ("commit", "green")}
_REST = ("communicate", "orange")

# Of an epoch, as the driver measures them: names, and the part that a part belongs to.
_EPOCH_PARTS = {
    "pretrain_s": "pre-train",
    "take_state_s": "take state",
    "main_load_s": "load state",
    "compute_s": "main train",
    "main_data_wait_s": "data wait",
    "evaluate_s": "evaluate",
}
_WINDOW_EPOCHS, _WINDOW_SPANS = 3, 400
_MOST_BARS = 60


def time_plots(run: RunRecords) -> list[Plot]:
    """None before the first epoch."""
    if not run.epochs:
        return []
    plots = [_epoch_parts(run)]
    if run.spans:
        by_epoch = _Usage.of(run)
        plots = [_timeline(run), *plots, _busy(by_epoch), _memory(by_epoch)]
    return plots


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


def _timeline(run: RunRecords) -> Plot:
    spans, epochs = _window(run)
    zero_s = min(span.at_s for span in spans)
    names = sorted({span.who for span in run.spans}, key=_by_pool, reverse=True)
    caption = (
        f"Who did what in {epochs}. Where nothing is drawn, a process was idle. In a span, parts "
        "are drawn one after the other, although waits and steps take turns; what workers wait "
        "for each other in a step counts as compute. Data: of the whole run, below."
    )

    def paint(axes: Axes) -> None:
        seen: set[str] = set()
        for row, who in enumerate(names):
            for name, shade, bars in _bars(span for span in spans if span.who == who):
                shifted = [(at_s - zero_s, seconds) for at_s, seconds in bars]
                label = "_again" if name in seen else name
                seen.add(name)
                axes.broken_barh(
                    shifted, (row - 0.38, 0.76), color=colour(shade), label=label, linewidth=0
                )
        axes.set_yticks(range(len(names)), names)
        axes.set(xlabel="seconds", ylim=(-0.6, len(names) - 0.4))
        axes.grid(visible=False, axis="y")
        legend(axes)

    return draw("timeline", "Who did what when", caption, paint, _processes(run))


def _by_pool(who: str) -> tuple[str, int]:
    pool, _, index = who.partition(" ")
    return pool, int(index) if index.isdecimal() else 0


def _window(run: RunRecords) -> tuple[list[SpanLine], str]:
    """The spans of some epochs in the middle: the first has the warming up of everything."""
    of_epoch: dict[int, list[SpanLine]] = defaultdict(list)
    for span in run.spans:
        of_epoch[span.epoch].append(span)
    epochs = sorted(of_epoch)
    middle = epochs[max(0, (len(epochs) - _WINDOW_EPOCHS + 1) // 2) :][:_WINDOW_EPOCHS]
    while len(middle) > 1 and sum(len(of_epoch[e]) for e in middle) > _WINDOW_SPANS:
        middle.pop()
    found = sorted((s for e in middle for s in of_epoch[e]), key=lambda s: s.at_s)
    text = f"epoch {middle[0]}" if len(middle) == 1 else f"epochs {middle[0]} to {middle[-1]}"
    return found[:_WINDOW_SPANS], text


def _bars(spans: Iterable[SpanLine]) -> list[tuple[str, str, list[tuple[float, float]]]]:
    """Begin and length in seconds, by kind."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for span in spans:
        at_s = span.at_s
        for kind, seconds in _kinds(span):
            found[kind].append((at_s, seconds))
            at_s += seconds
    return [(name, shade, bars) for (name, shade), bars in found.items()]


def _kinds(span: SpanLine) -> list[tuple[tuple[str, str], float]]:
    """What a span is made of; what it does not tell is communication."""
    whole = _WHOLE_SPANS.get(span.doing)
    if whole is not None:
        return [(whole, span.seconds)]
    parts = [
        (kind, seconds)
        for part, kind in _SPAN_PARTS.items()
        if (seconds := span.parts_s.get(part) or 0.0) > 0
    ]
    rest = span.seconds - math.fsum(seconds for _, seconds in parts)
    return [*parts, (_REST, rest)] if rest > 0 else parts


def _processes(run: RunRecords) -> Table:
    """Where the time of each process went, from the first span to the last."""
    began_s = min(span.at_s for span in run.spans)
    whole_s = max(span.at_s + span.seconds for span in run.spans) - began_s
    kinds = [kind for kind, _ in dict.fromkeys((*_SPAN_PARTS.values(), *_WHOLE_SPANS.values()))]
    names = list(dict.fromkeys(kinds))
    spent: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for span in run.spans:
        for (name, _), seconds in _kinds(span):
            spent[span.who][name] += seconds
    rows = [
        [
            Cell(who),
            *(Cell(duration(spent[who].get(name)), spent[who].get(name)) for name in names),
            Cell(percent(max(0.0, 1 - math.fsum(spent[who].values()) / max(whole_s, 1e-9)))),
        ]
        for who in sorted(spent, key=_by_pool)
    ]
    caption = f"Time of each process over {duration(whole_s)}, from the first command to the last."
    columns = [*map(Column, ("process", *names, "idle"))]
    return Table("processes", caption, columns, rows)


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


def _epoch_parts(run: RunRecords) -> Plot:
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
        size = -(-len(run.epochs) // (4 * _MOST_BARS))
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
            marker = "." if len(values[pool]) <= _MOST_BARS else ""
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
