"""The machine a benchmark ran on, synthetic images, and what must not depend on a failure."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from raytrain_opt import storage
from raytrain_opt.paths import RunPaths

JOBS = Path(__file__).parents[1] / "jobs"
# Keys of records that differ between executions of the same run.
_OF_EXECUTION = re.compile(r".*_s|.*_utc|run_dir|hardware|restarts|parallel")


def machine() -> dict[str, object]:
    """Return this machine's processor and cores, and the name of its GPU if it has one."""
    import torch

    names = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    cpu = {"cpu": names[0] if names else "unknown", "cores": len(os.sched_getaffinity(0))}
    return {**cpu, "gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else cpu


def synthetic_images(
    samples: int, shape: tuple[int, ...], classes: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[Any]]:
    """Return uint8 images [samples, *shape] and labels.

    Noise around a pattern for each class, so that training behaves as usual.
    """
    random = np.random.default_rng(0)
    labels = random.integers(0, classes, samples)
    patterns = random.integers(64, 192, (classes, *shape))
    noise = random.normal(0, 48, (samples, *shape))
    return np.clip(patterns[labels] + noise, 0, 255).astype(np.uint8), labels


def finite(value: Any) -> Any:
    """Replace numbers that are not finite by None, in nested containers too: JSON has none."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def run_digest(run_dir: str, records: Sequence[str]) -> str:
    """Return a digest of the last state of a run and of these records, without times."""
    from raytrain_opt.train.checkpoint import read_checkpoint, read_index

    folder = RunPaths.existing(run_dir, write=False).checkpoints
    state, *_ = read_checkpoint(folder / read_index(folder)[-1].folder)
    digest = hashlib.sha256(f"{state.digest()} {replace(state, tensors={})}".encode())
    for name in records:
        text = (storage.read(run_dir, name) or b"").decode()
        for line in text.splitlines() if name.endswith(".jsonl") else [text]:
            digest.update(json.dumps(_without_times(json.loads(line))).encode())
    return digest.hexdigest()


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if not _OF_EXECUTION.fullmatch(key)}
        return {key: _without_times(item) for key, item in kept.items()}
    return [_without_times(item) for item in value] if isinstance(value, list) else value
