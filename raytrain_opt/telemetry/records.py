"""What a run writes down: a line per round and per epoch, TensorBoard events, the schedule."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from raytrain_opt.clock import utc_now
from raytrain_opt.paths import RunPaths, append_json_line, write_json, write_text

SCHEMA_VERSION = 1


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
        from tensorboardX import SummaryWriter

        self.paths = paths
        self._events = SummaryWriter(logdir=str(paths.tensorboard))

    def round(self, record: Mapping[str, Any], step: int) -> None:
        """A line of rounds.jsonl, and every candidate's score over its learning rate."""
        line = {"schema_version": SCHEMA_VERSION, **finite(record)}
        append_json_line(self.paths.rounds, line)
        for candidate in line["candidates"]:
            name = f"round/candidate_{candidate['index']}"
            scalars = {f"{name}/{key}": candidate[key] for key in ("lr", "score")}
            self._scalars(step, scalars)

    def epoch(self, record: EpochRecord, step: int) -> None:
        """A line of epochs.jsonl, and the same as scalars."""
        line = {"schema_version": SCHEMA_VERSION, **finite(vars(record))}
        append_json_line(self.paths.epochs, line)
        names = ("lr", "train_loss", "train_accuracy", "test_loss", "test_accuracy", "test_top5")
        self._scalars(step, {f"epoch/{name}": line[name] for name in names})
        self._scalars(step, {"epoch/samples_per_s": record.samples_per_s})
        if line["noise_scale"] is not None:
            self._scalars(step, {"epoch/noise_scale": line["noise_scale"]["value"]})
        if line["staleness"] is not None:
            self._scalars(step, {"epoch/staleness": line["staleness"]["mean"]})

    def forget_after(self, rounds: int, epochs: int) -> None:
        """Keep as many lines; a resumed run writes again what came after its last commit."""
        for path, count in ((self.paths.rounds, rounds), (self.paths.epochs, epochs)):
            if path.exists():
                lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
                # A line without an end was cut off when the run died.
                whole = [line for line in lines if line.endswith("\n")]
                write_text(path, "".join(whole[:count]))

    def result(self, record: Mapping[str, Any]) -> None:
        """result.json."""
        line = {"schema_version": SCHEMA_VERSION, "finished_utc": utc_now(), **finite(record)}
        write_json(self.paths.result, line)

    def _scalars(self, step: int, values: Mapping[str, float | None]) -> None:
        for name, value in values.items():
            if value is not None:
                self._events.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush the events."""
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
