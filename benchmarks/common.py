"""The machine a benchmark ran on, and synthetic images that need no download."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

JOBS = Path(__file__).parents[1] / "jobs"


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
