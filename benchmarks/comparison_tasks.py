"""The tasks of the comparisons: subsets of real data as .npy pairs for the job file.

Layout of the folder `--data-root` (arrays of an .npz file by name):

    fashion_mnist/FashionMNIST/raw/*.gz    the four original IDX files
    cifar100/cifar100.npz                  {train,test}_blob and _ends: lossless WebP tiles of
                                           10 x 10 images, concatenated, and the end of each;
                                           {train,test}_y: fine labels; fine_to_coarse
    small/imagenette224_small.npz          {train,val}_blob and _ends: JPEGs; {train,val}_y
"""

from __future__ import annotations

import argparse
import gzip
import inspect
import io
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.common import synthetic_images
from raytrain_opt.config.load import resolve_function

Pair = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]

# Each optimizer's section of a job, and its customary rate. With auto a job names none.
OPTIMIZERS: dict[str, tuple[dict[str, Any], float]] = {
    "auto": ({}, 0.1),
    "SGD": ({"name": "SGD", "args": {"momentum": 0.9, "weight_decay": 5e-4}}, 0.1),
    "Adam": ({"name": "Adam"}, 0.001),
    "Adagrad": ({"name": "Adagrad"}, 0.01),
    "AdamW": ({"name": "AdamW", "args": {"weight_decay": 0.01}}, 0.001),
    "LARS": ({"name": "LARS", "args": {"momentum": 0.9, "weight_decay": 5e-4}}, 1.0),
    "Muon": ({"name": "Muon"}, 0.1),
    "MuonAdamW": ({"name": "Muon", "args": {"aux": "adamw"}}, 0.1),
    "AdamWDecay": ({"name": "AdamW", "args": {"weight_decay": 0.05}}, 0.001),
    "ScheduleFreeSGD": ({"name": "ScheduleFreeSGD", "args": {"weight_decay": 5e-4}}, 1.0),
    "ScheduleFreeAdamW": ({"name": "ScheduleFreeAdamW", "args": {"weight_decay": 0.01}}, 0.0025),
}


@dataclass(frozen=True)
class Task:
    """`train` images and `validation` more, of `side` x `side` pixels.

    What chooses by a validation split holds those out; the others train on all.
    `network`: a named model or a function. `patch`: it sees patches of
    `patch` x `patch` pixels, so that it computes at `side / patch`, as networks for large images
    do. `crop`: padding of the random crop; 0 means no
    augmentation, otherwise images are flipped at random too. `source`: a set known here, or a
    function of the folder and `side`. `task`: of the job, if it is not classification.
    `pretrained`: a function that returns the path of the weights from which all start. `epochs`:
    if they are not the command's; only the last one is evaluated then.
    """

    name: str
    source: str
    side: int
    train: int
    validation: int
    patch: int = 1
    crop: int = 0
    batch: int = 32
    network: str = "resnet8"
    width: int = 8
    task: str | None = None
    pretrained: str | None = None
    epochs: int | None = None

    def scaled(self, factor: float, batch_factor: int = 1) -> Task:
        """Return the task with `factor` times the images, rounded down to full training batches.

        `batch_factor`: factor of the batch size.
        """
        batch = batch_factor * self.batch
        return replace(
            self,
            train=max(1, int(factor * self.train / batch)) * batch,
            validation=max(1, round(factor * self.validation)),
            batch=batch,
        )

    def prepare(self, root: Path, folder: Path) -> dict[str, Any]:
        """Write the subset below `folder` unless it exists, and return the job's data section.

        Raises SystemExit if the set is missing below `root` or has too few images.
        """
        size = self.train + self.validation
        target = folder / f"{self.source}-{self.side}-{size}"
        names = ("train_x", "train_y", "test_x", "test_y")
        paths = {name: target / f"{name}.npy" for name in names}
        if not all(path.is_file() for path in paths.values()):
            target.mkdir(parents=True, exist_ok=True)
            train, test = _read(self.source, root, self.side)
            if len(train[0]) < size:
                raise SystemExit(f"{self.name} needs {size} images; the set has {len(train[0])}")
            subset = np.random.default_rng(0).permutation(len(train[0]))[:size]
            arrays: tuple[npt.NDArray[Any], ...] = (train[0][subset], train[1][subset], *test)
            for path, array in zip(paths.values(), arrays, strict=True):
                np.save(path, array)
        x, y, test_x, test_y = (str(path) for path in paths.values())
        weights = {}
        if self.pretrained is not None:
            pretrain = resolve_function(self.pretrained, "pretrained")
            weights = {"weights": pretrain(self, root, folder)}
        return {
            **weights,
            "name": "arrays",
            "train": [x, y],
            "test": [test_x, test_y],
            "validation_fraction": (self.validation + 0.5) / size,
            "augment": {"crop_padding": self.crop, "flip": self.crop > 0},
        }

    def job(
        self,
        data: dict[str, Any],
        epochs: int,
        seed: int,
        learning_rate: dict[str, Any],
        optimizer: str = "SGD",
        *,
        holds_out: bool = True,
    ) -> dict[str, Any]:
        """Return a job file's contents; without `holds_out` there is no validation split."""
        weights = {"weights": data["weights"]} if "weights" in data else {}
        data = {key: value for key, value in data.items() if key != "weights"}
        if not holds_out:
            data["validation_fraction"] = 0
        section = OPTIMIZERS[optimizer][0]
        patches = {"patch": self.patch} if self.patch > 1 else {}
        return {
            "model": {
                "name": self.network,
                "args": {"width": self.width, **patches},
                **weights,
            },
            **({"task": self.task} if self.task else {}),
            **({"evaluate": {"every_epochs": epochs}} if self.epochs else {}),
            "data": data,
            "epochs": epochs,
            "global_batch_size": self.batch,
            "learning_rate": learning_rate,
            **({"optimizer": section} if section else {}),
            "seed": seed,
        }


