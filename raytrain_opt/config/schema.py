"""The job file: every field, its meaning, unit and default. Validated whole before a start.

`Job` is the root. Unknown keys are errors. Rules that need two fields are validators here,
so that `raytrain-opt validate` finds everything that can be found without data or a cluster.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    field_serializer,
    field_validator,
    model_validator,
)

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]

# A name, or (from Python only) the function itself.
NameOrFunction = Annotated[
    str | Callable[..., Any],
    Field(
        json_schema_extra={"type": "string"},
    ),
]

ARRAY_SETS = ("digits", "mnist", "fashion_mnist", "cifar10", "cifar100")
LR_SETS: dict[str, tuple[float, ...]] = {
    "alpha_study": (10.0, 5.0, 3.0, 1.5, 1.0, 0.9, 0.5, 0.4),
    "narrow": (1.25, 1.17, 1.08, 1.00, 0.95, 0.90, 0.85, 0.80),
    "middle": (2.50, 2.00, 1.50, 1.00, 0.85, 0.70, 0.55, 0.40),
    "wide": (5.00, 3.67, 2.33, 1.00, 0.80, 0.60, 0.40, 0.20),
}


def function_name(function: Callable[..., Any]) -> str:
    """`package.module:function`, the form in which a function stands in a job file."""
    return f"{function.__module__}:{function.__qualname__}"


class Section(BaseModel):
    """A part of the job file: unknown keys are refused, values never change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    if TYPE_CHECKING:
        # Values are given as in the job file (`model="resnet8"`), which is more than the types
        # of the fields allow; pydantic checks them.
        def __init__(self, **values: Any) -> None: ...


class _Named(Section):
    """A section that may be written as a bare name: `model: resnet8`."""

    @model_validator(mode="before")
    @classmethod
    def _from_bare_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) or callable(value) else value

    @field_serializer("name", check_fields=False)
    def _name_as_text(self, name: str | Callable[..., Any]) -> str:
        return name if isinstance(name, str) else function_name(name)


class ModelSection(_Named):
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
        0, description="Pad by this many pixels and crop back at a random place. 0: no crop."
    )
    flip: bool = Field(False, description="Mirror left-right with probability one half.")


class _DataSection(_Named):
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
        2, description="Loader processes for each worker and slot; 0 loads in the process."
    )
    prefetch: PositiveInt = Field(2, description="Batches each loader process keeps ready.")
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
    image_size: PositiveInt = Field(224, description="Side of the square given to the model.")


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


class OptimizerSection(_Named):
    """Any optimiser of torch.optim; its learning rate is what the policy sets."""

    name: str = Field("SGD", description="Class name in torch.optim.")
    args: dict[str, Any] = Field(
        default_factory=lambda: {"momentum": 0.9, "weight_decay": 1e-4},
        description="Its keyword arguments, all but lr.",
    )

    @field_validator("args")
    @classmethod
    def _no_lr(cls, args: dict[str, Any]) -> dict[str, Any]:
        if "lr" in args:
            raise ValueError("lr is set by the learning-rate policy: use learning_rate.initial")
        return args

    @model_validator(mode="before")
    @classmethod
    def _defaults_are_sgds(cls, value: Any) -> Any:
        if isinstance(value, dict) and "args" not in value and value.get("name", "SGD") != "SGD":
            return {**value, "args": {}}
        return value


class LossSection(_Named):
    """What is minimised."""

    name: NameOrFunction = Field(
        "cross_entropy",
        description=(
            "cross_entropy, or package.module:function taking (output, labels) and returning "
            "the mean over the batch."
        ),
    )
    label_smoothing: Fraction = Field(0.0, description="For cross_entropy.")

    @model_validator(mode="after")
    def _smoothing_is_ours(self) -> LossSection:
        if self.label_smoothing and self.name != "cross_entropy":
            raise ValueError("label_smoothing belongs to cross_entropy; your loss does its own")
        return self


