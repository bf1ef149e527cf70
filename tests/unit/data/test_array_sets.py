"""Reading sets into memory, and each thing that can be wrong with them."""

from __future__ import annotations

import gzip
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from raytrain_opt.config.schema import ArraysData, ArraySetData
from raytrain_opt.data.array_sets import checked_arrays, load_arrays
from raytrain_opt.errors import DataError

X = np.arange(4 * 2 * 3 * 3, dtype=np.uint8).reshape(4, 2, 3, 3)
Y = np.array([0, 1, 2, 1])


def saved(folder: Path, **arrays: np.ndarray) -> ArraysData:
    """A job's section for these arrays; those not given are X and Y."""
    paths = {}
    for name in ("train_x", "train_y", "test_x", "test_y"):
        paths[name] = str(folder / f"{name}.npy")
        np.save(paths[name], arrays.get(name, X if name.endswith("x") else Y))
    return ArraysData(
        name="arrays",
        train=(paths["train_x"], paths["train_y"]),
        test=(paths["test_x"], paths["test_y"]),
    )


def test_digits_are_real_images_in_a_fixed_stratified_split() -> None:
    arrays = load_arrays(ArraySetData(name="digits"))
    assert arrays.train_x.shape[1:] == (8, 8, 1)
    assert arrays.train_x.dtype == np.uint8
    assert (arrays.train_x.min(), arrays.train_x.max()) == (0, 255)
    assert len(arrays.train_x) + len(arrays.test_x) == 1797
    assert 355 <= len(arrays.test_x) <= 365
    share = np.bincount(arrays.test_y) / np.bincount(np.r_[arrays.train_y, arrays.test_y])
    assert (abs(share - 0.2) < 0.005).all()
    again = load_arrays(ArraySetData(name="digits"))
    np.testing.assert_array_equal(arrays.test_x, again.test_x)
    rows = {x.tobytes() for x in arrays.train_x}
    assert not any(x.tobytes() in rows for x in arrays.test_x)


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("mnist", "MNIST/raw"),
        ("fashion_mnist", "FashionMNIST/raw"),
        ("cifar10", "cifar-10-batches-py"),
        ("cifar100", "cifar-100-python"),
    ],
)
def test_a_missing_set_names_the_folder_and_the_way_out(
    tmp_path: Path, name: str, folder: str
) -> None:
    with pytest.raises(DataError) as caught:
        load_arrays(ArraySetData(name=name, root=str(tmp_path)))
    assert str(tmp_path / folder) in str(caught.value)
    assert "data.download: true" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_mnist_is_read_from_its_files(tmp_path: Path) -> None:
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, count in (("train", 5), ("t10k", 3)):
        pixels = np.arange(count * 28 * 28).astype(np.uint8)
        header = struct.pack(">BBBBIII", 0, 0, 8, 3, count, 28, 28)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(header + pixels.tobytes())
        labels = struct.pack(">BBBBI", 0, 0, 8, 1, count) + bytes(range(count))
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(labels)
    arrays = load_arrays(ArraySetData(name="mnist", root=str(tmp_path)))
    assert arrays.train_x.shape == (5, 28, 28, 1)
    assert arrays.test_x.shape == (3, 28, 28, 1)
    assert arrays.train_x[0, 0, :4, 0].tolist() == [0, 1, 2, 3]
    assert arrays.train_y.tolist() == [0, 1, 2, 3, 4]
    assert arrays.train_y.dtype == np.int64
    assert arrays.num_classes == 10


def test_cifar_is_read_through_torchvision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torchvision.datasets

    class Cifar:
        """torchvision's attributes, without the 160 MB of files whose MD5 sums it checks."""

        classes = ("a", "b")

        def __init__(self, root: Path, train: bool, download: bool) -> None:
            assert (root, download) == (tmp_path, False)
            self.data = np.full((3 if train else 2, 32, 32, 3), int(train), np.uint8)
            self.targets = [0, 1, 1][: len(self.data)]

    monkeypatch.setattr(torchvision.datasets, "CIFAR100", Cifar)
    arrays = load_arrays(ArraySetData(name="cifar100", root=str(tmp_path)))
    assert (arrays.train_x.shape, arrays.test_x.shape) == ((3, 32, 32, 3), (2, 32, 32, 3))
    assert (arrays.train_x.max(), arrays.test_x.max()) == (1, 0)
    assert arrays.train_y.tolist() == [0, 1, 1]
    assert arrays.num_classes == 2


