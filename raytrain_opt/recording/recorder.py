"""Write the records of a run, and the same numbers for TensorBoard."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from raytrain_opt.errors import StorageError
from raytrain_opt.paths import RunPaths
from raytrain_opt.recording.base import Record
from raytrain_opt.recording.predictions import PredictionsRecord
from raytrain_opt.recording.reader import parse_lines, read_lines, read_raw_lines
from raytrain_opt.recording.records import EpochRecord, ResultRecord, RoundRecord, ScheduleRecord
from raytrain_opt.recording.spans import EventRecord, SpanRecord
from raytrain_opt.recording.tensorboard import TensorBoardWriter
from raytrain_opt.storage import append_lines, write_bytes, write_text

_CANDIDATE_SCALARS = ("lr", "score", "val_metric", "val_loss", "train_loss")
_EPOCH_SCALARS = ("lr", "train_loss", "samples_per_s")

R = TypeVar("R", bound=Record)


def append_records(path: Path, records: Sequence[Record]) -> None:
    """Append one line per record. Raises StorageError naming the path."""
    append_lines(path, [record.model_dump_json() for record in records])


def write_record(path: Path, record: Record) -> None:
    """Write a record as readable JSON, atomically. Raises StorageError naming the path."""
    write_text(path, record.model_dump_json(indent=2) + "\n")


class Recorder:
    """Writer of one run's records. Its methods raise StorageError naming the file."""

    def __init__(self, paths: RunPaths) -> None:
        self.paths = paths
        self._sizes: dict[Path, int] = {}  # of the records that were written to
        self._tensorboard = TensorBoardWriter(paths.tensorboard)

    def round(self, record: RoundRecord, step: int) -> None:
        """Write a line of rounds.jsonl, and the values of all candidates for TensorBoard."""
        self._append(self.paths.rounds, [record])
        scalars = {
            f"round/candidate_{candidate.index}/{name}": getattr(candidate, name)
            for candidate in record.candidates
            for name in _CANDIDATE_SCALARS
        }
        scalars["round/next_base_lr"] = record.next_base_lr
        self._tensorboard.scalars(step, scalars)

    def epoch(self, record: EpochRecord, step: int) -> None:
        """Write a line of epochs.jsonl, and the same values for TensorBoard."""
        self._append(self.paths.epochs, [record])
        scalars = {f"epoch/{name}": getattr(record, name) for name in _EPOCH_SCALARS}
        scalars |= {f"epoch/test_{name}": value for name, value in record.test_metrics.items()}
        if record.noise_scale is not None:
            scalars["epoch/noise_scale"] = record.noise_scale.value
        if record.staleness is not None:
            scalars["epoch/staleness"] = record.staleness.mean
        self._tensorboard.scalars(step, scalars)

    def timeline(self, spans: Sequence[SpanRecord]) -> None:
        """Write lines of timeline.jsonl."""
        self._append(self.paths.timeline, spans)

    def event(self, event: EventRecord) -> None:
        """Write a line of events.jsonl. A resumed run keeps all of them: they are its history."""
        self._append(self.paths.events, [event])

    def schedule(self, record: ScheduleRecord) -> None:
        """Write a line of schedule.jsonl."""
        self._append(self.paths.schedule, [record])

    def lrs(self) -> list[float]:
        """Return the learning rate of every step in schedule.jsonl."""
        epochs = _read(self.paths.schedule, ScheduleRecord)
        return [lr for epoch in epochs for lr in epoch.steps.lrs]

    def epochs(self) -> list[EpochRecord]:
        """Return the lines of epochs.jsonl."""
        return _read(self.paths.epochs, EpochRecord)

    def predictions(self, record: PredictionsRecord) -> None:
        """Write predictions.json, in place of that of an earlier epoch."""
        write_text(self.paths.predictions, f"{record.model_dump_json()}\n")

    def result(self, record: ResultRecord) -> None:
        """Write result.json."""
        for path in self._sizes:
            self._check_size(path)
        write_record(self.paths.result, record)

    def end_s(self, partial_s: float) -> float:
        """Return the end of `partial_s` after the last span, or the last event if it is later."""
        spans = _undamaged(self.paths.timeline, SpanRecord)
        spans_end_s = max((span.start_s + span.duration_s for _, span in spans), default=0.0)
        events = _undamaged(self.paths.events, EventRecord)
        return max(spans_end_s + partial_s, *(event.time_s for _, event in events), 0.0)

    def truncate_after(self, rounds: int, epochs: int) -> int:
        """Keep this number of rounds and epochs, and the spans of these epochs.

        A resumed run repeats, and writes again, what followed its last checkpoint. Damaged lines
        of the timeline and of the events, from which nothing is computed, are removed; returns
        their number. Raises what `check_records` raises, before it writes.
        """
        kept, damaged = check_records(self.paths, rounds, epochs)
        for path, lines in kept.items():
            if path.exists():
                write_bytes(path, b"".join(line + b"\n" for line in lines))
            self._sizes[path] = _size(path)
        return damaged

    def _append(self, path: Path, records: Sequence[Record]) -> None:
        self._check_size(path)
        append_records(path, records)
        self._sizes[path] = _size(path)

    def _check_size(self, path: Path) -> None:
        """Raise StorageError if a record was removed since this run wrote to it."""
        size, left = self._sizes.get(path, 0), _size(path)
        if left < size:
            raise StorageError(
                f"{path} was removed or cut while the run wrote to it: {size - left} of {size} "
                "bytes are lost. Is something cleaning up there? Checkpoints that are left can be "
                "read by predict and evaluate"
            )

    def close(self) -> None:
        """Close the file of TensorBoard."""
        self._tensorboard.close()


def check_records(
    paths: RunPaths, rounds: int, epochs: int
) -> tuple[dict[Path, Sequence[bytes]], int]:
    """Return the lines that a run keeps of each record when it is resumed; writes nothing.

    Of the timeline and the events, also returns the number of damaged lines. Raises RecordError
    when a round or an epoch is damaged or missing, StorageError when a record cannot be read.
    """
    run_dir = str(paths.local)
    kept: dict[Path, Sequence[bytes]] = {}
    for path, kind, count in (
        (paths.rounds, RoundRecord, rounds),
        (paths.epochs, EpochRecord, epochs),
        (paths.schedule, ScheduleRecord, epochs),
    ):
        lines = read_raw_lines(run_dir, path.name)[:count]
        parse_lines(lines, str(path), kind, count)
        kept[path] = lines
    spans = _undamaged(paths.timeline, SpanRecord)
    events = _undamaged(paths.events, EventRecord)
    total = sum(len(read_raw_lines(run_dir, p.name)) for p in (paths.timeline, paths.events))
    kept[paths.timeline] = [line for line, span in spans if span.epoch <= epochs]
    kept[paths.events] = [line for line, _ in events]
    return kept, total - len(spans) - len(events)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _read(path: Path, kind: type[R]) -> list[R]:
    return read_lines(str(path.parent), path.name, kind)


def _undamaged(path: Path, kind: type[R]) -> list[tuple[bytes, R]]:
    records = []
    for line in read_raw_lines(str(path.parent), path.name):
        with suppress(ValidationError):
            records.append((line, kind.model_validate_json(line)))
    return records


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that results depend on."""
    installed = {"python": platform.python_version()}
    for name in ("raytrain_opt", "ray", "torch", "torchvision", "numpy"):
        with suppress(PackageNotFoundError):  # the benchmarks of a GPU run without Ray
            installed[name] = version(name)
    return installed
