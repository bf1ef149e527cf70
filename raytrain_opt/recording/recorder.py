"""Write the records of a run, and the same numbers for TensorBoard."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import time
from typing import TypeVar

from raytrain_opt.clock import Stopwatch, monotonic_s, utc_now
from raytrain_opt.errors import RaytrainOptError, RecordError, StorageError, printable
from raytrain_opt.paths import RunPaths
from raytrain_opt.recording.reader import REMEDY, parse_lines, read_lines, read_raw_lines
from raytrain_opt.recording.records import (
    EpochRecord,
    Event,
    Phase,
    Record,
    RoundRecord,
    ScheduleRecord,
)
from raytrain_opt.storage import append_lines, storage_errors, write_bytes, write_text

_SCALARS = ("lr", "train_loss", "samples_per_s")

R = TypeVar("R", bound=Record)


def append(run_dir: Path, *records: Record) -> None:
    """Append each record as a line of its file. Raises StorageError naming the path."""
    for record in records:
        append_lines(run_dir / record.file, [record.model_dump_json()])


def write_record(run_dir: Path, record: Record, indent: int | None = 2) -> None:
    """Write a record as the JSON of its file, atomically. Raises StorageError naming the path."""
    write_text(run_dir / record.file, record.model_dump_json(indent=indent) + "\n")


class Recorder:
    """Writer of one run's records. Its methods raise StorageError or RecordError naming the file.

    tensorboardX's SummaryWriter would block the run forever on a full disk, where its thread dies.
    """

    def __init__(self, paths: RunPaths) -> None:
        from tensorboardX.event_file_writer import EventsWriter

        self.paths = paths
        self._sizes: dict[str, int] = {}  # of the files that were appended to
        with storage_errors(f"{paths.tensorboard} cannot be written"):
            paths.tensorboard.mkdir(exist_ok=True)
            self._scalars = EventsWriter(str(paths.tensorboard / "events"))

    def add(self, *records: Record) -> None:
        """Append lines. A resumed run keeps all events and phases: they are its history."""
        for record in records:
            self._check_size(record)
            append(self.paths.local, record)
            self._sizes[record.file] = self._size(record)

    def epoch(self, record: EpochRecord, step: int) -> None:
        """Write a line of epochs.jsonl, and its finite values for TensorBoard."""
        from tensorboardX.proto.event_pb2 import Event as Scalar
        from tensorboardX.summary import scalar

        self.add(record)
        values = {f"epoch/{name}": getattr(record, name) for name in _SCALARS}
        values |= {f"epoch/test_{name}": value for name, value in record.test_metrics.items()}
        with storage_errors(f"{self.paths.tensorboard} cannot be written"):
            for name, value in values.items():
                if value is not None and math.isfinite(value):
                    summary = scalar(name, value)
                    self._scalars.write_event(Scalar(wall_time=time(), step=step, summary=summary))
            self._scalars.flush()

    def read(self, kind: type[R]) -> list[R]:
        """Return the lines of a record file so far."""
        self._check_size(kind)
        return read_lines(str(self.paths.local), kind)

    def _size(self, record: Record | type[Record]) -> int:
        path = self.paths.local / record.file
        with storage_errors(f"{path} cannot be read"):
            return path.stat().st_size if path.exists() else 0

    def _check_size(self, record: Record | type[Record]) -> None:
        """Raise RecordError if the file has lost lines since this run wrote to it."""
        if self._size(record) < self._sizes.get(record.file, 0):
            path = self.paths.local / record.file
            raise RecordError(f"{path} was removed or cut while the run wrote to it; {REMEDY}")

    def end_s(self, partial_s: float) -> float:
        """Return the end of `partial_s` after the last epoch, or the last event if it is later."""
        ends_s = [epoch.end_s for epoch in self.read(EpochRecord)[-1:]]
        times_s = [event.time_s for event in self.read(Event)]
        return max(sum(ends_s) + partial_s, *times_s, 0.0)

    def truncate_after(self, rounds: int, epochs: int) -> None:
        """Keep this number of rounds and epochs, and all events. Raises as `check_records`."""
        for path, lines in check_records(self.paths.local, rounds, epochs).items():
            if path.exists():
                write_bytes(path, b"".join(line + b"\n" for line in lines))
                self._sizes[path.name] = path.stat().st_size

    def close(self) -> None:
        """Close the file of TensorBoard; a second call does nothing."""
        with suppress(OSError, ValueError):  # all points are written, or their error was raised
            self._scalars.close()


def check_records(run_dir: Path, rounds: int, epochs: int) -> dict[Path, Sequence[bytes]]:
    """Return the lines that a run keeps of each record when it is resumed; writes nothing.

    Raises RecordError when a line is damaged or missing, StorageError when a record cannot be
    read.
    """
    kept: dict[Path, Sequence[bytes]] = {}
    counts: dict[type[Record], int | None] = {
        Event: None,
        Phase: None,
        RoundRecord: rounds,
        EpochRecord: epochs,
        ScheduleRecord: epochs,
    }
    for kind, count in counts.items():
        lines = read_raw_lines(str(run_dir), kind)[:count]
        parse_lines(lines, str(run_dir), kind, count or 0)
        kept[run_dir / kind.file] = lines
    return kept


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that results depend on."""
    installed = {"python": platform.python_version()}
    for name in ("raytrain_opt", "ray", "torch", "torchvision", "numpy"):
        with suppress(PackageNotFoundError):  # the benchmarks of a GPU run without Ray
            installed[name] = version(name)
    return installed