def test_a_failed_download_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torchvision.datasets

    def offline(*args: object, **kwargs: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(torchvision.datasets, "CIFAR10", offline)
    section = ArraySetData(name="cifar10", root=str(tmp_path), download=True)
    with pytest.raises(DataError, match="cifar10 .* could not be fetched: no route to host"):
        load_arrays(section)


def test_npy_pairs(tmp_path: Path) -> None:
    arrays = load_arrays(saved(tmp_path))
    np.testing.assert_array_equal(arrays.train_x, X)
    np.testing.assert_array_equal(arrays.test_y, Y)
    assert arrays.num_classes == 3
    assert arrays.train_x.dtype == np.uint8


def test_a_leading_tilde_is_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    section = saved(tmp_path).model_copy(update={"train": ("~/train_x.npy", "~/train_y.npy")})
    assert len(load_arrays(section).train_x) == 4


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int32, bool])
def test_other_numbers_become_float32(tmp_path: Path, dtype: type) -> None:
    x = np.ones((4, 7), dtype)
    arrays = load_arrays(saved(tmp_path, train_x=x, test_x=x))
    assert arrays.train_x.dtype == np.float32
    assert arrays.train_x.shape == (4, 7)


def test_greyscale_gets_a_channel(tmp_path: Path) -> None:
    arrays = load_arrays(saved(tmp_path, train_x=X[..., 0], test_x=X[..., 0]))
    assert arrays.train_x.shape == (4, 2, 3, 1)


def test_labels_of_any_integer_type_become_int64(tmp_path: Path) -> None:
    arrays = load_arrays(saved(tmp_path, train_y=Y.astype(np.uint8)))
    assert arrays.train_y.dtype == np.int64


NAN = np.ones((4, 5))
NAN[1, 2] = np.nan
NAN[3, 4] = -np.inf
CHANNELS_FIRST = np.zeros((4, 3, 8, 8), np.uint8)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"train_y": Y[:3]}, r"train_x\.npy has shape \(4,.*train_y\.npy \(3,\).*same number"),
        ({"train_y": Y[:0], "train_x": X[:0]}, r"train_y\.npy has no samples"),
        ({"test_y": Y[:0], "test_x": X[:0]}, r"test_y\.npy has no samples"),
        ({"train_y": Y.astype(float)}, r"train_y\.npy are float64.*whole class numbers"),
        ({"train_y": Y[:, None]}, r"train_y\.npy are int64 of shape \(4, 1\)"),
        ({"train_y": Y - 1}, r"1 of the labels in .*train_y\.npy are outside 0.*is -1, of sample"),
        ({"test_y": Y + 1}, r"1 of the labels in .*test_y\.npy are outside 0 to 2 .*3, of sample"),
        ({"train_x": X[:, :1]}, r"uint8 \(1, 3, 3\).*uint8 \(2, 3, 3\); they must be alike"),
        ({"test_x": X.astype(float)}, r"uint8 \(2, 3, 3\).*float64 \(2, 3, 3\)"),
        ({"train_x": NAN, "test_x": NAN}, r"2 values in .*train_x\.npy are not finite"),
        ({"train_x": np.array(["a"] * 4)}, r"train_x\.npy is of type <U1.*real numbers"),
        ({"train_x": np.ones((4, 2), complex)}, "complex128.*real numbers"),
        ({"train_x": np.ones(4)}, r"train_x\.npy has shape \(4,\)"),
        ({"train_x": CHANNELS_FIRST}, r"channels first.*transpose\(0, 2, 3, 1\)"),
    ],
)
def test_wrong_arrays_are_refused(
    tmp_path: Path, arrays: dict[str, np.ndarray], words: str
) -> None:
    section = saved(tmp_path, **arrays)
    with pytest.raises(DataError, match=words):
        load_arrays(section)


def test_labels_beyond_the_given_number_of_classes_are_refused(tmp_path: Path) -> None:
    section = saved(tmp_path).model_copy(update={"num_classes": 2})
    with pytest.raises(DataError, match=r"train_y\.npy are outside 0 to 1 \(data\.num_classes\)"):
        load_arrays(section)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    section = saved(tmp_path)
    (tmp_path / "test_y.npy").unlink()
    with pytest.raises(DataError, match=r"data\.test\[1\]: there is no file .*test_y\.npy"):
        load_arrays(section)


@pytest.mark.parametrize("content", [b"", b"no array", gzip.compress(b"x"), pickle.dumps([1])])
def test_files_that_are_no_arrays_are_refused(tmp_path: Path, content: bytes) -> None:
    section = saved(tmp_path)
    (tmp_path / "train_x.npy").write_bytes(content)
    with pytest.raises(DataError, match=r"data\.train\[0\]: .*train_x\.npy is not a \.npy file"):
        load_arrays(section)


def test_object_arrays_are_refused(tmp_path: Path) -> None:
    section = saved(tmp_path)
    np.save(tmp_path / "train_x.npy", np.array([{}] * 4), allow_pickle=True)
    with pytest.raises(DataError, match="arrays of Python objects are refused"):
        load_arrays(section)


def test_archives_are_refused(tmp_path: Path) -> None:
    section = saved(tmp_path)
    np.savez(tmp_path / "a.npz", x=X)
    (tmp_path / "a.npz").rename(tmp_path / "train_x.npy")
    with pytest.raises(DataError, match=r"\.npz archive"):
        load_arrays(section)


def test_arrays_are_checked_without_files_too() -> None:
    with pytest.raises(DataError, match="train_y"):
        checked_arrays((X, Y - 1), (X, Y), 3)
