"""A pipeline of Ray Data as the data of a job, named by jobs/ray_data.yaml."""

from __future__ import annotations

from typing import Any

import numpy as np
import ray.data

from raytrain_opt.data.in_memory_sets import read_digits


def make_datasets(test_every: int) -> tuple[ray.data.Dataset, ray.data.Dataset]:
    """Return (train, test), whose rows are digits; called in the driver with `data.args`."""
    images, labels = read_digits()
    rows = [
        {"image": image / np.float32(255), "label": label}
        for image, label in zip(images, labels, strict=True)
    ]
    train = [row for i, row in enumerate(rows) if i % test_every]
    return pipeline(train), pipeline(rows[::test_every])


def pipeline(rows: list[dict[str, Any]]) -> ray.data.Dataset:
    """Return the rows in four blocks, which Ray Data prepares in parallel."""
    return ray.data.from_items(rows, override_num_blocks=4).map_batches(to_gray)


def to_gray(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the images as uint8; Ray Data runs it on all nodes."""
    return {**batch, "image": np.rint(batch["image"] * 255).astype(np.uint8)}