_OF_PATCHES = f"{__name__}:resnet8_of_patches"
# Epochs of about 100 updates, as small real trainings have. The batches are small because the cost
# of a training is proportional to its images.
TASKS = {
    task.name: task
    for task in (
        Task("fashion_mnist_14", "fashion_mnist", 14, 3072, 1024),
        Task("cifar100_coarse_16", "cifar100_coarse", 16, 3072, 1024, crop=2),
        Task("cifar100_fine_16", "cifar100_fine", 16, 3072, 1024, crop=2),
        Task("cifar100_fine_32", "cifar100_fine", 32, 3072, 1024, 2, crop=4, network=_OF_PATCHES),
        Task(
            "imagenette_64", "imagenette", 64, 1248, 200, 4, crop=8, batch=16, network=_OF_PATCHES
        ),
    )
}

_IMAGES = {
    "fashion": Task("", "fashion_mnist", 14, 3072, 1024),
    "coarse": Task("", "cifar100_coarse", 16, 3072, 1024, crop=2),
    "fine": Task("", "cifar100_fine", 16, 3072, 1024, crop=2),
}
_OTHER = "benchmarks.comparison_networks:"
# Networks where early progress may mislead. Not among the default tasks.
OTHER_NETWORKS = {
    f"{name}_{images}": replace(
        _IMAGES[images], name=f"{name}_{images}", network=network, width=width, patch=patch
    )
    for name, network, width, patch, image_sets in (
        ("mlp", f"{_OTHER}mlp", 256, 1, ("fashion", "coarse")),
        ("vgg", f"{_OTHER}vgg_without_norm", 16, 1, ("fashion", "coarse", "fine")),
        ("vit", f"{_OTHER}vision_transformer", 48, 4, ("coarse", "fine")),
        ("resnet18", "cifar_resnet18", 32, 1, ("coarse",)),
        ("convnext", f"{_OTHER}convnext", 24, 1, ("fashion", "coarse")),
    )
    for images in image_sets
}
# Other data: labels of which 40 % are random, few images, one of four rotations to be told, the
# next character of a text. Not among the default tasks.
OTHER_DATA = {
    task.name: task
    for task in (
        replace(_IMAGES["fashion"], name="noisy_fashion", source="fashion_mnist_noisy"),
        replace(_IMAGES["coarse"], name="noisy_coarse", source="cifar100_coarse_noisy"),
        replace(_IMAGES["coarse"], name="few_coarse", train=768, validation=256),
        Task("rotations_16", "cifar100_rotations", 16, 3072, 1024),
        Task(
            "text_transformer",
            "text",
            32,
            6144,
            1024,
            network=f"{_OTHER}text_transformer",
            width=48,
        ),
        Task("text_gru", "text", 32, 6144, 1024, network=f"{_OTHER}text_gru", width=64),
    )
}
# Whole data sets, for a GPU: each training has about 4,700 updates.
_CIFAR100 = Task("cifar100_whole", "cifar100_fine", 32, 44928, 5000, 1, 4, 128, "resnet20", 16)
_FASHION = Task("fashion_mnist_whole", "fashion_mnist", 28, 53888, 6000, 1, 2, 128, width=16)
WHOLE = {t.name: t for t in (replace(_CIFAR100, epochs=12), replace(_FASHION, epochs=10))}
# Too small for a meaningful result: it shows that the benchmark works.
SYNTHETIC = Task("synthetic", "synthetic", 4, 256, 64, batch=32, width=2)


