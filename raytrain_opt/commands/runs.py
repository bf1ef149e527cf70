"""The runs below a storage path: state, result and cost of each, from its small records."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime

from rich.table import Table
from rich.text import Text

from raytrain_opt.errors import JobError, Problem, RecordError, StorageError, printable
from raytrain_opt.execution.workspace import is_locked
from raytrain_opt.paths import FoundRun, find_runs
from raytrain_opt.recording.reader import read_last, read_record
from raytrain_opt.recording.records import (
    BatchSizeRecord,
    EpochRecord,
    EpochResult,
    Event,
    ResultRecord,
)
from raytrain_opt.report.plots import duration, percent, rate
from raytrain_opt.storage import check_uri, is_remote, last_name, local_path
from raytrain_opt.terminal import Output

# Requests to a storage at a time.
_THREADS = 16


@dataclass(frozen=True)
class ListedRun:
    """One run. `latest`: its last epoch so far. `search_fraction`: of the training's samples."""

    run_dir: str
    started: datetime
    state: str
    latest: EpochResult | None = None
    epochs: int | None = None
    duration_s: float | None = None
    search_fraction: float | None = None

    def cells(self) -> list[str]:
        """Return a row of the table."""
        latest, metric = self.latest, "–"
        if latest and latest.metric:
            metric = f"{latest.metric.name} {latest.metric.text(latest.test_metric)}"
        return [
            self.state,
            f"{latest.epoch if latest else 0} of {self.epochs or '?'}",
            metric,
            duration(self.duration_s),
            percent(self.search_fraction, 0),
            latest.optimizer if latest else "–",
            rate(latest.lr_peak if latest else None),
            last_name(self.run_dir),
        ]


def list_runs(storage_path: str) -> list[ListedRun]:
    """Return the runs below a folder or URI, newest first. Raises JobError, StorageError."""
    if problems := check_uri(storage_path, "STORAGE"):
        raise JobError(problems, "arguments")
    runs = find_runs(storage_path)
    if not (runs or is_remote(storage_path) or local_path(storage_path).exists()):
        missing = Problem("STORAGE", "there is no such folder", repr(storage_path))
        raise JobError([missing], "arguments")
    with ThreadPoolExecutor(_THREADS) as executor:
        return list(executor.map(_read, runs))


def print_runs(storage_path: str, runs: Sequence[ListedRun]) -> None:
    """Print a table of the runs."""
    columns = ("state", "epochs", "test metric", "time", "search", "optimizer", "peak LR", "run")
    table = Table(*columns, box=None, pad_edge=False)
    for run in runs:
        table.add_row(*(Text(printable(cell, kept="")) for cell in run.cells()))
    console = Output(file=sys.stdout, width=400)  # so that no name is cut; lines are not filled
    title = f"{len(runs)} {'run' if len(runs) == 1 else 'runs'} in {storage_path}"
    console.print(Text(printable(title, kept="")))
    console.print(table)


def _read(found: FoundRun) -> ListedRun:
    run_dir, _, started = found
    try:
        if (result := read_record(run_dir, ResultRecord)) is not None:
            fraction = result.search.fraction_of_training
            return ListedRun(
                run_dir, started, "finished", result.final, result.epochs, result.wall_s, fraction
            )
        latest = read_last(run_dir, EpochRecord)
        state, duration_s = _unfinished(run_dir, started, latest)
        epochs = latest.epochs if latest else None
        return ListedRun(run_dir, started, state, latest, epochs, duration_s)
    except RecordError:
        return ListedRun(run_dir, started, "damaged records")
    except StorageError:
        return ListedRun(run_dir, started, "not readable")


def _unfinished(
    run_dir: str, started: datetime, latest: EpochRecord | None
) -> tuple[str, float | None]:
    """Return the state of a run without a result, and its duration if that is known."""
    if not is_remote(run_dir) and is_locked(local_path(run_dir)):
        return "running", (datetime.now(UTC) - started).total_seconds()
    event = read_last(run_dir, Event)
    if event is not None and event.kind in ("failed", "interrupted"):
        return ("failed" if event.kind == "failed" else "interrupted"), event.time_s
    chosen = None if latest else read_record(run_dir, BatchSizeRecord)
    if chosen is not None:
        return "batch size found", chosen.duration_s
    # Under a URI nobody knows whether its process lives.
    return ("unfinished" if is_remote(run_dir) else "interrupted"), None
