"""The page in a real browser, opened from disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain_opt.report import write_report
from tests.support.browser import PageView, View, find_browser, open_page
from tests.support.synthetic_runs import (
    event_line,
    with_batch_size_search,
    with_predictions,
    write_lines,
    write_run,
)

BROWSER = find_browser()
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="needs Chromium (Debian and Ubuntu: apt-get install chromium)"
)
PLOTS = 5


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = with_batch_size_search(write_run(tmp_path_factory.mktemp("page") / "a run, größer", 12))
    with_predictions(run)
    write_lines(run / "events.jsonl", [event_line("restarted", "slot 1", process="slot 1")])
    return Path(write_report([str(run)]))


def opened(page: Path, view: View, profile: Path) -> PageView:
    assert BROWSER is not None
    result = open_page(BROWSER, page, view, profile)
    assert result.requests == []
    assert result.errors == []
    return result


VISIBLE = """[...document.querySelectorAll('figure svg')].filter(svg => {
    const box = svg.getBoundingClientRect(); return box.width > 200 && box.height > 100
}).length"""
COLUMN = """[...document.querySelectorAll('#table-epochs tbody tr')]
    .map(row => row.cells[{}].textContent)"""
CLICK = "document.querySelectorAll('#table-epochs th button')[{}].click()"
SORT = "document.querySelectorAll('#table-epochs th')[{}].getAttribute('aria-sort')"


def test_the_page_opens_from_disk_and_its_tables_sort(page: Path, tmp_path: Path) -> None:
    """By test accuracy, which grows with the epoch, both ways; and by the epoch as a number."""
    scripts = (
        VISIBLE,
        CLICK.format(4), COLUMN.format(0), SORT.format(4),
        CLICK.format(4), COLUMN.format(0), SORT.format(4),
        CLICK.format(0), COLUMN.format(0), SORT.format(4),
    )  # fmt: skip
    result = opened(page, View(scripts=scripts), tmp_path / "profile")
    plots, _, up, rising, _, down, falling, _, again, unsorted = result.answers
    assert plots == PLOTS
    ascending = [str(epoch) for epoch in range(1, 13)]
    assert (up, rising) == (ascending, "ascending")
    assert (down, falling) == (ascending[::-1], "descending")
    assert (again, unsorted) == (ascending, None)


CONTRAST = """(() => {
    const light = text => { const [r, g, b] = text.match(/[\\d.]+/g).map(Number);
        const f = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
        return 0.2126 * f(r) + 0.7152 * f(g) + 0.0722 * f(b) };
    const paper = light(getComputedStyle(document.body).backgroundColor);
    const ratio = (node, property) => { const v = light(getComputedStyle(node)[property]);
        return (Math.max(v, paper) + 0.05) / (Math.min(v, paper) + 0.05) };
    return { paper,
        prose: Math.min(...[...document.querySelectorAll('p, figcaption, dt, dd, td, h2')]
            .map(node => ratio(node, 'color'))),
        plots: Math.min(...[...document.querySelectorAll('svg text')]
            .map(node => ratio(node, 'fill'))) };
})()"""


@pytest.mark.parametrize("dark", [False, True])
def test_text_has_enough_contrast_in_light_and_dark(
    page: Path, tmp_path: Path, dark: bool
) -> None:
    """The contrast of text is at least 4.5, as WCAG level AA requires."""
    result = opened(page, View(dark=dark, scripts=(CONTRAST,)), tmp_path / "profile")
    [contrast] = result.answers
    assert (contrast["paper"] < 0.05) == dark
    assert contrast["prose"] >= 4.5
    assert contrast["plots"] >= 4.5


SMALLEST = """Math.min(...[...document.querySelectorAll('svg text')].map(text =>
    parseFloat(getComputedStyle(text).fontSize)
    * Math.hypot(text.getScreenCTM().a, text.getScreenCTM().b)))"""
OVER = "document.documentElement.scrollWidth"


def test_the_page_fits_a_phone(page: Path, tmp_path: Path) -> None:
    """Only tables, which scroll, are wider than the screen; text has at least 7 pixels."""
    view = View(width=390, height=844, scripts=(OVER, VISIBLE, SMALLEST))
    result = opened(page, view, tmp_path / "profile")
    assert result.answers[:2] == [390, PLOTS]
    assert result.answers[2] >= 7
