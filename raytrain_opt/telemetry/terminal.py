"""What the user sees while a run goes on: a progress bar, or plain lines without a terminal."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from raytrain_opt.telemetry.records import EpochRecord


class Terminal(Protocol):
    """Where a run tells how far it is."""

    def __enter__(self) -> Terminal: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def note(self, text: str) -> None:
        """A line that stays."""

    def phase(self, text: str, epoch: int, epochs: int) -> None:
        """What is being done now."""

    def advance(self, epochs_done: float) -> None:
        """How much of the training is done, in epochs."""

    def epoch(self, record: EpochRecord, epochs: int) -> None:
        """An epoch is over."""


class Lines:
    """One plain line per event: for logs, `ray job logs` and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def note(self, text: str) -> None:
        """A line."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def phase(self, text: str, epoch: int, epochs: int) -> None:
        """Nothing: phases would be too many lines."""

    def advance(self, epochs_done: float) -> None:
        """Nothing: a log does not move."""

    def epoch(self, record: EpochRecord, epochs: int) -> None:
        """A line."""
        self.note(epoch_text(record, epochs))


class Bar:
    """A progress bar that shows epoch, phase, accuracy, speed and the time left."""

    def __init__(self, console: Console, epochs: int) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[last]}"),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task("starting", total=float(epochs), last="")

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def note(self, text: str) -> None:
        """A line above the bar."""
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def phase(self, text: str, epoch: int, epochs: int) -> None:
        """The text before the bar."""
        where = f"epoch {epoch}/{epochs}  " if epoch else ""
        self._progress.update(self._task, description=f"{where}{text}")

    def advance(self, epochs_done: float) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=epochs_done)

    def epoch(self, record: EpochRecord, epochs: int) -> None:
        """The text behind the bar."""
        last = f"lr {record.lr:.4g}  {record.samples_per_s:,.0f} samples/s"
        if record.test_accuracy is not None:
            last = f"accuracy {record.test_accuracy:.2%}  {last}"
        self._progress.update(self._task, completed=float(record.epoch), last=last)


def open_terminal(epochs: int, *, plain: bool = False) -> Terminal:
    """A bar on a terminal, lines elsewhere."""
    console = Console(file=sys.stdout)
    return Bar(console, epochs) if console.is_terminal and not plain else Lines(console)


_NEW_RUN, _OLD_RUN = "run directory:", "going on with"


def run_dir_text(shown: str, *, resumed: bool) -> str:
    """The line that says where a run writes."""
    return f"{_OLD_RUN if resumed else _NEW_RUN} {shown}"


def find_run_dir(log: str) -> str | None:
    """What the last such line in the output of a run says."""
    found = re.findall(rf"^(?:{_NEW_RUN}|{_OLD_RUN}) (.+)$", log, re.MULTILINE)
    return found[-1].strip() if found else None


def epoch_text(record: EpochRecord, epochs: int) -> str:
    """One epoch in one line."""
    accuracy = "" if record.test_accuracy is None else f"  accuracy {record.test_accuracy:.2%}"
    return (
        f"epoch {record.epoch}/{epochs}  lr {record.lr:.4g}  loss {record.train_loss:.4f}"
        f"{accuracy}  {record.samples_per_s:,.0f} samples/s  {record.seconds:.1f} s"
    )


def print_summary(rows: Sequence[Sequence[str]], lines: Sequence[tuple[str, str]]) -> None:
    """The table at the end, and where everything is."""
    console = Console(file=sys.stdout)
    table = Table("epoch", "candidates tried", "chosen LR", "accuracy")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    width = max((len(name) for name, _ in lines), default=0)
    for name, text in lines:
        console.print(f"{name:<{width}}  {text}", markup=False, highlight=False, soft_wrap=True)
