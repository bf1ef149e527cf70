"""Batches by a function of the user's own: texts of unequal length, sorted, resumed."""

from __future__ import annotations

from collections import UserDict
from contextlib import closing
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from raytrain_opt import run
from raytrain_opt.config.data import DatasetData, HoldOut
from raytrain_opt.config.load import load_job, parse_job
from raytrain_opt.data import sampling
from raytrain_opt.data.loader import DataLoaderData
from raytrain_opt.data.user_datasets import UserDatasetSource
from raytrain_opt.errors import DataError, JobError
from tests.support.documents import DOCS, example
from tests.support.small_jobs import read_lines, small_job, without_times

LENGTHS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


class Texts(torch.utils.data.Dataset[dict[str, Any]]):
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"ids": torch.full([LENGTHS[index]], index + 1), "name": f"text {index}"}


def pad(samples: list[dict[str, Any]]) -> UserDict[str, Any]:
    """As transformers does, return a mapping that is no dict."""
    ids = pad_sequence([sample["ids"] for sample in samples], batch_first=True)
    names = [sample["name"] for sample in samples]
    weights = np.ones(len(samples))
    return UserDict(ids=ids, names=names, weights=weights)


def open_texts(classification: bool = False, **changes: Any) -> DataLoaderData:
    attributes = changes.pop("attributes", {})
    pair = (Texts(**attributes), Texts())
    section = DatasetData.model_validate(
        {"name": lambda: pair, "loader_workers": 0, "collate": pad} | changes
    )
    device = torch.device("cpu")
    source = UserDatasetSource(section, 0, classification=classification)
    return DataLoaderData(source, section, HoldOut(0), 0, device, True)


@pytest.mark.parametrize("loader_workers", [0, 2])
@pytest.mark.parametrize("by_attribute", [False, True])
def test_each_micro_batch_is_padded_to_its_own_longest_sample(
    loader_workers: int, by_attribute: bool
) -> None:
    changes = {"collate": None, "attributes": {"collate_fn": pad}} if by_attribute else {}
    with closing(open_texts(loader_workers=loader_workers, **changes)) as data:
        batches = list(data.train_batches(1, product(range(3), range(2)), 2, 4))
        indices = [index for batch in batches for index in batch.x["ids"][:, 0].tolist()]
        assert sorted(indices) == list(range(1, 13))
        for batch in batches:
            ids, numbers = batch.x["ids"], batch.x["ids"][:, 0] - 1
            assert ids.shape == (2, max(LENGTHS[number] for number in numbers))
            assert batch.x["names"] == tuple(f"text {number}" for number in numbers)
            assert (batch.size, batch.x["weights"].dtype) == (2, torch.float32)
        tests = list(data.eval_batches("test", 0, 1, 5))
        assert [batch.x["ids"].shape for batch in tests] == [(5, 5), (5, 9), (2, 8)]
    assert [data.first_samples("train", count).size for count in (1, 2)] == [1, 2]


def test_batches_by_length_have_each_sample_once_and_little_padding() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 1003)
    order = np.random.default_rng(1).permutation(1003)
    grouped, other = (
        sampling.group_by_length(order, lengths, 25, 10, np.random.default_rng(seed))
        for seed in (2, 3)
    )
    assert sorted(grouped) == list(range(1003))
    np.testing.assert_array_equal(grouped[-3:], order[-3:])
    full = lengths[grouped[:1000]].reshape(-1, 10)
    assert np.mean(full.max(1) - full.min(1)) < 6  # of unsorted ones: 81
    assert abs(np.corrcoef(full.mean(1), np.arange(100))[0, 1]) < 0.3
    assert not np.array_equal(grouped, other)
    for window in range(4):  # samples stay in their window, up to the order of batches
        samples = {*order[window * 250 : (window + 1) * 250]}
        assert sum(batch <= samples for batch in map(set, grouped[:1000].reshape(-1, 10))) == 25


