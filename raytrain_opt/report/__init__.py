"""What a run came to, for people: a page, plots and a verdict. Reads records only.

`write_report` writes the page and the plots; `verdicts` is for scripts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from raytrain_opt.paths import write_atomic, write_stored
from raytrain_opt.report.records import read_run

PAGE, COMPARISON, PLOTS = "report.html", "comparison.html", "plots"


def write_report(run_dirs: Sequence[str], shown: str | None = None) -> str:
    """Of one run `report.html`, of several `comparison.html`, in the (first) run directory, and
    their plots in `plots/` as PNG and SVG. Returns the place of the page.

    `shown`: how the user knows the one run. Raises what `read_run` raises, and CommitError when
    it cannot be written.
    """
    from raytrain_opt.report.page import comparison_page, report_page

    runs = [read_run(run_dir, shown) for run_dir in run_dirs]
    page = report_page(runs[0]) if len(runs) == 1 else comparison_page(runs)
    name = PAGE if len(runs) == 1 else COMPARISON
    target = run_dirs[0]
    for plot in page.plots:
        _write(target, f"{PLOTS}/{plot.name}.svg", plot.svg.encode())
        _write(target, f"{PLOTS}/{plot.name}.png", plot.png)
    _write(target, name, page.html.encode())
    return f"{runs[0].run_dir.rstrip('/')}/{name}"


def verdicts(run_dirs: Sequence[str]) -> dict[str, Any]:
    """Of each run, as JSON has it. Raises what `read_run` raises."""
    from raytrain_opt.report.verdict import SCHEMA_VERSION, verdict_of

    found = [asdict(verdict_of(read_run(run_dir))) for run_dir in run_dirs]
    return {"schema_version": SCHEMA_VERSION, "runs": found}


def _write(run_dir: str, name: str, content: bytes) -> None:
    if "://" in run_dir:
        write_stored(run_dir, name, content)
        return

    def fill(temporary: Path) -> None:
        temporary.parent.mkdir(exist_ok=True)  # of plots; a run that vanished is not made again
        temporary.write_bytes(content)

    write_atomic(Path(run_dir).expanduser().absolute() / name, fill)
