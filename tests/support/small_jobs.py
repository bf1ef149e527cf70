"""A small job for tests that run jobs, readers of its records, and a user's model functions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raytrain_opt import Job, load_job
from raytrain_opt.models.networks import small_cnn

# Of the quickstart in tests: enough to learn.
EPOCHS = 5
QUICKSTART = Path(__file__).parents[2] / "jobs" / "quickstart.yaml"


def small_job(folder: Path, **changes: Any) -> Job:
    """Return a job: digits, three epochs, two workers, two candidates in two slots."""
    values = {
        "name": "test",
        "model": {"name": "small_cnn", "args": {"width": 8}},
        "data": "digits",
        "epochs": 3,
        "global_batch_size": 64,
        "learning_rate": {"policy": "stpt", "initial": 0.1, "candidates": [1.0, 0.5], "alpha": 5},
        "workers": {"count": 2, "threads": 1},
        "slots": {"count": 2},
        "storage_path": str(folder),
    }
    return Job.model_validate(values | changes)


def quickstart(storage: str, **changes: Any) -> Job:
    """Return the job of a shorter quickstart, one thread per process on any machine."""
    values = load_job(QUICKSTART).model_dump(exclude_unset=True)
    short = {"epochs": EPOCHS, "workers": {**values["workers"], "threads": 1}}
    return Job.model_validate(values | short | {"storage_path": storage} | changes)


def read_lines(run_dir: str, name: str) -> list[dict[str, Any]]:
    """Return the lines of a record of JSON lines."""
    text = (Path(run_dir) / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def without_times(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Remove the times from lines of rounds.jsonl, in place, and return them."""
    for line in rounds:
        del line["timings_s"]
        for candidate in line["candidates"]:
            del candidate["duration_s"]
    return rounds


class _OutOfMemoryAbove16(nn.Module):
    """A model that raises CUDA's out-of-memory error in training with more than 16 samples."""

    def __init__(self) -> None:
        super().__init__()
        self.network = small_cnn(num_classes=10, sample_shape=(1, 8, 8))

    def forward(self, x: Tensor) -> Any:
        if self.training and len(x) > 16:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return self.network(x)


def make_model_for_16_samples() -> nn.Module:
    """Return a model that trains with at most 16 samples, as a user's function."""
    return _OutOfMemoryAbove16()
