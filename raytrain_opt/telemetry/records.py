"""What a run writes down: a line per round and per epoch, TensorBoard events, the schedule."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from raytrain_opt.clock import utc_now
from raytrain_opt.paths import (
    RunPaths,
    append_json_line,
    append_json_lines,
    write_json,
    write_text,
)
from raytrain_opt.telemetry.events import Events
from raytrain_opt.telemetry.timeline import Event, Span

SCHEMA_VERSION = 1

_OF_A_CANDIDATE = ("lr", "score", "val_accuracy", "val_loss", "train_loss")


@dataclass(frozen=True)
class EpochRecord:
    """One epoch. Seconds from a monotonic clock; accuracies and losses as measured. `noise_scale`:
    that of the gradients, where it was measured (`NoiseScale.to_record`). `staleness`: how many
    gradients had which, with parallel.mode async (`Staleness.to_record`).
    """

    epoch: int
    lr: float
    lr_first: float
    train_loss: float
    train_accuracy: float
    test_loss: float | None
    test_accuracy: float | None
    test_top5: float | None
    test_samples: int
    workers: int
    samples: int
    samples_per_s: float
    skipped: int
    seconds: float
    parts_s: dict[str, float]
    noise_scale: dict[str, Any] | None = None
    staleness: dict[str, object] | None = None


class Recorder:
    """The record files of one run, open while it lives."""

    def __init__(self, paths: RunPaths) -> None:
        self.paths = paths
        self._events = Events(paths.tensorboard)

    def round(self, record: Mapping[str, Any], step: int) -> None:
        """A line of rounds.jsonl, and every candidate's score over its learning rate."""
        line = {"schema_version": SCHEMA_VERSION, **finite(record)}
        append_json_line(self.paths.rounds, line)
        scalars = {
            f"round/candidate_{candidate['index']}/{key}": candidate.get(key)
            for candidate in line["candidates"]
            for key in _OF_A_CANDIDATE
        }
        self._events.scalars(step, {**scalars, "round/next_base_lr": line.get("next_base_lr")})

    def epoch(self, record: EpochRecord, step: int) -> None:
        """A line of epochs.jsonl, and the same as scalars."""
        line = {"schema_version": SCHEMA_VERSION, **finite(vars(record))}
        append_json_line(self.paths.epochs, line)
        names = ("lr", "train_loss", "train_accuracy", "test_loss", "test_accuracy", "test_top5")
        scalars = {f"epoch/{name}": line[name] for name in (*names, "samples_per_s")}
        if line["noise_scale"] is not None:
            scalars["epoch/noise_scale"] = line["noise_scale"]["value"]
        if line["staleness"] is not None:
            scalars["epoch/staleness"] = line["staleness"]["mean"]
        self._events.scalars(step, scalars)

    def timeline(self, epoch: int, spans: Sequence[Span], began_s: float) -> None:
        """Lines of timeline.jsonl; their times count from `began_s` of the spans' clock."""
        lines = [
            {"schema_version": SCHEMA_VERSION, "epoch": epoch, **finite(vars(span))}
            | {"at_s": span.at_s - began_s}
            for span in spans
        ]
        append_json_lines(self.paths.timeline, lines)

    def event(self, epoch: int, event: Event, began_s: float) -> None:
        """A line of events.jsonl. Resuming forgets none: they tell what happened."""
        line = {"schema_version": SCHEMA_VERSION, "utc": utc_now(), "epoch": epoch}
        line |= finite(vars(event)) | {"at_s": event.at_s - began_s}
        append_json_line(self.paths.events, line)

    def told_s(self) -> float:
        """Until when the timeline is written, in seconds of the run; 0 when it is empty."""
        if not self.paths.timeline.exists():
            return 0.0
        lines = self.paths.timeline.read_text(encoding="utf-8").splitlines()
        ends = [at["at_s"] + at["seconds"] for at in map(json.loads, lines)]
        return max(ends, default=0.0)

    def forget_after(self, rounds: int, epochs: int) -> None:
        """Keep as many lines; a resumed run writes again what came after its last commit."""
        for path, count in ((self.paths.rounds, rounds), (self.paths.epochs, epochs)):
            if path.exists():
                lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
                # A line without an end was cut off when the run died.
                whole = [line for line in lines if line.endswith("\n")]
                write_text(path, "".join(whole[:count]))
        self._forget_spans_after(epochs)

    def _forget_spans_after(self, epochs: int) -> None:
        path = self.paths.timeline
        if path.exists():
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            whole = [line for line in lines if line.endswith("\n")]
            kept = [line for line in whole if json.loads(line)["epoch"] <= epochs]
            write_text(path, "".join(kept))

    def result(self, record: Mapping[str, Any]) -> None:
        """result.json."""
        line = {"schema_version": SCHEMA_VERSION, "finished_utc": utc_now(), **finite(record)}
        write_json(self.paths.result, line)

    def close(self) -> None:
        """End the file of events."""
        self._events.close()


def finite(value: Any) -> Any:
    """JSON has no infinity: it becomes null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def versions() -> dict[str, str]:
    """Of what decides the numbers."""
    packages = ("raytrain_opt", "ray", "torch", "torchvision", "numpy")
    found = {name: version(name) for name in packages}
    return {"python": platform.python_version(), **found}
