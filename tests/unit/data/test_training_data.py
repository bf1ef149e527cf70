"""What every kind of training data must do: micro-batches, splits, ranks, errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from raytrain_opt import Job
from raytrain_opt.config.data import HoldOut
from raytrain_opt.data import TrainingData, load_shared_data, open_data
from raytrain_opt.data.base import Batch
from raytrain_opt.errors import DataError

BATCH_SIZE, MICRO_BATCHES = 12, 3
INDICES = [(4, 2), (0, 0), (4, 1), (7, 0), (0, 0)]
AUGMENT = {"crop_padding": 1, "flip": True}
EVERYTHING = {"policy": "rand_augment", "mixup": 0.5, "cutmix": 1.0}


def numbers() -> tuple[TensorDataset, TensorDataset]:
    """Return a user's Datasets, whose samples are their own indices."""
    x = torch.arange(200.0).reshape(200, 1)
    return TensorDataset(x, torch.arange(200) % 2), TensorDataset(x[:9], torch.arange(9) % 2)


def images() -> tuple[TensorDataset, TensorDataset]:
    x = torch.arange(200 * 3 * 64).reshape(200, 3, 8, 8).to(torch.uint8)
    return TensorDataset(x, torch.arange(200) % 2), TensorDataset(x[:9], torch.arange(9) % 2)


def open_section(section: Any, hold_out: HoldOut | None = None, seed: int = 5) -> TrainingData:
    values = {"model": "small_cnn", "epochs": 1, "global_batch_size": BATCH_SIZE}
    job = Job.model_validate({**values, "data": section})
    shared, cpu = load_shared_data(job.data), torch.device("cpu")
    return open_data(
        job.data,
        shared,
        hold_out=hold_out or job.hold_out,
        seed=seed,
        device=cpu,
        channels_last=False,
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


Open = Callable[..., TrainingData]
SIZE, TEST_SIZE = 200, 9


@pytest.fixture(params=KINDS)
def open_numbers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Open samples that are their own indices, of one kind of data."""
    section: dict[str, Any] = {"name": numbers, "num_classes": 2, "normalize": "none"}
    section["loader_workers"] = 2 * (request.param == "two loader processes")
    if request.param == "in memory":
        section = {"name": "arrays", "normalize": "none"}
        for split, dataset in zip(("train", "test"), numbers(), strict=True):
            section[split] = [f"{tmp_path}/{split}_{name}.npy" for name in "xy"]
            for path, tensor in zip(section[split], dataset.tensors, strict=True):
                np.save(path, tensor.numpy())
    opened = []

    def open_with(
        fraction: float = 0.1, seed: int = 5, drop_last: bool = True, **hold_out: bool
    ) -> TrainingData:
        settings = section | {"drop_last": drop_last}
        opened.append(open_section(settings, HoldOut(fraction, **hold_out), seed))
        return opened[-1]

    yield open_with
    for training_data in opened:
        training_data.close()


def samples(batches: Iterator[Batch]) -> list[int]:
    return [int(x) for batch in batches for x in batch.x[:, 0]]


def epoch(data: TrainingData, number: int = 1, parts: int = 1, size: int = 12) -> list[int]:
    indices = product(range(data.info.train_size // size), range(parts))
    return samples(data.train_batches(number, indices, parts, size))


def test_an_epoch_has_every_training_sample_once_in_an_order_of_its_own(
    open_numbers: Open,
) -> None:
    data = open_numbers()
    info = data.info
    assert (info.train_size, info.validation_size, info.test_size) == (180, 20, TEST_SIZE)
    first, second = epoch(data, 1), epoch(data, 2)
    assert sorted(first) == sorted(second)
    assert sorted([*first, *samples(data.eval_batches("validation", 0, 1, 8))]) == [*range(SIZE)]
    assert first == epoch(data, 1, parts=3) == epoch(data, 1, parts=4)
    assert first not in (second, epoch(open_numbers(seed=6), 1))
    assert list(data.train_batches(1, [], 1, 12)) == []


def test_a_split_held_out_in_the_search_only_joins_the_training(open_numbers: Open) -> None:
    data, searched = open_numbers(only_in_search=True), open_numbers()
    info = data.info
    assert (info.train_size, info.validation_size) == (SIZE, 20)
    validation = set(samples(data.eval_batches("validation", 0, 1, 5)))
    steps = [*product(range(15), range(1))]
    in_search = samples(data.train_batches(2, steps, 1, 12, search=True))
    assert in_search == samples(searched.train_batches(2, steps, 1, 12))
    assert not set(in_search) & validation
    of_all = samples(data.train_batches(2, [(0, 0)], 1, 190, search=True))
    assert sorted(of_all) == sorted(in_search)
    later = [(n, 0) for n in range(10, 16)]  # after 10 of 17 samples, in the order of epoch 3
    following = samples(searched.train_batches(3, [(n, 0) for n in range(6)], 1, 17))
    assert samples(data.train_batches(2, later, 1, 17, search=True)) == following
    for only_in_search, size in ((True, 50), (False, 30)):  # of 180, in updates of 50
        smaller = open_numbers(drop_last=False, only_in_search=only_in_search)
        assert len(samples(smaller.train_batches(1, [(3, 0)], 1, 50, search=True))) == size
    whole = samples(data.train_batches(2, [(0, 0)], 1, SIZE))
    assert sorted(whole) == [*range(SIZE)]
    held_out = samples(data.train_batches(2, [(0, 0)], 1, SIZE, held_out=20))
    assert not set(held_out) & validation
    assert sum(a != b for a, b in zip(whole, held_out, strict=True)) == 20


def test_without_a_validation_split_it_cannot_be_evaluated(open_numbers: Open) -> None:
    data = open_numbers(0.0)
    assert (data.info.train_size, data.info.validation_size) == (SIZE, 0)
    with pytest.raises(DataError, match=r"data\.validation_fraction"):
        next(data.eval_batches("validation", 0, 1, 4))
