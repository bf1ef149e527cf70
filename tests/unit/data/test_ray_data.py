"""Ray Datasets, played by an object with their methods: what is read, in which order."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from raytrain_opt.config.data import HoldOut, RayData
from raytrain_opt.data import TrainingData, load_shared_data, open_data
from raytrain_opt.errors import DataError

ROWS, WINDOW, GLOBAL_BATCH_SIZE = 50, 8, 10


@dataclass
class FakeDataset:
    """Columns in memory; counts the rows that each pass reads."""

    columns_: dict[str, Any]
    passes: list[int] = field(default_factory=list)
    context: Any = field(
        default_factory=lambda: SimpleNamespace(
            execution_options=SimpleNamespace(preserve_order=False)
        )
    )

    def columns(self) -> list[str]:
        return list(self.columns_)

    def count(self) -> int:
        return len(next(iter(self.columns_.values())))

    def select_columns(self, names: list[str]) -> FakeDataset:
        columns = {name: self.columns_[name] for name in names}
        return FakeDataset(columns, self.passes, self.context)

    def materialize(self) -> FakeDataset:
        assert self.context.execution_options.preserve_order
        return self

    def iter_torch_batches(
        self, *, batch_size: int | None, device: str
    ) -> Iterator[dict[str, torch.Tensor]]:
        assert device == "cpu"
        number = len(self.passes)
        self.passes.append(0)
        size = batch_size or self.count() or 1
        for start in range(0, self.count(), size):
            columns = {k: v[start : start + size] for k, v in self.columns_.items()}
            self.passes[number] += len(next(iter(columns.values())))
            yield {name: torch.as_tensor(values) for name, values in columns.items()}


def numbered(rows: int = ROWS, **columns: Any) -> FakeDataset:
    """Return floats [rows, 2] that are their row's number, and labels of two classes."""
    numbers = np.arange(rows, dtype=np.float64)
    x = np.stack([numbers, numbers], 1)
    return FakeDataset({"image": x, "label": np.arange(rows) % 2, "path": ["?"] * rows} | columns)


def section(train: Any = None, test: Any = None, **fields: Any) -> RayData:
    train, test = train or numbered(), test or numbered(10)
    return RayData(name="ray_data", function=lambda: (train, test), **fields)


def opened(part: RayData, hold_out: float = 0.0) -> TrainingData:
    shared = pickle.loads(pickle.dumps(load_shared_data(part)))  # as each process gets it
    return open_data(
        part,
        shared,
        hold_out=HoldOut(hold_out),
        seed=0,
        device=torch.device("cpu"),
        channels_last=False,
    )


def epoch_rows(data: TrainingData, epoch: int, parts: int, first_step: int = 0) -> list[int]:
    """Return the rows of an epoch, in the order of its steps and micro-batches."""
    steps = range(first_step, data.info.steps_per_epoch(GLOBAL_BATCH_SIZE))
    indices = product(steps, range(parts))
    batches = data.train_batches(epoch, indices, parts, GLOBAL_BATCH_SIZE)
    return [int(row) for batch in batches for row in batch.x[:, 0]]