class Warmup(Section):
    """A gentle start: the rate climbs to learning_rate.initial, or stays low, then jumps."""

    epochs: NonNegativeInt = Field(0, description="Whole epochs; 0: none.")
    lr: PositiveFloat | None = Field(
        None,
        description=(
            "Rate at the start (linear) or all along. Default: a twentieth of "
            "learning_rate.initial, the paper's 0.005 for 0.1."
        ),
    )
    shape: Literal["linear", "constant"] = Field("linear", description="How it gets there.")

    def start_lr(self, initial: float) -> float:
        """The rate it starts at, on its way to `initial`."""
        return initial / 20 if self.lr is None else self.lr


class StptPolicy(Section):
    """Choose the rate each epoch by short pre-training of candidates (Yamada et al.)."""

    policy: Literal["stpt"]
    initial: PositiveFloat = Field(0.1, description="Base learning rate of the first round.")
    candidates: Literal["narrow", "middle", "wide", "alpha_study", "mix"] | list[PositiveFloat] = (
        Field(
            "mix",
            description=(
                "Multipliers of the base rate: one of the paper's sets, its Mix schedule "
                "(boundaries scaled to the number of epochs), or your own list."
            ),
        )
    )
    include: list[PositiveFloat] = Field(
        default_factory=list, description="Multipliers always among the candidates, e.g. [1.0]."
    )
    alpha: PositiveInt | Annotated[float, Field(gt=0, le=1)] = Field(
        0.08,
        description="Length of a pre-training: iterations (200) or share of an epoch (0.08).",
    )
    candidate_batch: Literal["global", "local"] = Field(
        "global",
        description=(
            "global: a candidate processes the whole global batch each iteration; local: one "
            "worker's share of it, with the rate scaled linearly."
        ),
    )
    score: Literal["val_accuracy", "val_loss"] = Field(
        "val_accuracy", description="What ranks the candidates, on the selection split."
    )
    max_halvings: NonNegativeInt = Field(
        5, description="Rounds repeated at half the base rate when every candidate diverges."
    )
    warmup: Warmup | None = Field(
        None,
        description="Epochs without candidates. Default: 4/40 of the epochs for mix, else none.",
    )

    @field_validator("candidates")
    @classmethod
    def _some_and_distinct(cls, value: Any) -> Any:
        if isinstance(value, list) and (not value or len(set(value)) != len(value)):
            raise ValueError("give at least one multiplier, each once")
        return value


class SchedulePolicy(Section):
    """A learning rate written down beforehand; no candidates."""

    policy: Literal["schedule"]
    initial: PositiveFloat = Field(0.1, description="Rate after the warm-up; the schedule's peak.")
    shape: Literal["constant", "step", "multistep", "linear", "polynomial", "cosine"] = Field(
        "cosine", description="How the rate falls after the warm-up."
    )
    final: NonNegativeFloat = Field(
        0.0, description="Rate at the end (linear, polynomial, cosine)."
    )
    gamma: PositiveFloat = Field(0.1, description="Factor at each step (step, multistep).")
    every_epochs: PositiveInt = Field(30, description="Epochs between steps (step).")
    milestones: list[PositiveInt] = Field(
        default_factory=list, description="Epochs after which the rate is multiplied (multistep)."
    )
    power: PositiveFloat = Field(2.0, description="Exponent (polynomial).")
    warmup: Warmup = Field(
        default_factory=lambda: Warmup(epochs=0, lr=None, shape="linear"),
        description="The gentle start.",
    )

    @model_validator(mode="after")
    def _milestones_where_needed(self) -> SchedulePolicy:
        if (self.shape == "multistep") != bool(self.milestones):
            raise ValueError("milestones go with shape multistep, and it needs at least one")
        if self.milestones != sorted(set(self.milestones)):
            raise ValueError("milestones must increase")
        return self


class ReplayPolicy(Section):
    """Train with the schedule that an earlier run found; no candidates."""

    policy: Literal["replay"]
    schedule: str = Field(description="Path of that run's schedule.json.")


LearningRateSection = Annotated[
    StptPolicy | SchedulePolicy | ReplayPolicy, Field(discriminator="policy")
]


