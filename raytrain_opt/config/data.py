"""Sections of the job file about data: sets that fit in memory, image folders, your own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Discriminator, Field, Tag

from raytrain_opt.config.section import (
    BrokenRule,
    Float,
    Fraction,
    LocalPath,
    Location,
    NamedSection,
    NameOrFunction,
    NameOrInstance,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Section,
    is_function_name,
)

ArraySet = Literal["digits", "mnist", "fashion_mnist", "cifar10", "cifar100"]
ARRAY_SETS = get_args(ArraySet)
_MAX_VALIDATION_SAMPLES = 5000
DATA_NAMES = (*ARRAY_SETS, "arrays", "image_folder", "shards")


class BatchAugment(Section):
    """Random changes to training samples, on top of the crop and flip of image folders."""

    policy: Literal["none", "rand_augment", "trivial_augment"] = "none"
    """torchvision's RandAugment or TrivialAugmentWide, for uint8 images of 1 or 3 channels."""
    mixup: Annotated[NonNegativeFloat, Field(le=100)] = 0.0
    """alpha of Beta(alpha, alpha), e.g. 0.2, for floats and images. 0: no mixup. A sample is mixed
    with one of its own micro-batch, so results differ with the number of workers."""
    cutmix: Annotated[NonNegativeFloat, Field(le=100)] = 0.0
    """alpha as for mixup, e.g. 1. 0: no cutmix. With both, each half of the steps."""


class Augment(BatchAugment):
    """Random changes to training images; applied to batches on the device for in-memory sets."""

    crop_padding: NonNegativeInt = Field(0, le=64)
    """Pixels of padding before a random crop to the old size. 0: no crop."""
    flip: bool = False
    """Mirror left-right with probability 0.5."""


def _default_augment(section: dict[str, Any]) -> Augment:
    is_cifar = section.get("name") in ("cifar10", "cifar100")
    return Augment(crop_padding=4, flip=True) if is_cifar else Augment()


@dataclass(frozen=True)
class HoldOut:
    """How much of the training set is the validation split, and how long it is held out.

    `fraction` of the samples, rounded down, at most 5,000. With `only_in_search` only
    candidates and epochs that the policy chooses do not train on them.
    """

    fraction: float
    only_in_search: bool = False

    def count(self, size: int) -> int:
        """Return the size of the validation split of `size` samples; at least 1 unless none."""
        if self.fraction == 0:
            return 0
        return max(1, min(int(self.fraction * size), _MAX_VALIDATION_SAMPLES))


class _DataSection(NamedSection):
    """What kinds of data can do.

    `on_nodes`: each worker and slot reads the samples itself. `any_samples`: with a task of the
    user's own, samples are any nesting of tensors.
    """

    on_nodes: ClassVar[bool] = False
    any_samples: ClassVar[bool] = False

    validation_fraction: Fraction | None = None
    """Fraction of the training set held out to score candidates (the validation split), at most
    5,000 samples: during the training, or with policy stpt_horizon during the search and, with
    `weight_decay: auto`, half of the training. Default: 0.1 where something is decided by it."""
    sampler: NameOrFunction = "random"
    """Samples of an epoch. random: each once. balanced: equally many of each class, so those of
    small classes come several times. Or package.module:function: called with (samples, epoch,
    random), the numbers of the samples and a numpy Generator, it returns as many of them in the
    order to train."""
    drop_last: bool = True
    """Leave out the samples of an epoch, others each time, that do not fill a global batch. false:
    they are a last, smaller update."""
    normalize: Literal["auto", "none"] | tuple[list[Float], list[Float]] = "auto"
    """auto: by mean and deviation of each channel over the training set (image files: ImageNet's;
    float arrays, own Datasets: not). [[means], [deviations]]: by these, for values in 0..1."""

    @property
    def is_balanced(self) -> bool:
        return self.sampler == "balanced"

    def files(self) -> Iterable[tuple[str, str]]:
        """Yield field and path of the files and folders that must be there, and of URIs."""
        return ()

    def broken_rules(self) -> Iterator[BrokenRule]:
        if self.sampler not in ("random", "balanced") and not is_function_name(self.sampler):
            yield "sampler", "must be random, balanced or package.module:function"


class ArraySetData(_DataSection):
    """A public image set that fits in memory."""

    name: ArraySet
    """digits comes with this package, the others with torchvision."""
    root: LocalPath = "~/.cache/raytrain_opt"
    """Folder of the torchvision data sets."""
    download: bool = False
    """Download the data set if it is missing."""
    augment: Augment = Field(default_factory=_default_augment)
    """Default: crop_padding 4 and flip for CIFAR, which a section replaces; none for the
    others."""


