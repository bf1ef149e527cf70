"""The job file: every field, its meaning, unit and default. Validated whole before a start.

`Job` is the root. Unknown keys are errors. Rules that need two fields are validators here,
so that `raytrain-opt validate` finds everything that can be found without data or a cluster.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from raytrain_opt.config.asynchronous import async_rules
from raytrain_opt.config.batch_size import BatchSizeSection
from raytrain_opt.config.learning_rate import HorizonPolicy, LearningRateSection
from raytrain_opt.config.optimizer import (
    BatchNormSection,
    OptimizerSection,
    ParallelSection,
    RampStep,
)
from raytrain_opt.config.pools import LimitsSection, SlotsSection, WorkersSection
from raytrain_opt.config.section import (
    BrokenRule,
    Fraction,
    NamedSection,
    NameOrFunction,
    NonNegativeInt,
    PositiveInt,
    Section,
)

ARRAY_SETS = ("digits", "mnist", "fashion_mnist", "cifar10", "cifar100")


class ModelSection(NamedSection):
    """Which network to train."""

    name: NameOrFunction = Field(
        description=(
            "resnet8, cifar_resnet18, cifar_resnet50, vgg16_bn (the paper's, for small images), "
            "small_cnn, any torchvision classification model by its torchvision name, or your "
            "own as package.module:function."
        )
    )
    args: dict[str, Any] = Field(
        default_factory=dict,
        description="Keyword arguments of the model's constructor or of your function.",
    )


class Augment(Section):
    """Random changes to training images. Batched on the device for in-memory sets."""

    crop_padding: NonNegativeInt = Field(
        0,
        le=64,
        description="Pad by this many pixels and crop back at a random place. 0: no crop.",
    )
    flip: bool = Field(False, description="Mirror left-right with probability one half.")


class _DataSection(NamedSection):
    selection_fraction: Fraction = Field(
        0.1,
        description=(
            "Share of the training set that nobody trains on and that candidates are scored on."
        ),
    )
    selection_max_samples: PositiveInt = Field(
        5000, description="Upper limit of that split, in samples."
    )
    normalize: Literal["auto", "none"] | tuple[list[float], list[float]] = Field(
        "auto",
        description=(
            "auto: by channel mean and standard deviation of the training set (ImageNet's for "
            "image_folder; float arrays stay as they are); none; or [[means], [deviations]] "
            "for values scaled to 0..1."
        ),
    )


class ArraySetData(_DataSection):
    """A public image set that fits in memory."""

    name: Literal["digits", "mnist", "fashion_mnist", "cifar10", "cifar100"] = Field(
        description="digits comes with scikit-learn; the others are read through torchvision."
    )
    root: str = Field("~/.cache/raytrain_opt", description="Folder of the torchvision sets.")
    download: bool = Field(False, description="Fetch the set when it is not there.")
    augment: Augment | None = Field(
        None, description="Default: crop 4 and flip for CIFAR, nothing for the others."
    )


class ArraysData(_DataSection):
    """Your own arrays as .npy pairs: x [samples, ...], y [samples] of class numbers."""

    name: Literal["arrays"]
    train: tuple[str, str] = Field(description="Paths of x and y to train on.")
    test: tuple[str, str] = Field(description="Paths of x and y to evaluate on.")
    num_classes: PositiveInt | None = Field(
        None, description="Default: the largest label of the training set plus one."
    )
    augment: Augment = Field(
        default_factory=lambda: Augment(crop_padding=0, flip=False),
        description="For uint8 images [samples, height, width, channels] only.",
    )


class _LoaderSection(_DataSection):
    loader_workers: NonNegativeInt = Field(
        2,
        le=256,
        description="Loader processes for each worker and slot; 0 loads in the process.",
    )
    prefetch: PositiveInt = Field(
        2, le=100, description="Batches each loader process keeps ready."
    )
    corrupt: Literal["error", "skip"] = Field(
        "error",
        description="A sample that cannot be read: stop with its name, or skip and count it.",
    )


class ImageFolderData(_LoaderSection):
    """Folders of images: root/train/<class>/*, root/val/<class>/* (the ImageNet layout)."""

    name: Literal["image_folder"]
    root: str = Field(description="Folder that holds the two splits; on every node.")
    train_split: str = Field("train", description="Folder to train on.")
    test_split: str = Field("val", description="Folder to evaluate on.")
    image_size: PositiveInt = Field(
        224, le=4096, description="Side of the square given to the model, in pixels."
    )


class DatasetData(_LoaderSection):
    """Your own data: a function that returns (train, test) torch Datasets of (x, label)."""

    name: NameOrFunction = Field(description="package.module:function.")
    args: dict[str, Any] = Field(default_factory=dict, description="Its keyword arguments.")
    num_classes: PositiveInt | None = Field(
        None, description="Default: the train set's num_classes or len(classes)."
    )


def _data_kind(value: Any) -> str:
    name = value if isinstance(value, str) or callable(value) else None
    if isinstance(value, dict):
        name = value.get("name")
    elif name is None:
        name = getattr(value, "name", None)
    if name in ARRAY_SETS:
        return "array_set"
    if name in ("arrays", "image_folder"):
        return str(name)
    return "dataset"


DataSection = Annotated[
    Annotated[ArraySetData, Tag("array_set")]
    | Annotated[ArraysData, Tag("arrays")]
    | Annotated[ImageFolderData, Tag("image_folder")]
    | Annotated[DatasetData, Tag("dataset")],
    Discriminator(_data_kind),
]


class LossSection(NamedSection):
    """What is minimised."""

    name: NameOrFunction = Field(
        "cross_entropy",
        description=(
            "cross_entropy, or package.module:function taking (output, labels) and returning "
            "the mean over the batch."
        ),
    )
    label_smoothing: Fraction = Field(0.0, description="For cross_entropy.")

    def broken_rules(self) -> Iterator[BrokenRule]:
        """A loss of the user's own knows no smoothing."""
        if self.label_smoothing and self.name != "cross_entropy":
            yield "label_smoothing", "belongs to cross_entropy; your loss does its own"


class CheckpointSection(Section):
    """Which commits are made, and which stay in the run directory. One within an epoch, after a
    round of candidates, is always made, and stays until the next one is there.
    """

    every_epochs: PositiveInt = Field(1, description="Commit after every this many epochs.")
    keep: PositiveInt | Literal["all"] = Field(2, description="How many of the latest stay.")
    keep_best: bool = Field(True, description="Keep the one with the best test accuracy too.")


class EvaluateSection(Section):
    """When the test set is evaluated."""

    every_epochs: PositiveInt = Field(1, description="And always after the last epoch.")
    batch_size_per_worker: PositiveInt | None = Field(
        None, description="Default: the larger of the training share and 256."
    )


class Job(Section):
    """One training: what to train, on what, how, and where its results go."""

    name: str = Field(
        "run",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        max_length=100,
        description="Start of the run directory's name.",
    )
    model: ModelSection = Field(description="Which network.")
    data: DataSection = Field(description="On which data.")
    epochs: PositiveInt = Field(le=100_000, description="Passes over the training set.")
    global_batch_size: PositiveInt = Field(
        description="Samples of one update, over all workers; a multiple of workers.count."
    )
    learning_rate: LearningRateSection = Field(
        default_factory=lambda: HorizonPolicy(policy="stpt_horizon"),
        description="How the rate is chosen.",
    )
    batch_size_search: BatchSizeSection | None = Field(
        None,
        description=(
            "Choose the batch size before the training, by probes; global_batch_size and "
            "learning_rate.initial then follow. Default: no search."
        ),
    )
    optimizer: OptimizerSection = Field(
        default_factory=OptimizerSection, description="How gradients become updates."
    )
    batch_norm: BatchNormSection = Field(
        default_factory=lambda: BatchNormSection(momentum=None),
        description="Batch normalisation over several workers.",
    )
    batch_ramp: list[RampStep] = Field(
        default_factory=list,
        description="Grow the global batch at these epochs (Smith et al.). Default: never.",
    )
    ramp_by: Literal["accumulation", "worker"] = Field(
        "accumulation",
        description=(
            "accumulation: a worker's batch stays, several make one update; worker: its batch "
            "grows, which needs the memory."
        ),
    )
    loss: LossSection = Field(default_factory=LossSection, description="What is minimised.")
    seed: NonNegativeInt = Field(
        0, lt=2**63, description="Of weights, order, augmentation and splits."
    )
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="bf16 and fp16: automatic mixed precision."
    )
    channels_last: bool = Field(True, description="Memory format of images and convolutions.")
    compile: bool = Field(False, description="Run the model through torch.compile.")
    workers: WorkersSection = Field(
        default_factory=WorkersSection, description="Data-parallel processes."
    )
    parallel: ParallelSection = Field(
        default_factory=ParallelSection, description="How they exchange gradients."
    )
    slots: SlotsSection = Field(default_factory=SlotsSection, description="Candidate processes.")
    storage_path: str = Field(
        "runs", description="Folder or URI (s3://…, gs://…) under which run directories are made."
    )
    resume: Literal["never", "auto"] = Field(
        "never",
        description=(
            "auto: go on with the newest run of this name below storage_path that has commits and "
            "no result, when there is one; never: start a new run."
        ),
    )
    checkpoint: CheckpointSection = Field(
        default_factory=CheckpointSection, description="Which commits stay."
    )
    evaluate: EvaluateSection = Field(
        default_factory=EvaluateSection, description="When the test set is evaluated."
    )
    limits: LimitsSection = Field(default_factory=LimitsSection, description="Time limits.")

    @property
    def batch_size_per_worker(self) -> int:
        """Samples of one update in one worker."""
        return self.global_batch_size // self.workers.count

    def broken_rules(self) -> Iterator[BrokenRule]:
        """Rules that need two sections."""
        yield from self._batch_rules()
        yield from self._rate_rules()
        yield from self._ramp_rules()
        yield from self._device_rules()
        yield from async_rules(self)

    def _batch_rules(self) -> Iterator[BrokenRule]:
        if self.global_batch_size % self.workers.count:
            yield (
                "global_batch_size",
                f"{self.global_batch_size} does not split evenly over {self.workers.count} "
                "workers; give a multiple of workers.count",
            )
        if self.batch_norm.sync and self.workers.least < self.workers.count:
            yield (
                "workers.min_count",
                "fewer workers may compute unequal parts of a batch, and batch_norm.sync needs "
                "all of them in every part; leave one of the two out",
            )
        if self.batch_size_search is not None and self.learning_rate.policy == "replay":
            yield (
                "batch_size_search",
                "a replayed schedule belongs to the batch size it was found with; leave the "
                "search out",
            )

    def _rate_rules(self) -> Iterator[BrokenRule]:
        warmup = getattr(self.learning_rate, "warmup", None)
        if warmup is not None and warmup.epochs > self.epochs:
            yield (
                "learning_rate.warmup.epochs",
                f"{warmup.epochs} is more than the {self.epochs} epochs of the job",
            )
        policy = self.learning_rate.policy
        if policy in ("stpt", "stpt_horizon") and self.data.selection_fraction == 0:
            yield (
                "data.selection_fraction",
                f"policy {policy} scores candidates on this split; give it more than 0",
            )

        if getattr(self.learning_rate, "search_weight_decay", False):
            # torch's own default is 0 but for these.
            default = 0.01 if self.optimizer.name in ("AdamW", "NAdam") else 0
            if not self.optimizer.args.get("weight_decay", default):
                yield (
                    "learning_rate.search_weight_decay",
                    "begins at optimizer.args.weight_decay, which has to be above 0",
                )

    def _ramp_rules(self) -> Iterator[BrokenRule]:
        ramp, warmup = self.batch_ramp, getattr(self.learning_rate, "warmup", None)
        if any(b.epoch <= a.epoch or b.factor <= a.factor for a, b in pairwise(ramp)):
            yield "batch_ramp", "epochs and factors must rise from one entry to the next"
        last = max((step.epoch for step in ramp), default=0)
        if last > self.epochs:
            yield "batch_ramp", f"epoch {last} is after the last of the job's {self.epochs}"
        if ramp and warmup is not None and ramp[0].epoch <= warmup.epochs:
            yield (
                "batch_ramp",
                f"begins in epoch {ramp[0].epoch}, within the warm-up of {warmup.epochs} "
                "epochs; let it begin later",
            )

    def _device_rules(self) -> Iterator[BrokenRule]:
        for pool in ("workers", "slots"):
            gpus = (getattr(self, pool).resources or {}).get("GPU", 0)
            if gpus > 1 and gpus != int(gpus):
                yield f"{pool}.resources.GPU", "above 1 it must be a whole number"
        if self.batch_norm.sync and self.workers.use_gpu is False and self.workers.count > 1:
            yield (
                "batch_norm.sync",
                "torch's SyncBatchNorm needs GPUs, and workers.use_gpu is false; leave it out",
            )