def test_lengths_come_from_the_training_dataset() -> None:
    with closing(open_texts(group_by_length=9, attributes={"lengths": LENGTHS})) as data:
        batches = data.train_batches(1, product(range(3), range(1)), 1, 4)
        assert sorted(batch.x["ids"].shape[1] for batch in batches) == [3, 5, 9]
    with pytest.raises(DataError, match=r"group_by_length: needs `lengths` .* each of its 12"):
        open_texts(group_by_length=9, attributes={"lengths": [1]})


def broken(_: Any) -> Any:
    raise KeyError("ids")


@pytest.mark.parametrize(
    ("collate", "classification", "message"),
    [
        (broken, False, r"raised KeyError: 'ids' \(at .*a list of 1 samples \(dict\)"),
        (lambda _: ["a"], False, "must return tensors"),
        (pad, True, r"must return \(x, y\).*it returned \{ids: torch.int64 \[1, 3\]"),
        (
            lambda s: (torch.ones(len(s), 2), torch.full([len(s)], 2)),
            True,
            "class numbers .* below 2 ",
        ),
    ],
)
def test_a_function_that_makes_no_batch_is_named(
    collate: Any, classification: bool, message: str
) -> None:
    with pytest.raises(DataError, match=f"data.collate: .*{message}"):
        open_texts(classification, collate=collate, num_classes=2)


def reverse(samples: Any, epoch: int, random: np.random.Generator) -> Any:
    assert random.random() < 1
    return samples[::-1] if epoch == 1 else samples[:1].repeat(len(samples))


def test_a_sampler_of_ones_own_chooses_and_orders_the_samples() -> None:
    with closing(open_texts(sampler=reverse)) as data:
        for epoch, expected in ((1, [12, 11, 10, 9]), (2, [1, 1, 1, 1])):
            [batch] = data.train_batches(epoch, [(0, 0)], 1, 4)
            assert batch.x["ids"][:, 0].tolist() == expected


@pytest.mark.parametrize("wrong", [lambda s, *_: s[1:], lambda s, *_: s + 1, lambda s, *_: s / 1])
def test_a_sampler_that_returns_other_samples_is_refused(wrong: Any) -> None:
    data = open_texts(sampler=wrong)
    with pytest.raises(DataError, match="must return 12 of the samples"):
        next(iter(data.train_batches(1, [(0, 0)], 1, 4)))


def test_samplers_are_names_or_functions(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"data\.sampler: must be random, balanced or package"):
        small_job(tmp_path, data={"name": "digits", "sampler": "weighted"})
    job = small_job(tmp_path, data={"name": "digits", "sampler": "texts:draw"})
    assert ("data.sampler", "texts:draw") in job.functions


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return example("own-model-and-data.md", "pad_sequence", tmp_path, monkeypatch, "texts")


@pytest.mark.usefixtures("without_plots", "texts")
def test_the_documented_texts_are_searched_trained_and_resumed_bit_for_bit(tmp_path: Path) -> None:
    document = (DOCS / "own-model-and-data.md").read_text(encoding="utf-8")
    _, rest = document.split('collate: "texts:pad"')
    start = document.index("model: texts:Classifier")
    yaml = document[start : document.index("```", start)]
    assert rest
    stpt = {"policy": "stpt", "initial": 0.5, "candidates": [1.0, 0.3], "alpha": 4}
    values = {"learning_rate": stpt, "workers": {"count": 2}, "optimizer": "SGD"}

    def job(epochs: int, name: str) -> Any:
        loaded = parse_job(yaml).model_dump(exclude_unset=True)
        return small_job(tmp_path / name, **{**loaded, **values, "epochs": epochs})

    whole = run(job(4, "a"), in_process=True)
    first = run(job(2, "b"), in_process=True)
    resumed = run(job(4, "b"), in_process=True, resume=first.run_dir)
    assert whole.test_metric == resumed.test_metric
    assert whole.test_metric is not None
    assert whole.test_metric > 0.9
    rounds = [without_times(read_lines(r.run_dir, "rounds")) for r in (whole, resumed)]
    assert rounds[0] == rounds[1]
    saved = load_job(Path(whole.run_dir) / "job.yaml")
    assert getattr(saved.data, "collate", None) == "texts:pad"
