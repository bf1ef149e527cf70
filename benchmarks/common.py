"""What several benchmarks need: where they ran, and images that nobody has to download."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


def machine() -> dict[str, object]:
    """Processor and cores of this host; the GPU's name when there is one."""
    import torch

    names = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    cpu = {"cpu": names[0] if names else "unknown", "cores": len(os.sched_getaffinity(0))}
    return {**cpu, "gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else cpu


def made_up_images(
    samples: int, shape: tuple[int, ...], classes: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[Any]]:
    """uint8 images [samples, *shape] and labels: noise around a pattern per class, so that
    training behaves as usual.
    """
    random = np.random.default_rng(0)
    labels = random.integers(0, classes, samples)
    patterns = random.integers(64, 192, (classes, *shape))
    noise = random.normal(0, 48, (samples, *shape))
    return np.clip(patterns[labels] + noise, 0, 255).astype(np.uint8), labels