def resnet8_of_patches(
    *, num_classes: int, sample_shape: tuple[int, ...], width: int, patch: int
) -> Any:
    """Return a ResNet-8 whose input channels are the pixels of patches [N, C p p, H/p, W/p]."""
    from torch import nn

    from raytrain_opt.models.networks import resnet8

    channels, height, width_px = sample_shape
    shape = (channels * patch**2, height // patch, width_px // patch)
    return nn.Sequential(
        nn.PixelUnshuffle(patch), resnet8(num_classes=num_classes, sample_shape=shape, width=width)
    )


def _read(source: str, root: Path, side: int) -> tuple[Pair, Pair]:
    """Return (train, test), each uint8 images [N, side, side, C] and labels."""
    readers: dict[str, Callable[[Path, int], tuple[Pair, Pair]]] = {
        "fashion_mnist": read_fashion_mnist,
        "cifar100_fine": lambda root, side: read_cifar100(root, side, coarse=False),
        "cifar100_coarse": lambda root, side: read_cifar100(root, side, coarse=True),
        "imagenette": _imagenette,
        "fashion_mnist_noisy": lambda root, side: _noisy(*read_fashion_mnist(root, side)),
        "cifar100_coarse_noisy": lambda root, side: _noisy(
            *read_cifar100(root, side, coarse=True)
        ),
        "cifar100_rotations": lambda root, side: _rotations(
            *read_cifar100(root, side, coarse=True)
        ),
        "text": lambda _root, side: _text(side),
        "synthetic": _synthetic,
    }
    try:
        if ":" in source:
            own: tuple[Pair, Pair] = resolve_function(source, "source")(root, side)
            return own
        return readers[source](root, side)
    except FileNotFoundError as error:
        raise SystemExit(f"--data-root: {error.filename} does not exist. {__doc__}") from error


def read_fashion_mnist(root: Path, side: int) -> tuple[Pair, Pair]:
    """Return (train, test) of Fashion-MNIST, 60,000 and 10,000 images as [N, side, side, 1]."""
    raw = root / "fashion_mnist" / "FashionMNIST" / "raw"

    def split(name: str) -> Pair:
        pixels = gzip.decompress((raw / f"{name}-images-idx3-ubyte.gz").read_bytes())
        labels = gzip.decompress((raw / f"{name}-labels-idx1-ubyte.gz").read_bytes())
        images = np.frombuffer(pixels, np.uint8, offset=16).reshape(-1, 28, 28, 1)
        return _downsample(images, side), np.frombuffer(labels, np.uint8, offset=8).astype(
            np.int64
        )

    return split("train"), split("t10k")


def read_cifar100(root: Path, side: int, coarse: bool) -> tuple[Pair, Pair]:
    """Return (train, test) of CIFAR-100, its 50,000 and 10,000 images as [N, side, side, 3]."""
    path = root / "cifar100" / "cifar100.npz"

    def load(stored: Any, split: str) -> Pair:
        tiles = [tile.reshape(10, 32, 10, 32, 3) for tile in _images(stored, split)]
        images = np.stack(tiles).transpose(0, 1, 3, 2, 4, 5).reshape(-1, 32, 32, 3)
        labels = stored[f"{split}_y"]
        return (
            _downsample(images, side),
            (stored["fine_to_coarse"][labels] if coarse else labels).astype(np.int64),
        )

    with np.load(path) as stored:
        return load(stored, "train"), load(stored, "test")


def _imagenette(root: Path, side: int) -> tuple[Pair, Pair]:
    with np.load(root / "small" / "imagenette224_small.npz") as stored:
        train, test = (
            (np.stack(list(_images(stored, split, side))), stored[f"{split}_y"].astype(np.int64))
            for split in ("train", "val")
        )
    return train, test


def _noisy(train: Pair, test: Pair) -> tuple[Pair, Pair]:
    """Replace 40 % of the training labels by random ones; the test split keeps the true ones."""
    rng = np.random.default_rng(1)
    x, y = train
    random = rng.integers(y.max() + 1, size=len(y))
    return (x, np.where(rng.random(len(y)) < 0.4, random, y)), test


def _rotations(train: Pair, test: Pair) -> tuple[Pair, Pair]:
    """Rotate each image by a random number of quarter turns, its label."""
    rng = np.random.default_rng(1)

    def rotate(pair: Pair) -> Pair:
        turns = rng.integers(4, size=len(pair[0]))
        images = [np.rot90(image, turn) for image, turn in zip(pair[0], turns, strict=True)]
        return np.stack(images), turns

    return rotate(train), rotate(test)


def _text(length: int) -> tuple[Any, Any]:
    """Return pieces of the standard library's source, float32 [N, length], and the next character.

    The 31 most frequent characters have numbers of their own, all others one. The test split is
    another module.
    """
    codes = [np.frombuffer(inspect.getsource(m).encode(), np.uint8) for m in (argparse, tarfile)]
    frequent = np.argsort(-np.bincount(codes[0], minlength=256), kind="stable")[:31]
    numbers = np.full(256, len(frequent))
    numbers[frequent] = range(len(frequent))

    def split(text: npt.NDArray[np.uint8]) -> tuple[Any, Any]:
        pieces = np.lib.stride_tricks.sliding_window_view(numbers[text], length + 1)
        return pieces[:, :-1].astype(np.float32), pieces[:, -1]

    train, (test_pieces, test_next) = map(split, codes)
    return train, (test_pieces[::20], test_next[::20])


def _synthetic(_root: Path, side: int) -> tuple[Pair, Pair]:
    x, y = synthetic_images(2000, (side, side, 1), 4)
    return (x[200:], y[200:]), (x[:200], y[:200])


def _images(stored: Any, split: str, side: int | None = None) -> Iterator[npt.NDArray[np.uint8]]:
    """Decode each image of a blob, resized to `side` x `side` if given."""
    from PIL import Image

    blob, start = stored[f"{split}_blob"], 0
    for end in stored[f"{split}_ends"]:
        image = Image.open(io.BytesIO(blob[start:end].tobytes())).convert("RGB")
        if side is not None:
            image = image.resize((side, side), Image.Resampling.BILINEAR)
        yield np.asarray(image)
        start = end


def _downsample(images: npt.NDArray[np.uint8], side: int) -> npt.NDArray[np.uint8]:
    """Average squares of k x k pixels: [N, k side, k side, C] -> [N, side, side, C]."""
    count, height, _, channels = images.shape
    k = height // side
    squares = images.reshape(count, side, k, side, k, channels)
    return np.rint(squares.mean(axis=(2, 4))).astype(np.uint8) if k > 1 else images
