"""The page in a real browser, opened from disk."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

from raytrain_opt.report import write_report
from tests.support.synthetic_runs import (
    event_line,
    with_batch_size_search,
    with_predictions,
    write_lines,
    write_run,
)

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, NAMES)), "")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--hide-scrollbars",
    "--disable-dev-shm-usage",
)
pytestmark = pytest.mark.skipif(
    not BROWSER, reason="needs Chromium (Debian and Ubuntu: apt-get install chromium)"
)
PLOTS = 4
# Evaluates expressions in the page; the document around it gets their values, as the errors.
PROBE = """<script>
const errors = [];
addEventListener('error', event => errors.push(event.message));
addEventListener('load', () => {
    const values = SCRIPTS.map(script => (0, eval)(script));
    const answers = parent.document.createElement('pre');
    answers.id = 'answers';
    answers.textContent = JSON.stringify({values, errors});
    parent.document.body.append(answers);
});
</script>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = with_batch_size_search(write_run(tmp_path_factory.mktemp("page") / "a run, größer", 12))
    with_predictions(run)
    write_lines(run / "events.jsonl", [event_line("restarted", "slot 1", process="slot 1")])
    return Path(write_report(str(run)))


def evaluate(page: Path, folder: Path, scripts: Sequence[str], width: int) -> list[Any]:
    """Return the values of JavaScript expressions in the page, in a frame of this width."""
    probe = PROBE.replace("SCRIPTS", json.dumps(scripts))
    html = escape(page.read_text(encoding="utf-8").replace("<head>", f"<head>{probe}", 1))
    frame = f'<iframe width="{width}" height="900" style="border: 0" srcdoc="{html}"></iframe>'
    outer = folder / "outer.html"
    outer.write_text(
        f'<!doctype html><meta charset="utf-8"><body>{frame}</body>', encoding="utf-8"
    )
    profile = f"--user-data-dir={folder}/profile"
    command = [BROWSER, *FLAGS, profile, "--dump-dom", outer.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search('<pre id="answers">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stderr
    answers = json.loads(unescape(found[1]))
    assert answers["errors"] == []
    return list(answers["values"])


VISIBLE = """[...document.querySelectorAll('figure img')].filter(image => {
    const box = image.getBoundingClientRect(); return box.width > 300 && box.height > 190
        && image.naturalWidth > 0
}).length"""
CONTRAST = """(() => {
    const light = text => { const [r, g, b] = text.match(/[\\d.]+/g).map(Number);
        const f = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
        return 0.2126 * f(r) + 0.7152 * f(g) + 0.0722 * f(b) };
    const paper = light(getComputedStyle(document.body).backgroundColor);
    return Math.min(...[...document.querySelectorAll('p, figcaption, dt, dd, td, h2')].map(
        node => (paper + 0.05) / (light(getComputedStyle(node).color) + 0.05)));
})()"""
OVER = "document.documentElement.scrollWidth"
LONG_TEXTS = """[...document.querySelectorAll('td.wide')].filter(
    cell => cell.getBoundingClientRect().right > innerWidth).length"""


@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_opens_from_disk_and_fits(page: Path, tmp_path: Path, width: int) -> None:
    """Only tables, which scroll, are wider than the screen; WCAG's level AA asks for 4.5."""
    scripts = (OVER, VISIBLE, LONG_TEXTS, CONTRAST)
    over, plots, cut, contrast = evaluate(page, tmp_path, scripts, width)
    assert (over, plots, cut) == (width, PLOTS, 0)
    assert contrast >= 4.5
