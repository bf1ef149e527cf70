"""The page as a person meets it: in a real browser, from disk."""

from __future__ import annotations

import struct
from collections import Counter
from pathlib import Path

import pytest
from browser import Seen, View, find_browser, look
from made_runs import event_line, made_run, with_batch_size_search, write_lines

from raytrain_opt.report import write_report

BROWSER = find_browser()
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="needs Chromium (Debian and Ubuntu: apt-get install chromium)"
)
PLOTS = 10


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = with_batch_size_search(made_run(tmp_path_factory.mktemp("page") / "a run, größer", 12))
    write_lines(run / "events.jsonl", [event_line("restarted", "slot 1", who="slot 1")])
    return Path(write_report([str(run)]))


def shown(page: Path, view: View, profile: Path) -> Seen:
    assert BROWSER is not None
    seen = look(BROWSER, page, view, profile)
    assert seen.requests == []
    assert seen.complaints == []
    return seen


VISIBLE = """[...document.querySelectorAll('figure svg')].filter(svg => {
    const box = svg.getBoundingClientRect(); return box.width > 200 && box.height > 100
}).length"""
COLUMN = """[...document.querySelectorAll('#table-epochs tbody tr')]
    .map(row => row.cells[{}].textContent)"""
CLICK = "document.querySelectorAll('#table-epochs th button')[{}].click()"
SORT = "document.querySelectorAll('#table-epochs th')[{}].getAttribute('aria-sort')"


def test_it_opens_from_disk_and_its_tables_sort(page: Path, tmp_path: Path) -> None:
    """By test accuracy, which grows with the epoch, both ways; and by the epoch as a number."""
    scripts = (
        VISIBLE,
        CLICK.format(3), COLUMN.format(0), SORT.format(3),
        CLICK.format(3), COLUMN.format(0), SORT.format(3),
        CLICK.format(0), COLUMN.format(0), SORT.format(3),
    )  # fmt: skip
    seen = shown(page, View(scripts=scripts), tmp_path / "profile")
    plots, _, up, rising, _, down, falling, _, again, unsorted = seen.answers
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
def test_it_can_be_read_in_light_and_dark(page: Path, tmp_path: Path, dark: bool) -> None:
    """Contrast of all text with the page is at least 4.5, as WCAG asks (level AA)."""
    seen = shown(page, View(dark=dark, scripts=(CONTRAST,)), tmp_path / "profile")
    [found] = seen.answers
    assert (found["paper"] < 0.05) == dark
    assert found["prose"] >= 4.5
    assert found["plots"] >= 4.5


SMALLEST = """Math.min(...[...document.querySelectorAll('svg text')].map(text =>
    parseFloat(getComputedStyle(text).fontSize)
    * Math.hypot(text.getScreenCTM().a, text.getScreenCTM().b)))"""
OVER = "document.documentElement.scrollWidth"


def test_it_fits_a_phone(page: Path, tmp_path: Path) -> None:
    """Nothing is wider than the screen but tables, which scroll; letters in plots are no smaller
    than 7 pixels.
    """
    view = View(width=390, height=844, scripts=(OVER, VISIBLE, SMALLEST))
    seen = shown(page, view, tmp_path / "profile")
    assert seen.answers[:2] == [390, PLOTS]
    assert seen.answers[2] >= 7


def test_the_picture_has_colours(page: Path, tmp_path: Path) -> None:
    """Plots are painted, not only there: the page's picture has much of the first series."""
    import io

    from matplotlib.image import imread

    script = "document.getElementById('batch-size').scrollIntoView({behavior: 'instant'})"
    seen = shown(page, View(height=2400, scripts=(script,)), tmp_path / "profile")
    width, height = struct.unpack(">II", seen.picture[16:24])
    assert (width, height) == (1280, 2400)
    pixels = (255 * imread(io.BytesIO(seen.picture))[..., :3]).round().astype(int)
    counts = Counter(map(tuple, pixels.reshape(-1, 3).tolist()))
    assert counts[0x00, 0x72, 0xB2] > 500
    assert counts[0xD5, 0x5E, 0x00] > 500
