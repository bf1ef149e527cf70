"""`train_batches` yields any micro-batches in any order, equal to those that come alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from raytrain_opt import Job
from raytrain_opt.data import TrainingData, load_shared_data, open_data

BATCH_SIZE, MICRO_BATCHES = 12, 3
INDICES = [(4, 2), (0, 0), (4, 1), (7, 0), (0, 0)]
AUGMENT = {"crop_padding": 1, "flip": True}
EVERYTHING = {
    "policy": "rand_augment",
    "random_erasing": 0.5,
    "mixup": 0.5,
    "cutmix": 1.0,
}


def numbers() -> tuple[TensorDataset, TensorDataset]:
    """Return a user's Datasets, whose samples are their own indices."""
    x = torch.arange(200.0).reshape(200, 1)
    return TensorDataset(x, torch.arange(200) % 2), TensorDataset(x[:9], torch.arange(9) % 2)


def images() -> tuple[TensorDataset, TensorDataset]:
    x = torch.arange(200 * 3 * 64).reshape(200, 3, 8, 8).to(torch.uint8)
    return TensorDataset(x, torch.arange(200) % 2), TensorDataset(x[:9], torch.arange(9) % 2)


def open_section(section: Any) -> TrainingData:
    values = {"model": "small_cnn", "epochs": 1, "global_batch_size": BATCH_SIZE}
    job = Job.model_validate({**values, "data": section})
    shared, cpu = load_shared_data(job.data), torch.device("cpu")
    return open_data(
        job.data, shared, hold_out=job.hold_out, seed=5, device=cpu, channels_last=False
    )


KINDS = ["in memory", "no loader process", "two loader processes"]


@pytest.fixture(params=[*KINDS, *(f"{kind}, augmented" for kind in KINDS)])
def data(request: pytest.FixtureRequest) -> Iterator[TrainingData]:
    user = {"name": numbers, "num_classes": 2, "normalize": "none"}
    augmented = {**user, "name": images, "augment": EVERYTHING}
    sections: dict[str, Any] = {
        "in memory, augmented": {"name": "digits", "augment": {**AUGMENT, **EVERYTHING}},
        "no loader process, augmented": {**augmented, "loader_workers": 0},
        "two loader processes, augmented": {**augmented, "loader_workers": 2},
        "in memory": {"name": "digits", "augment": AUGMENT},
        "no loader process": {**user, "loader_workers": 0},
        "two loader processes": {**user, "loader_workers": 2},
    }
    training_data = open_section(sections[request.param])
    yield training_data
    training_data.close()


def test_micro_batches_in_any_order(data: TrainingData) -> None:
    batches = list(data.train_batches(2, INDICES, MICRO_BATCHES, BATCH_SIZE))
    assert len(batches) == len(INDICES)
    for (step, number), batch in zip(INDICES, batches, strict=True):
        [expected] = data.train_batches(2, [(step, number)], MICRO_BATCHES, BATCH_SIZE)
        assert torch.equal(batch.x, expected.x)
        assert torch.equal(batch.y, expected.y)
        assert batch.weight == expected.weight
        if batch.other_y is not None and expected.other_y is not None:
            assert torch.equal(batch.other_y, expected.other_y)


def test_no_indices_yield_no_batches(data: TrainingData) -> None:
    assert list(data.train_batches(1, [], MICRO_BATCHES, BATCH_SIZE)) == []
    batches = list(data.train_batches(1, INDICES, MICRO_BATCHES, BATCH_SIZE))
    assert len(batches) == len(INDICES)
