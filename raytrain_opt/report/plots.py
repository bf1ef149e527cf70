"""Figures of one look: drawn by matplotlib once, used in the page (SVG that takes the page's
colours, light or dark) and as files for papers (SVG and PNG).
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Names are those of the page's style sheet, which has another set for dark pages. Okabe and Ito's
# colours, which the colour-blind can tell apart.
COLOURS = {
    "ink": "#1f2329",
    "soft": "#6b7280",
    "grid": "#d9dde3",
    "blue": "#0072b2",
    "orange": "#d55e00",
    "green": "#009e73",
    "pink": "#cc79a7",
    "yellow": "#e69f00",
    "sky": "#56b4e9",
    "grey": "#9aa1ab",
}
SERIES = ("blue", "orange", "green", "pink", "yellow", "sky", "grey")

_SIZE_IN = (4.8, 3.1)
_DPI = 200


@dataclass(frozen=True)
class Column:
    """Of a table. `wide`: its text may break into lines."""

    name: str
    wide: bool = False


class Cell(NamedTuple):
    """`value`: by what the table is sorted, where the text is no number; `mark`: a CSS class."""

    text: str
    value: float | None = None
    mark: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of cells; `name` is its place in the page."""

    name: str
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True)
class Plot:
    """One figure. `svg` is a whole file, `inline` a part of a page; `table`: its data, or None
    where a table of the page has them, which the caption names.
    """

    name: str
    title: str
    caption: str
    svg: str
    inline: str
    png: bytes
    table: Table | None = None


def draw(
    name: str,
    title: str,
    caption: str,
    paint: Callable[[Axes], None],
    table: Table | None = None,
) -> Plot:
    """A plot with one pair of axes."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style: Any = {**_STYLE, "svg.hashsalt": name}
    with rc_context(style):
        figure = Figure(figsize=_SIZE_IN, layout="constrained", facecolor="none")
        axes = figure.add_subplot()
        paint(axes)
        figure.draw_without_rendering()  # the layout, which need not be found for each file
        figure.set_layout_engine("none")
        svg, png = io.StringIO(), io.BytesIO()
        figure.savefig(svg, format="svg", metadata=_NO_METADATA)
        figure.savefig(png, format="png", dpi=_DPI, facecolor="white", metadata={"Software": None})
    text = svg.getvalue()
    return Plot(name, title, caption, text, inline_svg(text, name, title), png.getvalue(), table)


def inline_svg(svg: str, name: str, title: str) -> str:
    """As part of a page: without what only a file needs, its identifiers unique, and its colours
    those of the page.
    """
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, count=1, flags=re.DOTALL)
    body = re.sub(r' xmlns(:\w+)?="[^"]*"', "", body)
    body = re.sub(r' id="[a-zA-Z0-9.]+_\d+"', "", body)  # of groups, which nothing refers to
    body = re.sub(r'(id="|url\(#|xlink:href="#)', rf"\g<1>{name}-", body)
    body = body.replace("xlink:href", "href")
    body = re.sub(r' (width|height)="[\d.]+pt"', "", body, count=2)
    for colour, value in COLOURS.items():
        body = body.replace(value, f"var(--{colour})")
    return body.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)


def few(values: Sequence[Any], most: int) -> list[Any]:
    """So many of them at most, evenly spread."""
    stride = -(-len(values) // most)
    return list(values[:: max(stride, 1)])


def legend(axes: Axes, **options: Any) -> None:
    """Above the axes, where no data are."""
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        columns = len(labels) if len(labels) <= 4 else 3
        axes.legend(
            handles,
            labels,
            loc="lower left",
            bbox_to_anchor=(0, 1.0),
            ncols=columns,
            borderaxespad=0.2,
            **options,
        )


def plain_log(axes: Axes, which: str, base: int = 10) -> None:
    """A logarithmic axis with plain numbers on it."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    getattr(axes, f"set_{which}scale")("log", base=base)
    axis = getattr(axes, f"{which}axis")
    axis.set_major_locator(LogLocator(base=base, subs=(1.0,) if base == 2 else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def percent_axis(axes: Axes, which: str = "y") -> None:
    """Shares of one, shown in percent."""
    from matplotlib.ticker import PercentFormatter

    getattr(axes, f"{which}axis").set_major_formatter(PercentFormatter(1.0, symbol=" %"))


def whole_numbers(axes: Axes) -> None:
    """No fractions on the x axis."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def thousands(axes: Axes, which: str) -> None:
    """Numbers with separators, so few that they do not touch."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis = getattr(axes, f"{which}axis")
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_major_locator(MaxNLocator(5))


colour = partial(COLOURS.__getitem__)

_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}

_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.edgecolor": COLOURS["soft"],
    "axes.labelcolor": COLOURS["ink"],
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": COLOURS["grid"],
    "grid.linewidth": 0.6,
    "text.color": COLOURS["ink"],
    "xtick.color": COLOURS["soft"],
    "ytick.color": COLOURS["soft"],
    "xtick.labelcolor": COLOURS["ink"],
    "ytick.labelcolor": COLOURS["ink"],
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.handlelength": 1.5,
    "legend.columnspacing": 1.2,
    "path.simplify": True,
}
