"""Data sets read into memory, and everything that can be wrong with them."""

from __future__ import annotations

import pickle
import re
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from raytrain_opt.config.data import ArraysData, ArraySetData
from raytrain_opt.data.base import column_note
from raytrain_opt.data.in_memory_sets import load_array_set, load_arrays
from raytrain_opt.errors import DataError

X = np.arange(4 * 2 * 3 * 3, dtype=np.uint8).reshape(4, 2, 3, 3)
Y = np.array([0, 1, 2, 1])


def save_arrays(folder: Path, **arrays: np.ndarray) -> ArraysData:
    """Save arrays (default: X and Y) and return the job section that names them."""
    paths = {}
    for name in ("train_x", "train_y", "test_x", "test_y"):
        paths[name] = str(folder / f"{name}.npy")
        np.save(paths[name], arrays.get(name, X if name.endswith("x") else Y))
    train, test = ((paths[f"{split}_x"], paths[f"{split}_y"]) for split in ("train", "test"))
    return ArraysData(name="arrays", train=train, test=test)


def test_digits_are_split_by_class_and_always_the_same_way() -> None:
    arrays = load_array_set(ArraySetData(name="digits"))
    assert arrays.train_x.shape[1:] == (8, 8, 1)
    assert arrays.train_x.dtype == np.uint8
    assert (arrays.train_x.min(), arrays.train_x.max()) == (0, 255)
    assert len(arrays.train_x) + len(arrays.test_x) == 1797
    assert 355 <= len(arrays.test_x) <= 365
    fraction = np.bincount(arrays.test_y) / np.bincount(np.r_[arrays.train_y, arrays.test_y])
    assert (abs(fraction - 0.2) < 0.005).all()
    again = load_array_set(ArraySetData(name="digits"))
    np.testing.assert_array_equal(arrays.test_x, again.test_x)
    rows = {x.tobytes() for x in arrays.train_x}
    assert not any(x.tobytes() in rows for x in arrays.test_x)


def test_a_missing_set_names_its_folder_and_the_remedy(tmp_path: Path) -> None:
    rule = rf"{tmp_path}/cifar-10-batches-py .*data\.download: true"
    with pytest.raises(DataError, match=rule):
        load_array_set(ArraySetData(name="cifar10", root=str(tmp_path)))
    assert list(tmp_path.iterdir()) == []


def test_mnist_is_read_from_its_files(tmp_path: Path) -> None:
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for split, count in (("train", 5), ("t10k", 3)):
        pixels = np.arange(count * 28 * 28).astype(np.uint8)
        header = struct.pack(">BBBBIII", 0, 0, 8, 3, count, 28, 28)
        (raw / f"{split}-images-idx3-ubyte").write_bytes(header + pixels.tobytes())
        labels = struct.pack(">BBBBI", 0, 0, 8, 1, count) + bytes(range(count))
        (raw / f"{split}-labels-idx1-ubyte").write_bytes(labels)
    arrays = load_array_set(ArraySetData(name="mnist", root=str(tmp_path)))
    assert arrays.train_x.shape == (5, 28, 28, 1)
    assert arrays.test_x.shape == (3, 28, 28, 1)
    assert arrays.train_x[0, 0, :4, 0].tolist() == [0, 1, 2, 3]
    assert arrays.train_y.tolist() == [0, 1, 2, 3, 4]
    assert arrays.train_y.dtype == np.int64
    assert arrays.num_classes == 10


def test_a_failed_download_is_explained_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torchvision.datasets

    def offline(*args: object, **kwargs: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(torchvision.datasets, "CIFAR10", offline)
    section = ArraySetData(name="cifar10", root=str(tmp_path), download=True)
    with pytest.raises(DataError, match="cifar10 .* could not be downloaded: no route to host"):
        load_array_set(section)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int32, bool])
def test_other_numbers_become_float32(tmp_path: Path, dtype: type) -> None:
    x = np.ones((4, 7), dtype)
    arrays = load_arrays(save_arrays(tmp_path, train_x=x, test_x=x))
    assert arrays.train_x.dtype == np.float32
    assert arrays.train_x.shape == (4, 7)


