"""The HTML report of a run, made from its records alone, so also for a run that was interrupted.

`write_report` writes the page, `summaries` returns the main numbers for scripts.
Start reading with `page`, which lists the sections; each section's plots and tables are in one
module (`learning_rate_plots`, `time_plots`), drawn with `plots`. `run_reader` reads the records,
`summary` judges them.

May import `recording`, `terminal`, `search`, `config` and the foundations; neither torch nor Ray.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from raytrain_opt import storage
from raytrain_opt.recording.records import ResultRecord
from raytrain_opt.report.run_reader import read_run

PAGE, COMPARISON = "report.html", "comparison.html"


def write_report(
    run_dirs: Sequence[str], shown: str | None = None, result: ResultRecord | None = None
) -> str:
    """Write the report of one run, or the comparison of several; return the page's location.

    The page (`report.html` or `comparison.html`) is written into the first run directory. `shown`:
    the directory of the one run as the user knows it. `result`: its result, when that is not
    written yet.

    Raises what `read_run` raises, and StorageError when the page cannot be written.
    """
    from raytrain_opt.report.page import comparison_page, report_page

    runs = [read_run(run_dir, shown) for run_dir in run_dirs]
    if result is not None:
        runs[0] = replace(runs[0], result=result)
    page = report_page(runs[0]) if len(runs) == 1 else comparison_page(runs)
    name = PAGE if len(runs) == 1 else COMPARISON
    storage.write(run_dirs[0], name, page.encode())
    return storage.join(runs[0].run_dir, name)


def try_write_report(run_dir: str, shown: str, result: ResultRecord | None = None) -> str:
    """Return where the report of a complete run is, or why there is none; never raises."""
    try:
        return write_report([run_dir], shown, result)
    except Exception as error:  # noqa: BLE001 - a damaged record, a plot, a full disk, ...
        return f"cannot be written: {error}"


def summaries(run_dirs: Sequence[str]) -> dict[str, Any]:
    """Return the summary of each run as a JSON value. Raises what `read_run` raises."""
    from raytrain_opt.report.summary import SCHEMA_VERSION, summarize

    runs = [asdict(summarize(read_run(run_dir))) for run_dir in run_dirs]
    return {"schema_version": SCHEMA_VERSION, "runs": runs}