class WorkersSection(Section):
    """The data-parallel Ray Train workers."""

    count: PositiveInt = Field(1, description="How many; the global batch is split evenly.")
    use_gpu: bool | Literal["auto"] = Field(
        "auto", description="auto: on GPUs when the cluster has any, else on CPU."
    )
    resources: dict[str, PositiveFloat] | None = Field(
        None,
        description=(
            "Ray resources of each. Default: 0.6 GPU (so that a slot shares the device and no "
            "second worker does) or, on CPU, 0.6 of an even share of the CPUs, at most 1."
        ),
    )
    threads: PositiveInt | None = Field(
        None, description="Compute threads on CPU. Default: the node's cores, shared evenly."
    )


class SlotsSection(Section):
    """The resident Ray Tune processes in which candidates are pre-trained."""

    count: PositiveInt | None = Field(
        None, description="How many. Default: one per candidate, as many as fit."
    )
    resources: dict[str, PositiveFloat] | None = Field(
        None, description="Ray resources of each. Default: 0.4 GPU or 0.4 of a CPU share."
    )


class CheckpointSection(Section):
    """Which commits stay in the run directory."""

    every_epochs: PositiveInt = Field(1, description="Commit after every this many epochs.")
    keep: PositiveInt | Literal["all"] = Field(2, description="How many of the latest stay.")
    keep_best: bool = Field(True, description="Keep the one with the best test accuracy too.")


class EvaluateSection(Section):
    """When the test set is evaluated."""

    every_epochs: PositiveInt = Field(1, description="And always after the last epoch.")
    batch_size_per_worker: PositiveInt | None = Field(
        None, description="Default: the larger of the training share and 256."
    )


class LimitsSection(Section):
    """How long to wait for what, and how often to start again. No wait is without a limit."""

    start_s: PositiveFloat = Field(600.0, description="For all workers and slots to be ready.")
    command_s: PositiveFloat = Field(
        7200.0, description="For one phase (a pre-training, a main training, an evaluation)."
    )
    stop_s: PositiveFloat = Field(20.0, description="For the pools to end before they are killed.")
    max_restarts: NonNegativeInt = Field(
        3, description="Times a worker group or a slot is started again after a process died."
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
    epochs: PositiveInt = Field(description="Passes over the training set.")
    global_batch_size: PositiveInt = Field(
        description="Samples of one update, over all workers; a multiple of workers.count."
    )
    learning_rate: LearningRateSection = Field(
        default_factory=lambda: StptPolicy(policy="stpt"), description="How the rate is chosen."
    )
    optimizer: OptimizerSection = Field(
        default_factory=OptimizerSection, description="How gradients become updates."
    )
    loss: LossSection = Field(default_factory=LossSection, description="What is minimised.")
    seed: NonNegativeInt = Field(0, description="Of weights, order, augmentation and splits.")
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="bf16 and fp16: automatic mixed precision."
    )
    channels_last: bool = Field(True, description="Memory format of images and convolutions.")
    compile: bool = Field(False, description="Run the model through torch.compile.")
    workers: WorkersSection = Field(
        default_factory=WorkersSection, description="Data-parallel processes."
    )
    slots: SlotsSection = Field(default_factory=SlotsSection, description="Candidate processes.")
    storage_path: str = Field(
        "runs", description="Folder or URI (s3://…, gs://…) under which run directories are made."
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

    @model_validator(mode="after")
    def _batch_splits_evenly(self) -> Job:
        if self.global_batch_size % self.workers.count:
            raise ValueError(
                f"global_batch_size: {self.global_batch_size} does not split evenly over "
                f"{self.workers.count} workers"
            )
        return self

    @model_validator(mode="after")
    def _warmup_ends(self) -> Job:
        warmup = getattr(self.learning_rate, "warmup", None)
        if warmup is not None and warmup.epochs > self.epochs:
            raise ValueError(
                f"learning_rate.warmup.epochs: {warmup.epochs} is more than the {self.epochs} "
                "epochs of the job"
            )
        return self

    @model_validator(mode="after")
    def _candidates_have_a_split(self) -> Job:
        if self.learning_rate.policy == "stpt" and self.data.selection_fraction == 0:
            raise ValueError(
                "data.selection_fraction: policy stpt scores candidates on this split; give it "
                "more than 0"
            )
        return self
