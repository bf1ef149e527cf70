"""What a resume notices of data that are read again, for every kind of data."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from raytrain_opt.commands.shard import write_shards
from raytrain_opt.data.base import DataFingerprint, DataInfo
from raytrain_opt.errors import DataError
from raytrain_opt.execution.check import read_data
from tests.support.small_jobs import small_job

Change = Callable[[Path], object]
ALL = [i % 2 for i in range(20)]


def read(section: dict[str, Any]) -> DataInfo:
    job = small_job(Path(), data=section)
    return read_data(job)[1]


def folder_section(root: Path) -> dict[str, Any]:
    data = {"name": "image_folder", "root": str(root), "image_size": 8, "loader_workers": 0}
    return {**data, "labels": f"{root}/labels.csv"} if (root / "labels.csv").exists() else data


def rename(root: Path, old: str, new: str) -> None:
    for split in ("train", "val"):
        (root / split / old).rename(root / split / new)


def nothing(_: Path) -> None:
    pass


def exchange_classes(root: Path) -> None:
    for old, new in (("cat", "x"), ("dog", "cat"), ("x", "dog")):
        rename(root, old, new)


def swap(root: Path) -> None:
    cat, dog = root / "train/cat", root / "train/dog"
    shutil.move(cat / "9.png", dog / "10.png")
    shutil.move(dog / "9.png", cat / "10.png")


def exchange_contents(root: Path) -> None:
    """Give two files each other's content: all names, labels and sizes stay."""
    first, second = root / "train/cat/3.png", root / "train/dog/4.png"
    size = max(path.stat().st_size for path in (first, second))
    contents = [path.read_bytes().ljust(size, b"\0") for path in (second, first)]
    for path, content in zip((first, second), contents, strict=True):
        path.write_bytes(content)


def equal_sizes(root: Path) -> None:
    exchange_contents(root)
    exchange_contents(root)


def write_labels(root: Path, first: str = "cat") -> None:
    rows = [f"{split}/{c}/{i}.png,{c},{'test' if split == 'val' else split}"
            for split, n in (("train", 10), ("val", 3)) for c in ("cat", "dog")
            for i in range(n)]  # fmt: skip
    rows[0] = f"train/cat/0.png,{first},train"
    (root / "labels.csv").write_text("\n".join(["file,label,split", *rows]) + "\n")


def write_arrays(root: Path, value: int = 0) -> None:
    x = np.zeros((20, 4, 4, 3), np.uint8)
    x[7, 2, 1, 0] = value
    for split in ("train", "test"):
        np.save(root / f"{split}_x.npy", x)
        np.save(root / f"{split}_y.npy", np.array(ALL))


def arrays_section(root: Path) -> dict[str, Any]:
    pairs = {s: [f"{root}/{s}_x.npy", f"{root}/{s}_y.npy"] for s in ("train", "test")}
    return {"name": "arrays", **pairs}


def tensors(root: str) -> tuple[TensorDataset, TensorDataset]:
    data = TensorDataset(*(torch.from_numpy(np.load(f"{root}/train_{n}.npy")) for n in "xy"))
    return data, data


class WithTargets(TensorDataset):
    def __init__(self, targets: list[int], classes: tuple[str, ...]) -> None:
        super().__init__(torch.zeros(len(targets), 3), torch.tensor(targets))
        self.targets, self.classes = targets, classes


def make_datasets(targets: list[int], classes: str = "a b") -> tuple[WithTargets, WithTargets]:
    return WithTargets(targets, tuple(classes.split())), WithTargets(ALL, tuple(classes.split()))


def write_targets(root: Path, targets: list[int], classes: str = "a b") -> None:
    (root / "targets").write_text(f"{targets}/{classes}")


def dataset_section(root: Path) -> dict[str, Any]:
    targets, classes = (root / "targets").read_text().split("/")
    args = {"targets": [int(t) for t in targets[1:-1].split(",")], "classes": classes}
    return {"name": make_datasets, "args": args, "loader_workers": 0}


def pack(root: Path, change: Change | None = None) -> None:
    if change is not None:
        change(root)
    shutil.rmtree(root / "packed", ignore_errors=True)
    write_shards(root, f"{root.parent}/packed", 2**20, lambda _: None)


def shards_section(root: Path) -> dict[str, Any]:
    packed, cache = f"{root.parent}/packed", f"{root.parent}/cache"
    sets = {"train": f"{packed}/train-000000.tar", "test": f"{packed}/val-000000.tar"}
    return {"name": "shards", **sets, "image_size": 8, "loader_workers": 0, "cache": cache}


CASES: dict[str, tuple[Change, Callable[[Path], dict[str, Any]], Change, str]] = {
    "class renamed": (
        nothing, folder_section, lambda root: rename(root, "cat", "zebra"),
        r"data: changed since the checkpoint: class cat is gone, class zebra is new; put",
    ),
    "classes exchanged": (
        nothing, folder_section,
        exchange_classes,
        "samples, their labels, their names or their order",
    ),
    "file removed": (
        nothing, folder_section, lambda root: (root / "train/cat/3.png").unlink(),
        "class cat has 9 samples, and had 10",
    ),
    "file replaced": (
        nothing, folder_section,
        lambda root: shutil.copy(root / "train/cat/3.png", root / "train/cat/4.png"), "samples, ",
    ),
    "contents exchanged": (equal_sizes, folder_section, exchange_contents, "samples, "),
    "contents in shards exchanged": (
        lambda root: pack(root, equal_sizes), shards_section,
        lambda root: pack(root, exchange_contents), "samples, ",
    ),
    "array value": (
        write_arrays, arrays_section, lambda root: write_arrays(root, 1), "samples, ",
    ),
    "tensor value": (
        write_arrays, lambda root: {"name": tensors, "args": {"root": str(root)}},
        lambda root: write_arrays(root, 1), "samples, "),
    "dataset order": (
        lambda root: write_targets(root, ALL), dataset_section,
        lambda root: write_targets(root, ALL[::-1]), "their order",
    ),
    "dataset classes": (
        lambda root: write_targets(root, ALL), dataset_section,
        lambda root: write_targets(root, ALL, "b a"), "their order",
    ),
    "shard": (
        pack, shards_section, lambda root: pack(root, swap), "their labels",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_data_that_changed_are_refused_with_what_changed(image_tree: Path, case: str) -> None:
    make, section, change, message = CASES[case]
    root = image_tree / "data"
    root.mkdir()
    for split in ("train", "val"):
        shutil.move(image_tree / split, root / split)
    make(root)
    info = read(section(root))
    saved = DataFingerprint.of(info)
    saved.require_same(read(section(root)))
    change(root)
    with pytest.raises(DataError, match=message):
        saved.require_same(read(section(root)))


def test_the_same_files_elsewhere_are_the_same_data(image_tree: Path) -> None:
    (image_tree / "a").mkdir()
    for split in ("train", "val"):
        shutil.move(image_tree / split, image_tree / "a" / split)
    saved = DataFingerprint.of(read(folder_section(image_tree / "a")))
    shutil.copytree(image_tree / "a", image_tree / "elsewhere")  # with other dates
    assert DataFingerprint.of(read(folder_section(image_tree / "elsewhere"))) == saved
