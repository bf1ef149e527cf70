"""Who did what when: computed, waited, communicated, committed, or was idle."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from raytrain_opt.report.plots import (
    Cell,
    Column,
    Plot,
    Table,
    colour,
    draw,
    legend,
)
from raytrain_opt.report.records import RunRecords, SpanLine
from raytrain_opt.report.words import duration, percent

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
# Where a record does not tell the parts.
_UNDIVIDED = {"pretrain": ("compute", "blue"), "main_train": ("compute", "blue")}
_REST = ("communicate", "orange")

_WINDOW_EPOCHS, _WINDOW_SPANS = 3, 400


def timeline_plot(run: RunRecords) -> Plot:
    """Of some epochs in the middle of the run; its table is of the whole run. Needs a span."""
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
    whole = _WHOLE_SPANS.get(span.doing) or (None if span.parts_s else _UNDIVIDED.get(span.doing))
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
