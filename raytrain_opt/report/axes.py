"""Lines, bars and ticks of plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from raytrain_opt.report.plots import SERIES, color

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_line(axes: Axes, points: Sequence[tuple[float, float]], *style: str, **line: Any) -> None:
    """Draw a line through points (x, y); none draw nothing, but keep the label in the legend."""
    axes.plot([x for x, _ in points], [y for _, y in points], *style, **line)


def stacked_bars(
    axes: Axes, x: Sequence[Any], parts: Mapping[str, Sequence[float]], width: float
) -> None:
    """Draw a bar at each x, made of the parts, which have a value for each x."""
    bottom = [0.0] * len(x)
    for (name, heights), color_name in zip(parts.items(), (*SERIES, "grid"), strict=False):
        if any(heights):
            axes.bar(x, heights, width, bottom=bottom, color=color(color_name), label=name)
            bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    axes.grid(visible=False, axis="x")


def plain_log(axes: Axes, which: Literal["x", "y"], base: int = 10) -> None:
    """Make the axis logarithmic, with plain numbers; call it after the data are drawn.

    Over more than two decades, numbers at 2 and 5 would overlap.
    """
    from matplotlib.ticker import LogLocator, NullFormatter

    getattr(axes, f"set_{which}scale")("log", base=base)
    axis = getattr(axes, f"{which}axis")
    low, high = axis.get_data_interval()
    is_short = base == 10 and low > 0 and high <= 100 * low
    axis.set_major_locator(LogLocator(base=base, subs=(1.0, 2.0, 5.0) if is_short else (1.0,)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def percent_axis(axes: Axes) -> None:
    """Show fractions on the y axis, 0..1, in percent."""
    from matplotlib.ticker import PercentFormatter

    axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))


def whole_numbers(axes: Axes) -> None:
    """Put ticks of the x axis at integers only."""
    axes.locator_params("x", integer=True, min_n_ticks=1)


def thousands(axes: Axes, which: Literal["x", "y"]) -> None:
    """Show numbers with separators of thousands, at few ticks so that they do not overlap."""
    getattr(axes, f"{which}axis").set_major_formatter("{x:,.10g}")
    axes.locator_params(which, nbins=5)