def test_every_row_comes_once_whatever_the_number_of_workers() -> None:
    data = opened(section(shuffle_rows=WINDOW))
    rows = epoch_rows(data, 1, 1)
    assert sorted(rows) == list(range(ROWS))
    assert rows == epoch_rows(data, 1, 5) != epoch_rows(data, 2, 1)
    windows = [row // WINDOW for row in rows]
    assert windows == sorted(windows)
    assert rows[:WINDOW] != sorted(rows[:WINDOW])


def test_a_resume_within_an_epoch_reads_the_rest() -> None:
    part = section(shuffle_rows=WINDOW)
    assert epoch_rows(opened(part), 3, 2, first_step=2) == epoch_rows(opened(part), 3, 2)[20:]


def test_one_pass_for_an_epoch_with_validations_between_its_phases() -> None:
    train = numbered()
    shared = load_shared_data(section(train, shuffle_rows=WINDOW))
    data = open_data(
        section(train, shuffle_rows=WINDOW),
        shared,
        hold_out=HoldOut(0.1),
        seed=0,
        device=torch.device("cpu"),
        channels_last=False,
    )
    del train.passes[:]
    held_out: set[int] = set()
    trained: list[int] = []
    for step in range(data.info.steps_per_epoch(GLOBAL_BATCH_SIZE)):
        for batch in data.train_batches(1, [(step, 0)], 1, GLOBAL_BATCH_SIZE):
            trained += batch.x[:, 0].int().tolist()
        for batch in data.eval_batches("validation", 0, 1, 3):
            held_out |= set(batch.x[:, 0].int().tolist())
    assert len(held_out) == 5
    assert max(held_out) < WINDOW  # a small split is read from one window
    assert not held_out & set(trained)
    assert len(set(trained)) == len(trained) == 40
    assert sorted(train.passes) == [WINDOW, 48]


def test_uint8_images_are_scaled_and_augmented_like_those_in_memory() -> None:
    images = np.random.default_rng(0).integers(0, 256, (ROWS, 4, 4, 3), dtype=np.uint8)
    augment = {"crop_padding": 1, "flip": True}
    train, test = numbered(image=images), numbered(10, image=images[:10])
    data = opened(section(train, test, augment=augment))
    assert (data.info.sample_shape, data.info.class_counts) == ((3, 4, 4), (25, 25))
    (batch,) = data.train_batches(1, [(0, 0)], 1, GLOBAL_BATCH_SIZE)
    assert batch.x.shape == (10, 3, 4, 4)
    tests = torch.cat([batch.x for batch in data.eval_batches("test", 0, 1, 4)])
    assert data.info.preprocessing is not None
    assert data.info.preprocessing.mean_std is not None
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in data.info.preprocessing.mean_std)
    expected = (torch.from_numpy(images[:10]).permute(0, 3, 1, 2) / 255 - mean) / std
    torch.testing.assert_close(tests, expected)


def test_a_balanced_epoch_stays_within_the_windows() -> None:
    labels = (np.arange(ROWS) % 10 == 0).astype(np.int64)
    data = opened(section(numbered(label=labels), shuffle_rows=WINDOW, sampler="balanced"))
    rows = epoch_rows(data, 1, 1)
    assert sum(labels[rows]) == ROWS // 2
    assert [row // WINDOW for row in rows] == sorted(row // WINDOW for row in rows)


RAGGED = np.r_[np.zeros((ROWS - 1, 2)), [[0.0, np.nan]]]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (section(train=[1]), "data.function: the train set must be a ray.data.Dataset, not list"),
        (section(columns=("x", "label")), "data.columns.0: .*no column 'x'; it has image, label"),
        (section(columns=("image", "y")), "data.columns.1: the train set has no column 'y'"),
        (section(columns=("image", "path")), "data.columns.1: .*cannot be read as tensors"),
        (section(columns=("label", "label")), r"data.columns.0: .*has shape \(1,\)"),
        (section(test=numbered(0)), "data.columns.1: column 'label' of the test .*has no samples"),
        (section(num_classes=1), r"data.columns.1: .*labels outside 0 to 0"),
        (section(test=numbered(image=np.zeros((ROWS, 3)))), "data.columns.0: .*must be the same"),
        (section(numbered(image=RAGGED)), "data.columns.0: .*1 values that are not finite"),
    ],
)
def test_what_breaks_the_contract_is_named(part: RayData, message: str) -> None:
    with pytest.raises(DataError, match=re.compile(message)):
        epoch_rows(opened(part), 1, 1)


def test_an_error_of_the_pipeline_names_the_function() -> None:
    class Broken(FakeDataset):
        def materialize(self) -> FakeDataset:
            raise OSError("no such bucket")

        def select_columns(self, names: list[str]) -> FakeDataset:
            return self

    broken = Broken(numbered().columns_)
    with pytest.raises(DataError, match="data.function: the train set raised OSError: no such"):
        load_shared_data(section(broken))
