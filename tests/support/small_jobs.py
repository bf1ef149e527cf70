"""For the tests that run whole jobs: a small job, its records, and code as a user brings it.

On the import path of the tests and of the Ray processes they start.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raytrain_opt import Job


def small_job(folder: Path, **changes: Any) -> Job:
    """Digits, two workers, two candidates in two slots, three epochs."""
    values = {
        "name": "test",
        "model": {"name": "small_cnn", "args": {"width": 8}},
        "data": "digits",
        "epochs": 3,
        "global_batch_size": 64,
        "learning_rate": {
            "policy": "stpt",
            "initial": 0.1,
            "candidates": [1.0, 0.5],
            "alpha": 5,
        },
        "workers": {"count": 2, "threads": 1},
        "slots": {"count": 2},
        "storage_path": str(folder),
    }
    return Job.model_validate(values | changes)


def read_lines(run_dir: str, name: str) -> list[dict[str, Any]]:
    """A record of JSON lines."""
    text = (Path(run_dir) / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def without_times(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The numbers of rounds.jsonl that must not depend on the clock."""
    for line in rounds:
        del line["parts_s"]
        for candidate in line["candidates"]:
            del candidate["seconds"]
    return rounds


class _BreaksInTraining(nn.Module):
    """Can be built and checked, but not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Any:
        if self.training:
            raise ValueError("planted failure")
        return self.linear(x.flatten(1))


def make_breaking_model() -> nn.Module:
    """A user's model function."""
    return _BreaksInTraining()


class _FitsSixteen(nn.Module):
    """Says that memory is out as CUDA does, for batches above 16 in training."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Any:
        if self.training and len(x) > 16:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return self.linear(x.flatten(1))


def make_model_for_16_samples() -> nn.Module:
    """A user's model function."""
    return _FitsSixteen()
