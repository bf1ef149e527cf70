"""The HTML report of a run, made from its records alone, so also for a run that was interrupted.

Start reading with `page`, which lists the sections and has their tables; `run_plots` has their
plots, drawn with `plots`. `run_reader` reads the records, `summary` judges them.

May import `recording`, `terminal`, `search`, `config` and the foundations; neither torch nor Ray.
"""

from __future__ import annotations

from dataclasses import replace

from raytrain_opt import storage
from raytrain_opt.recording.records import ResultRecord
from raytrain_opt.report.run_reader import read_run

PAGE = "report.html"


def write_report(
    run_dir: str, shown: str | None = None, result: ResultRecord | None = None
) -> str:
    """Write `report.html` into a run directory; return the page's location.

    `shown`: the directory as the user knows it. `result`: when that is not written yet. Raises
    what `read_run` raises, and StorageError when the page cannot be written.
    """
    from raytrain_opt.report.page import report_page

    run = read_run(run_dir, shown)
    if result is not None:
        run = replace(run, result=result)
    storage.write(run_dir, PAGE, report_page(run).encode())
    return storage.join(run.run_dir, PAGE)


def try_write_report(run_dir: str, shown: str, result: ResultRecord | None = None) -> str:
    """Return where the report of a complete run is, or why there is none; never raises."""
    try:
        return write_report(run_dir, shown, result)
    except Exception as error:  # noqa: BLE001 - a damaged record, a plot, a full disk, ...
        return f"cannot be written: {error}"