class EventLog:
    """The clock and the events of an execution, in seconds of the run without interruptions."""

    def __init__(self, recorder: Recorder, note: Callable[[str], None], began_s: float) -> None:
        self._recorder, self._note = recorder, note  # which shows a line to the user
        self._run_start_s = began_s

    def resume_clock(self, epoch: int, text: str, partial_s: float) -> None:
        """Continue the clock of an interrupted run where its records end, and log the resume.

        `partial_s`: duration of the part of this epoch that is kept.
        """
        self._run_start_s -= self._recorder.end_s(partial_s)
        self.log("resumed", epoch, text)

    def elapsed_s(self) -> float:
        """Return the seconds of the run until now, of all its executions."""
        return monotonic_s() - self._run_start_s

    @contextmanager
    def measure(self, epoch: int, phase: str, stopwatch: Stopwatch) -> Iterator[None]:
        """Record the block as a phase of the epoch, and add its duration to a stopwatch."""
        start_s = self.elapsed_s()
        with stopwatch.measure(f"{phase}_s"):
            yield
        duration_s = self.elapsed_s() - start_s
        self._recorder.add(Phase(epoch=epoch, phase=phase, start_s=start_s, duration_s=duration_s))

    def log(self, kind: str, epoch: int, text: str) -> None:
        """Show an event to the user and record it."""
        self._note(text)
        self.write(epoch, [Event(kind=kind, text=printable(text), time_s=monotonic_s())])

    def write(self, epoch: int, events: Sequence[Event]) -> None:
        """Record events whose times are on this process's clock."""
        for event in events:
            update = {"epoch": epoch, "time_s": event.time_s - self._run_start_s, "utc": utc_now()}
            self._recorder.add(event.model_copy(update=update))

    def close_with(self, epoch: int, error: BaseException) -> None:
        """Record why the run ends early. `error` gets a note when that fails."""
        kind = "failed" if isinstance(error, Exception) else "interrupted"
        # The message of any other error may hold data of the user.
        text = (
            printable(str(error)) if isinstance(error, RaytrainOptError) else type(error).__name__
        )
        try:
            self.write(epoch, [Event(kind=kind, text=text, time_s=monotonic_s())])
            self._recorder.paths.publish()
        except StorageError as storage_error:
            error.add_note(f"this could not be recorded: {storage_error}")