class ArraysData(_DataSection):
    """Arrays of your own as .npy files: x [samples, ...] and y [samples], the class numbers."""

    download: ClassVar[bool] = False

    name: Literal["arrays"]
    train: tuple[LocalPath, LocalPath]
    """Paths of x and y of the training set."""
    test: tuple[LocalPath, LocalPath]
    """Paths of x and y of the test set."""
    augment: Augment = Field(default_factory=Augment)
    """Only for uint8 images, [samples, height, width, channels] or with channels first."""

    def files(self) -> Iterator[tuple[str, str]]:
        for split, paths in (("train", self.train), ("test", self.test)):
            yield from ((f"data.{split}.{i}", path) for i, path in enumerate(paths))


class LoaderSection(_DataSection):
    """Samples that are read one at a time."""

    download: ClassVar[bool] = False
    on_nodes: ClassVar[bool] = True

    loader_workers: Literal["auto"] | Annotated[NonNegativeInt, Field(le=256)] = "auto"
    """Loader processes per worker and slot; 0: load in the process itself. auto: 2, and more when
    loading a batch takes longer than computing one, up to its compute threads
    (workers.threads)."""
    augment: BatchAugment = Field(default_factory=BatchAugment)
    """Applied to samples as they are read."""
    on_unreadable: Literal["error", "skip"] = "error"
    """A sample that cannot be read. error: stop and name it; skip: leave it out."""


class ImageFolderData(LoaderSection):
    """Image files in the layout of ImageNet, root/train/<class>/*, or listed in a CSV file."""

    name: Literal["image_folder"]
    root: LocalPath
    """Folder of the images, at the same path on every node."""
    labels: Location | None = None
    """Path or URI of a CSV file with the columns file (below root), label, and split (train, val
    or test). Default: the folders of the images are splits and labels."""
    train_split: Location = "train"
    """Folder of the training set, below root."""
    test_split: Location = "val"
    """Folder of the test set, below root."""
    image_size: PositiveInt = Field(224, le=4096)
    """Height and width of the images given to the model, in pixels."""
    random_crop: bool = True
    """Train on random crops, mirrored at random; false: the center crop."""

    def files(self) -> Iterator[tuple[str, str]]:
        yield "data.root", self.root
        if self.labels is not None:
            yield "data.labels", self.labels
            return
        for split in ("train_split", "test_split"):
            yield f"data.{split}", f"{self.root}/{getattr(self, split)}"

    def broken_rules(self) -> Iterator[BrokenRule]:
        yield from super().broken_rules()
        if self.labels is not None and (self.train_split, self.test_split) != ("train", "val"):
            yield "labels", "has a column split; remove train_split and test_split"


class ShardsData(LoaderSection):
    """Images in tar files (WebDataset format), local or in an object storage."""

    name: Literal["shards"]
    train: Location
    """Path or URI of the training shards, {000..511} for numbers; see `raytrain-opt shard`."""
    test: Location
    """The shards of the test set."""
    image_size: PositiveInt = Field(224, le=4096)
    """Height and width of the images given to the model, in pixels."""
    cache: Location = "~/.cache/raytrain_opt/shards"
    """Folder for the indices of shards that have none beside them."""

    def files(self) -> Iterator[tuple[str, str]]:
        paths = (("data.train", self.train), ("data.test", self.test))
        yield from (pair for pair in paths if "://" in pair[1])  # others may have {…}


class DatasetData(LoaderSection):
    """Data of your own: a function returning (train, test), torch Datasets of (x, label)."""

    any_samples: ClassVar[bool] = True

    name: NameOrInstance
    """package.module:function; from Python also the two Datasets."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""
    num_classes: PositiveInt | None = None
    """Default: num_classes or len(classes) of the training Dataset."""
    collate: NameOrFunction | None = None
    """package.module:function, which makes a batch of a list of samples, such as padded texts.
    Default: collate_fn of the training Dataset, else the stacked samples."""
    group_by_length: PositiveInt | None = None
    """Number of global batches, such as 50, whose samples are sorted by length, so that batches
    need little padding. Needs `lengths` of the training Dataset. Default: not sorted."""


def _data_kind(value: Any) -> str | None:
    """Return the tag of the section that a name selects; None if it selects none."""
    section = vars(value) if isinstance(value, _DataSection) else value
    name = section.get("name") if isinstance(section, dict) else section
    if name in ARRAY_SETS:
        return "ArraySetData"
    if name in DATA_NAMES:
        return str(name)
    is_missing = isinstance(section, dict) and "name" not in section
    return None if is_missing or (isinstance(name, str) and ":" not in name) else "DatasetData"


DataSection = Annotated[
    Annotated[ArraySetData, Tag("ArraySetData")]
    | Annotated[ArraysData, Tag("arrays")]
    | Annotated[ImageFolderData, Tag("image_folder")]
    | Annotated[ShardsData, Tag("shards")]
    | Annotated[DatasetData, Tag("DatasetData")],
    Discriminator(
        _data_kind,
        custom_error_type="union_tag_name",
        custom_error_message="must be a kind of data",
        custom_error_context={
            "discriminator": "name",
            "expected_tags": ", ".join(map(repr, (*DATA_NAMES, "package.module:function"))),
        },
    ),
]
