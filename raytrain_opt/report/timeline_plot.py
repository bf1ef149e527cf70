"""Timeline of the processes: computing, waiting, communicating, writing a checkpoint, or idle."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from raytrain_opt.recording.spans import SpanRecord
from raytrain_opt.report.formatting import duration, percent
from raytrain_opt.report.plots import Cell, Plot, Table, color, draw, duration_cell
from raytrain_opt.report.run_reader import RunRecords

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# Activities and their colors, in the order of the columns of the table.
_COLORS = {
    "communicate": "orange",
    "wait for data": "pink",
    "compute": "blue",
    "score": "sky",
    "checkpoint": "green",
}
# Parts of a command of a worker or slot, in the order in which they are drawn.
_PARTS = {
    "load_s": "communicate",
    "data_wait_s": "wait for data",
    "compute_s": "compute",
    "score_s": "score",
    "stash_s": "communicate",
    "average_s": "communicate",
    "hand_over_s": "communicate",
}
# Commands without parts. The rest of any other command is communication.
_COMMANDS = {"evaluate": "score", "checkpoint": "checkpoint"}

# More than this is too dense to read.
_WINDOW_EPOCHS, _WINDOW_SPANS, _MOST_PROCESSES = 3, 400, 40


def timeline_plots(run: RunRecords) -> list[Plot]:
    """Plot some epochs in the middle of the run, with a table of all; no plot before the first."""
    if not run.epochs or not run.spans:
        return []
    spans, epochs = _window(run)
    start_s = min(span.start_s for span in spans)
    processes = sorted(_main_processes(run), key=_by_pool, reverse=True)
    caption = (
        f"Activity of each process in {epochs}. White: idle. The parts of a command are drawn one "
        "after the other, although waiting and computing alternate; the time in which workers "
        "wait for each other within a step counts as compute. Data of the complete run: table "
        "below."
    )

    def paint(axes: Axes) -> None:
        labeled: set[str] = set()
        for row, process in enumerate(processes):
            bars = _bars(span for span in spans if span.process == process)
            for activity, ranges in bars.items():
                axes.broken_barh(
                    [(bar_start_s - start_s, duration_s) for bar_start_s, duration_s in ranges],
                    (row - 0.38, 0.76),
                    color=color(_COLORS[activity]),
                    # A label that begins with _ is left out of the legend.
                    label="_repeated" if activity in labeled else activity,
                    linewidth=0,
                )
                labeled.add(activity)
        axes.set_yticks(range(len(processes)), processes)
        axes.set(xlabel="seconds", ylim=(-0.6, len(processes) - 0.4))
        axes.grid(visible=False, axis="y")

    table = _processes_table(run)
    return [draw("timeline", "Timeline of the processes", caption, paint, table)]


def _main_processes(run: RunRecords) -> set[str]:
    """Return the processes with the most spans: of a large pool, some have only a few."""
    spans = Counter(span.process for span in run.spans)
    return {process for process, _ in spans.most_common(_MOST_PROCESSES)}


def _by_pool(process: str) -> tuple[str, int]:
    pool, _, index = process.partition(" ")
    return pool, int(index) if index.isdecimal() else 0


def _window(run: RunRecords) -> tuple[list[SpanRecord], str]:
    """Return the spans of some epochs in the middle, without the first if possible; their name."""
    spans_by_epoch: dict[int, list[SpanRecord]] = defaultdict(list)
    for span in run.spans:
        spans_by_epoch[span.epoch].append(span)
    epochs = sorted(spans_by_epoch)
    middle = epochs[max(0, (len(epochs) - _WINDOW_EPOCHS + 1) // 2) :][:_WINDOW_EPOCHS]
    while len(middle) > 1 and sum(len(spans_by_epoch[e]) for e in middle) > _WINDOW_SPANS:
        middle.pop()
    spans = sorted((s for e in middle for s in spans_by_epoch[e]), key=lambda s: s.start_s)
    name = f"epoch {middle[0]}" if len(middle) == 1 else f"epochs {middle[0]} to {middle[-1]}"
    return spans[:_WINDOW_SPANS], name


def _bars(spans: Iterable[SpanRecord]) -> dict[str, list[tuple[float, float]]]:
    """Return start and duration in seconds of each part, by activity."""
    bars: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for span in spans:
        start_s = span.start_s
        for activity, duration_s in _activities(span):
            bars[activity].append((start_s, duration_s))
            start_s += duration_s
    return bars


def _activities(span: SpanRecord) -> list[tuple[str, float]]:
    """Return the parts of a span; time outside its parts is communication."""
    if span.command in _COMMANDS:
        return [(_COMMANDS[span.command], span.duration_s)]
    parts = [
        (activity, duration_s)
        for part, activity in _PARTS.items()
        if (duration_s := span.timings_s.get(part) or 0.0) > 0
    ]
    rest_s = span.duration_s - math.fsum(duration_s for _, duration_s in parts)
    return [*parts, ("communicate", rest_s)] if rest_s > 0 else parts


def _processes_table(run: RunRecords) -> Table:
    """Return the time of each process by activity, from the first span to the last."""
    start_s = min(span.start_s for span in run.spans)
    total_s = max(span.start_s + span.duration_s for span in run.spans) - start_s
    spent_s: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for span in run.spans:
        for activity, duration_s in _activities(span):
            spent_s[span.process][activity] += duration_s
    rows = []
    for process in sorted(_main_processes(run), key=_by_pool):
        by_name = spent_s[process]
        idle = max(0.0, 1 - math.fsum(by_name.values()) / max(total_s, 1e-9))
        times = [duration_cell(by_name.get(name)) for name in _COLORS]
        rows.append([Cell(process), *times, Cell(percent(idle))])
    caption = f"Time of each process over {duration(total_s)}, from the first command to the last."
    return Table("processes", caption, ("process", *_COLORS, "idle"), rows)