@pytest.mark.parametrize(
    ("shape", "height_width_channels", "order"),
    [
        ((32, 24, 3), (32, 24, 3), "last"),
        ((3, 32, 24), (32, 24, 3), "first"),
        ((4, 16, 20), (16, 20, 4), "first"),
        ((12, 64, 60), (64, 60, 12), "first"),
        ((64, 60, 12), (64, 60, 12), "last"),
        # As the documentation says where both may be right.
        ((3, 20, 3), (3, 20, 3), "last"),
        ((16, 16, 16), (16, 16, 16), "last"),
    ],
)
def test_the_layout_of_images_is_seen_in_their_shape_and_said(
    tmp_path: Path, shape: tuple[int, ...], height_width_channels: tuple[int, ...], order: str
) -> None:
    x = np.random.default_rng(0).integers(0, 256, (4, *shape), np.uint8)
    arrays = load_arrays(save_arrays(tmp_path, train_x=x, test_x=x))
    expected = x if order == "last" else x.transpose(0, 2, 3, 1)
    np.testing.assert_array_equal(arrays.train_x, expected)
    assert arrays.train_x.shape[1:] == height_width_channels
    height, width, channels = height_width_channels
    text = f"{list(shape)} is read as {width} x {height} pixels with {channels} channels"
    assert [note.split(": ", 1)[1] for note in arrays.notes] == [f"{text} (channels {order})"] * 2


def test_columns_to_standardize_are_named_unless_the_job_normalizes(tmp_path: Path) -> None:
    x = np.zeros((4, 3)) - [0.01, 0, 2.0]
    section = save_arrays(tmp_path, train_x=x, test_x=x)
    assert "values of columns are 0.01 to 2; networks" in load_arrays(section).notes[0]
    normalized = section.model_copy(update={"normalize": ([0.0] * 3, [1.0] * 3)})
    assert load_arrays(normalized).notes == ()
    assert load_arrays(save_arrays(tmp_path, train_x=x.clip(-0.9), test_x=x)).notes == ()
    spread_flag_constant_far = np.array([[-1, 0, 7, 1], *[[1, 1, 7, 2.9]] * 9])
    assert "x: the means of 1 of 4 columns" in column_note("x", spread_flag_constant_far)[0]


@pytest.mark.parametrize("y", [Y[:, None], Y.astype(np.uint8)])
def test_labels_of_any_integer_type_and_with_a_second_axis_are_read(
    tmp_path: Path, y: np.ndarray
) -> None:
    arrays = load_arrays(save_arrays(tmp_path, train_y=y))
    np.testing.assert_array_equal(arrays.train_y, Y)
    assert arrays.train_y.dtype == np.int64


def raw(content: bytes) -> Callable[[Path], None]:
    """Writes bytes."""
    return lambda file: file.write_bytes(content) and None


def saved(*shape: int, kind: str = "float32", value: float | str = 0.0) -> Callable[[Path], None]:
    """Writes an array of one value."""
    return lambda file: np.save(file, np.full(shape, value, kind))


def labels(first: float, kind: str = "int64") -> Callable[[Path], None]:
    """Writes labels of which the first is as given."""
    return lambda file: np.save(file, np.array([first, *[0, 1, 2] * 13], kind))


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


@pytest.mark.parametrize(
    ("write", "place", "words"),
    [
        (lambda file: None, "train.0", "there is no file"),
        (raw(b""), "train.0", "is not a .npy file"),
        (raw(pickle.dumps([1])), "test.1", "is not a .npy file"),
        (oversized, "train.0", "is not a .npy file"),
        (lambda file: np.save(file, [{}], allow_pickle=True), "test.1", "Object arrays cannot"),
        (archive, "train.0", "is not a .npy file"),
        (saved(39, 4), "train.0", "both need the same number of samples"),
        (saved(40, 5), "test.0", "has samples float32 (5,), but those of"),
        (saved(40, 4, kind="U1", value="a"), "train.0", "type <U1; it must hold real numbers"),
        (saved(40, 4, value=float("nan")), "train.0", "160 values that are not finite"),
        (saved(40), "train.0", "must be [samples, ...], not empty"),
        (saved(0, kind="int64"), "train.1", "shape (0,); labels must"),
        (saved(40, 2, kind="int64"), "train.1", "has type int64 and shape (40, 2); labels must"),
        (labels(0.5, "float64"), "train.1", "must be integer class indices"),
        (labels(-1), "train.1", "1 labels below 0 or above the classes of the training set"),
        (labels(3), "test.1", "training set; the first is 3, of sample 0"),
    ],
)
def test_arrays_that_are_wrong(
    tmp_path: Path, write: Callable[[Path], None], place: str, words: str
) -> None:
    np.save(tmp_path / "x.npy", np.zeros((40, 4), np.float32))
    np.save(tmp_path / "y.npy", np.arange(40) % 3)
    files = {
        f"{part}.{i}": tmp_path / f"{'xy'[i]}.npy" for part in ("train", "test") for i in (0, 1)
    }
    files[place] = tmp_path / "ein Feld – 配列.npy"
    write(files[place])
    train, test = ([str(files[f"{part}.{i}"]) for i in (0, 1)] for part in ("train", "test"))
    with pytest.raises(DataError, match=rf"data\.{place}: .*{re.escape(words)}"):
        load_arrays(ArraysData(name="arrays", train=train, test=test))
