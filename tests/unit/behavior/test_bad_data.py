"""Data that are missing, empty, damaged or do not match the model.

`raytrain-opt run` reports them in one message that names field and file, before Ray starts.
"""

from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support.cli_errors import LINEAR, command_error, write_job

pytestmark = pytest.mark.usefixtures("no_ray")


@pytest.fixture
def arrays(tmp_path: Path) -> Path:
    """x.npy and y.npy: 40 samples [4] of 3 classes."""
    np.save(tmp_path / "x.npy", np.zeros((40, 4), np.float32))
    np.save(tmp_path / "y.npy", np.arange(40) % 3)
    return tmp_path


def labels(first: float, kind: str = "int64") -> Callable[[Path], None]:
    """Writes labels of which the first is as given."""
    return lambda file: np.save(file, np.array([first, *[0, 1, 2] * 13], kind))


def raw(content: bytes) -> Callable[[Path], None]:
    """Writes bytes."""
    return lambda file: file.write_bytes(content) and None


def saved(*shape: int, kind: str = "float32", value: float | str = 0.0) -> Callable[[Path], None]:
    """Writes an array of one value."""
    return lambda file: np.save(file, np.full(shape, value, kind))


def archive(file: Path) -> None:
    """Several arrays in one file."""
    with file.open("wb") as opened:
        np.savez(opened, x=np.zeros(3))


def oversized(file: Path) -> None:
    """A few bytes whose header speaks of petabytes."""
    saved(40, 4)(file)
    content = file.read_bytes()
    claimed = content.replace(b"(40, 4), }" + b" " * 13, b"(400000000000000, 4), }")
    assert len(claimed) == len(content)
    assert claimed != content
    file.write_bytes(claimed)


# What is written to another file, which of the four files it is given for, words of the message.
ARRAYS = [
    (lambda file: None, "train.0", "no such file on this machine"),
    (lambda file: file.mkdir(), "train.1", "must be a file"),
    (raw(b""), "train.0", "is not a .npy file"),
    (raw(b"text"), "test.0", "is not a .npy file"),
    (raw(gzip.compress(b"x")), "train.1", "is not a .npy file"),
    (raw(pickle.dumps([1])), "test.1", "is not a .npy file"),
    (raw(b"PK\x03\x04"), "test.1", "is not a .npy file"),
    (oversized, "train.0", "is not a .npy file"),
    (lambda file: np.save(file, [{}], allow_pickle=True), "test.1", "Python objects are refused"),
    (archive, "train.0", ".npz archive"),
    (saved(39, 4), "train.0", "both need the same number of samples"),
    (saved(40, 5), "test.0", "must be the same"),
    (saved(40, 4, kind="U1", value="a"), "train.0", "has type <U1; it must hold real numbers"),
    (saved(40, 4, value=float("nan")), "train.0", "160 values that are not finite"),
    (saved(40, 4, kind="complex64"), "train.0", "must hold real numbers"),
    (saved(40), "train.0", "must be [samples, ...], not empty"),
    (saved(0, kind="int64"), "train.1", "has no samples"),
    (saved(0, kind="int64"), "test.1", "has no samples"),
    (saved(40, 2, kind="int64"), "train.1", "has type int64 and shape (40, 2); labels must be"),
    (labels(0.5, "float64"), "train.1", "must be integer class indices"),
    (labels(-1), "train.1", "has 1 labels outside 0 and up; the first is -1, of sample 0"),
    (labels(10**13), "train.1", "no sample of 9999999999997 of its 10000000000001 classes: 3, 4,"),
    (labels(3), "test.1", "has 1 labels outside 0 to 2 (data.num_classes); the first is 3"),
]


@pytest.mark.parametrize(
    ("write", "place", "words"), ARRAYS, ids=[words for _, _, words in ARRAYS]
)
def test_arrays_that_are_wrong(
    arrays: Path, write: Callable[[Path], None], place: str, words: str
) -> None:
    files = {
        f"{part}.{i}": arrays / f"{'xy'[i]}.npy" for part in ("train", "test") for i in (0, 1)
    }
    files[place] = arrays / "ein Feld – 配列.npy"
    write(files[place])
    train, test = ([str(files[f"{part}.{i}"]) for i in (0, 1)] for part in ("train", "test"))
    data = json.dumps({"name": "arrays", "train": train, "test": test}, ensure_ascii=False)
    message = command_error("run", write_job(arrays, LINEAR, f"data: {data}"))
    assert message.split("\n")[-1].strip().startswith(f"data.{place}: ")
    assert words in message


def test_uris_of_data_are_refused(tmp_path: Path) -> None:
    data = "data: {name: image_folder, root: 's3://bucket/images'}"
    message = command_error("run", write_job(tmp_path, data))
    assert "data.root: must be a folder in the file system of every node, not a URI" in message


def image(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (40, 40)).save(file)


def broken(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"no image")


# What the image folder lacks or has too much, the path, words of the message.
FOLDERS = [
    ([("train/cat/0.png", image)], "data.test_split", "no such folder"),
    ([("train/cat/0.png", image), ("val/0.png", image)], "data.test_split", "no usable images"),
    (
        [("train/cat/0.png", image), ("val/dog/0.png", image)],
        "data.root",
        "must have the same class folders; only one of them has: cat, dog",
    ),
    (
        [(f"train/{c}/{i}.png", image) for c in ("a", "b") for i in range(9)]
        + [("val/a/0.png", image), ("val/b/broken.png", broken)],
        "data.root",
        "broken.png (class b) cannot be read",
    ),
]


@pytest.mark.parametrize(("files", "path", "words"), FOLDERS, ids=[w for _, _, w in FOLDERS])
def test_image_folders_that_are_wrong(
    tmp_path: Path, files: list[tuple[str, Callable[[Path], None]]], path: str, words: str
) -> None:
    for name, write in files:
        write(tmp_path / name)
    data = f"data: {{name: image_folder, root: '{tmp_path}', image_size: 32}}"
    message = command_error("run", write_job(tmp_path, "model: resnet8", data))
    assert message.split("\n")[-1].strip().startswith(f"{path}: ")
    assert words in message
