"""Shares of any steps in any order are those that the step's workers would get."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from raytrain_opt import Job
from raytrain_opt.data import TrainingData, load_shared, open_data

BATCH, SHARES = 12, 3
PLACES = [(4, 2), (0, 0), (4, 1), (7, 0), (0, 0)]
AUGMENT = {"crop_padding": 1, "flip": True}


def numbers() -> tuple[TensorDataset, TensorDataset]:
    """A user's function: samples that are their own numbers."""
    x = torch.arange(200.0).reshape(200, 1)
    return TensorDataset(x, torch.arange(200) % 2), TensorDataset(x[:9], torch.arange(9) % 2)


def opened(section: Any) -> TrainingData:
    values = {"model": "small_cnn", "epochs": 1, "global_batch_size": BATCH}
    job = Job.model_validate({**values, "data": section})
    shared, cpu = load_shared(job.data), torch.device("cpu")
    return open_data(job.data, shared, seed=5, device=cpu, channels_last=False)


@pytest.fixture(params=["digits", "read in the process", "read by two processes"])
def data(request: pytest.FixtureRequest) -> Iterator[TrainingData]:
    own = {"name": numbers, "num_classes": 2, "normalize": "none"}
    sections: dict[str, Any] = {
        "digits": {"name": "digits", "augment": AUGMENT},
        "read in the process": {**own, "loader_workers": 0},
        "read by two processes": {**own, "loader_workers": 2},
    }
    opened_data = opened(sections[request.param])
    yield opened_data
    opened_data.close()


def test_places_in_any_order(data: TrainingData) -> None:
    found = list(data.train_places(2, PLACES, SHARES, BATCH))
    assert len(found) == len(PLACES)
    for (step, share), batch in zip(PLACES, found, strict=True):
        [expected] = data.train(2, range(step, step + 1), range(share, share + 1), SHARES, BATCH)
        assert torch.equal(batch.x, expected.x)
        assert torch.equal(batch.y, expected.y)


def test_no_places_are_no_batches(data: TrainingData) -> None:
    assert list(data.train_places(1, [], SHARES, BATCH)) == []
    assert len(list(data.train_places(1, PLACES, SHARES, BATCH))) == len(PLACES)
