"""Figures in one style, as SVG; tables; numbers as text for people.

A dash stands for an unknown number.
"""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from typing import TYPE_CHECKING, Any, Literal

from raytrain_opt.errors import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def percent(fraction: float | None, digits: int = 1) -> str:
    """Return `98.9 %` for 0.989."""
    return "–" if fraction is None else f"{100 * fraction:.{digits}f} %"


def rate(value: float | None) -> str:
    """Return a learning rate."""
    return "–" if value is None else f"{value:.4g}"


def duration(value_s: float | None) -> str:
    """Return `1 h 5 min`, `3 min 20 s`, `12.3 s`, or `45 ms`."""
    if value_s is None or not math.isfinite(value_s):
        return "–"
    if value_s < 1:
        return f"{1000 * value_s:.{0 if value_s >= 0.01 or not value_s else 2}f} ms"
    if value_s < 100:
        return f"{value_s:.1f} s"
    minutes, seconds = divmod(round(value_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


def plain(value: float | None, digits: int = 4) -> str:
    """Return a number with this many significant digits, never in exponential form if large."""
    if value is not None and abs(value) >= 10**digits:
        return count(value)
    return "–" if value is None else f"{value:.{digits}g}"


def count(value: float | None) -> str:
    """Return an integer with thousands separators."""
    return "–" if value is None else f"{value:,.0f}"


def times(number: int, noun: str) -> str:
    """Return `1 round`, `2 rounds`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


# The colors of Okabe and Ito, which color-blind readers can distinguish.
BLUE, ORANGE, GREY, INK = "#0072b2", "#d55e00", "#9aa1ab", "#1f2329"
SERIES = (BLUE, ORANGE, "#009e73", "#cc79a7", "#e69f00", "#56b4e9", GREY)


@dataclass(frozen=True)
class Table:
    """A table. `name` is its identifier in the page; text in `wide` columns may be broken."""

    name: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    wide: Sequence[str] = ()

    def without_empty(self) -> Table:
        """Return the table without the columns that have a dash in every row."""
        kept = [i for i in range(len(self.columns)) if any(row[i] != "–" for row in self.rows)]
        rows = [[row[i] for i in kept] for row in self.rows]
        return replace(self, columns=[self.columns[i] for i in kept], rows=rows)


@dataclass(frozen=True)
class Plot:
    """One figure; `svg`: in base64."""

    name: str
    title: str
    caption: str
    svg: str


@dataclass(frozen=True)
class Section:
    """A section of the page. `note`: text above its plots.

    `mistakes`: pictures below them, each as JPEG in base64 (None: no picture), text and remark.
    """

    name: str
    title: str
    plots: Sequence[Plot] = ()
    tables: Sequence[Table] = ()
    note: str = ""
    mistakes: Sequence[tuple[str | None, str, str]] = ()


def draw(name: str, title: str, caption: str, paint: Callable[[Axes], None]) -> Plot:
    """Draw a plot with one pair of axes, which `paint` fills; add a legend if it has labels."""
    svg = StringIO()
    save_figure(svg, name, paint, format="svg", metadata=_NO_METADATA)
    return Plot(name, title, caption, b64encode(printable(svg.getvalue()).encode()).decode())


def save_figure(file: Any, name: str, paint: Callable[[Axes], None], **options: Any) -> None:
    """Write the plot of `draw` into a file, with the options of matplotlib's `savefig`."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style: Any = {**_STYLE, "svg.hashsalt": name}
    with rc_context(style):
        figure = Figure(figsize=(4.8, 3.1), layout="constrained", facecolor="none")
        axes = figure.add_subplot()
        paint(axes)
        if axes.get_legend_handles_labels()[1]:  # above the axes, where it covers no data
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, borderaxespad=0.2)
        figure.savefig(file, **options)


_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}

_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.size": 9.5,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#d9dde3",
    "grid.linewidth": 0.6,
    "text.parse_math": False,  # a name of the user's with $ is no formula
    "legend.frameon": False,
    "legend.fontsize": 8.5,
}


def draw_line(axes: Axes, points: Sequence[tuple[float, float]], *style: str, **line: Any) -> None:
    """Draw a line through points (x, y); none draw nothing, but keep the label in the legend."""
    axes.plot([x for x, _ in points], [y for _, y in points], *style, **line)


def plain_log(axes: Axes, which: Literal["x", "y"], base: int = 10) -> None:
    """Make the axis logarithmic, with plain numbers; call it after the data are drawn."""
    from matplotlib.ticker import LogLocator, NullFormatter

    getattr(axes, f"set_{which}scale")("log", base=base)
    axis = getattr(axes, f"{which}axis")
    low, high = axis.get_data_interval()
    is_short = base == 10 and low > 0 and high <= 100 * low
    axis.set_major_locator(LogLocator(base=base, subs=(1.0, 2.0, 5.0) if is_short else (1.0,)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def thousands(axes: Axes, which: Literal["x", "y"]) -> None:
    """Show numbers with separators of thousands, at few ticks so that they do not overlap."""
    getattr(axes, f"{which}axis").set_major_formatter("{x:,.10g}")
    axes.locator_params(which, nbins=5)
