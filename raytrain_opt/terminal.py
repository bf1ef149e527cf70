"""Progress of a run in the terminal: a progress bar, or plain lines in a log or a pipe."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from raytrain_opt.errors import printable
from raytrain_opt.recording.records import BatchSizeProbeRecord, EpochRecord


class Output(Console):
    """Standard output; what is printed after its reader has left, or on a full disk, is lost."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print, or mute standard output; rich would end the process."""
        try:
            super().print(*objects, **options)
        except OSError:
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        self.quiet = True
        with suppress(OSError), open(os.devnull, "w") as nowhere:  # a notebook has no file
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


class Terminal:
    """Display of a run's progress, by default on stdout: a line per event.

    A terminal, unlike logs, `ray job logs` and pipes, has a progress bar below the lines, with
    epoch, phase, and elapsed and remaining time.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Output(file=sys.stdout)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("starting", total=1.0)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._progress.disable:  # rich 13 would print an empty line
            self._progress.stop()

    def note(self, text: str) -> None:
        """Print a line that stays: text as it is, but nothing that controls a terminal."""
        line = printable(text)
        self._console.print(line, markup=False, emoji=False, highlight=False, soft_wrap=True)

    def phase(self, text: str) -> None:
        """Show the current activity in the bar."""
        self._progress.update(self._task, description=text)

    def advance(self, fraction: float) -> None:
        """Show in the bar how much of the training is done."""
        self._progress.update(self._task, completed=fraction)

    def epoch(self, record: EpochRecord) -> None:
        """Show the result of an epoch."""
        self.note(epoch_text(record))


def epoch_text(record: EpochRecord) -> str:
    """Return one epoch as one line."""
    loss = "–" if record.train_loss is None else f"{record.train_loss:.4f}"
    metric = record.metric
    test = f"test {metric.name} {metric.text(record.test_metric)}  " if metric else ""
    speed = f"{record.samples_per_s:,.0f} samples/s"
    return (
        f"epoch {record.epoch}/{record.epochs}  lr {record.lr:.4g}  train loss {loss}  "
        f"{test}{speed}  {record.duration_s:.1f} s"
    )


def probe_text(record: BatchSizeProbeRecord) -> str:
    """Return one probe of a batch-size search as one line."""
    check = " (check)" if record.check else ""
    start = f"probe {record.probe}{check}: batch size {record.batch_size}"
    if record.status == "out_of_memory":
        return f"{start}  out of memory  ({record.error})"
    speed, error = record.samples_per_s or 0.0, record.samples_per_s_error
    error_pct = "?" if not speed or error is None else f"{100 * error / speed:.1f}"
    return f"{start}  {speed:,.0f} samples/s ± {error_pct} %  ({record.reason})"
