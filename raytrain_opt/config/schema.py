"""The job file: every field with its meaning, unit and default; see also `rules`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from raytrain_opt.config import rules
from raytrain_opt.config.batch_size import BatchSizeSection
from raytrain_opt.config.data import DataSection, HoldOut
from raytrain_opt.config.learning_rate import (
    FINE_TUNING_DIVISOR,
    SGD_LR,
    HorizonPolicy,
    LearningRateSection,
    SearchOn,
)
from raytrain_opt.config.section import (
    BrokenRule,
    Duration,
    Float,
    Fraction,
    Location,
    NamedSection,
    NameOrFunction,
    NameOrInstance,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seconds,
    Section,
    is_function_name,
)
from raytrain_opt.config.updates import (
    BatchNormSection,
    OptimizerChoiceSection,
    OptimizerSection,
    ParallelSection,
    RampStep,
)
from raytrain_opt.errors import JobError, Problem

Precision = Literal["auto", "fp32", "fp32_strict", "bf16", "fp16"]
Compile = Literal["auto", "none", "default", "max-autotune"]
CLASSIFICATION, CROSS_ENTROPY = "classification", "cross_entropy"


class ModelSection(NamedSection):
    """The network to train."""

    name: NameOrInstance
    """resnet8, resnet20, cifar_resnet18, cifar_resnet45, cifar_resnet50, vgg16_bn, vgg16_one_bn
    (for small images), resnet45 (for large ones), small_cnn, a classification model of torchvision
    by its name there, or a function of your own as package.module:function; from Python also a
    module."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the model's constructor or function."""
    weights: Location | None = None
    """A file (safetensors, or a state_dict of torch), a folder of timm or transformers, a run
    directory or URI, or the name of torchvision's weights for this network, such as IMAGENET1K_V1.
    A last layer for another number of classes starts anew. Default: random weights."""
    freeze: list[str] = Field(default_factory=list)
    """Patterns of parameter names that are not trained, such as layer1.*; BatchNorm layers among
    them keep their statistics."""


class TaskSection(NamedSection):
    """What is learned: classification, or a task of your own."""

    name: NameOrInstance = CLASSIFICATION
    """classification, or package.module:Class with the methods training_loss and
    validation_metrics (from Python also an object); see tasks.md."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class."""

    @property
    def is_classification(self) -> bool:
        return self.name == CLASSIFICATION

    def require_classification(self, purpose: str) -> None:
        """Raise JobError for a task of the user's own."""
        if not self.is_classification:
            rule = f"{purpose} needs task: classification, where outputs are scores of classes"
            raise JobError([Problem("task.name", rule, repr(self.name))])


class LossSection(NamedSection):
    """The loss of classification."""

    name: NameOrInstance = CROSS_ENTROPY
    """cross_entropy, or package.module:function: called with (output, labels), it returns the mean
    over the batch; from Python also a module."""
    label_smoothing: Fraction = 0.0
    """Only for cross_entropy."""
    class_weights: Literal["balanced"] | list[PositiveFloat] | None = None
    """Only for cross_entropy: a factor of the loss of each sample, by its class. balanced: samples
    / (classes x samples of the class) of the training set. Default: 1."""

    @property
    def is_cross_entropy(self) -> bool:
        return self.name == CROSS_ENTROPY

    def broken_rules(self) -> Iterator[BrokenRule]:
        for name in ("label_smoothing", "class_weights"):
            if getattr(self, name) and not self.is_cross_entropy:
                yield name, "applies to cross_entropy only; your own loss can do the same"


class CheckpointSection(Section):
    """Which checkpoints are saved and kept.

    Those within an epoch, and after each round of candidates, are kept until the next one exists.
    """

    every: PositiveInt | Duration = 60.0
    """Time, such as 5min, or number of steps (an integer) until the next checkpoint, also within
    an epoch: what a failure costs at most."""
    every_epochs: PositiveInt = 1
    """Epochs between checkpoints. Of three sets, the best epoch so far is always saved."""
    keep: PositiveInt | Literal["all"] = 2
    """Number of latest checkpoints to keep, beside the one that is the best on the test set."""


class EvaluateSection(Section):
    """When the model is evaluated on the test set."""

    every_epochs: PositiveInt = 1
    """Epochs between evaluations; the last epoch is always evaluated."""
    batch_size_per_worker: PositiveInt | None = None
    """Default: the batch size of training, but at least 256."""


def _default_optimizer(job: dict[str, Any]) -> OptimizerChoiceSection:
    """Return the choice that the search has, or SGD without one; `job`: the sections above."""
    searches = job and job["learning_rate"].searches_first and job["parallel"].common_steps
    return OptimizerChoiceSection(name="auto") if searches else OptimizerChoiceSection()


def _default_average(job: dict[str, Any]) -> Literal["auto"] | None:
    """Return the average that shows what a decaying rate will bring, or none."""
    averages = job and job["learning_rate"].is_found and job["parallel"].common_steps
    return "auto" if averages and not job["optimizer"].is_schedule_free else None


class TrackingSection(Section):
    """Trackers that follow the run."""

    mlflow: Location
    """MLflow's tracking URI: a server (https://…), sqlite:///FILE or a folder. Epochs are metrics
    of a run in the experiment of the job's name. Needs raytrain_opt[mlflow]."""


class StopSection(Section):
    """When a training ends before its last epoch."""

    target: Float | None = None
    """End when the metric of the task that decides is as good as this; with classification the
    accuracy, such as 0.93."""
    patience: PositiveInt | None = None
    """End after this many evaluated epochs without a better value. Only warns if the rate decays
    to the end, where most of the gain comes."""

    def broken_rules(self) -> Iterator[BrokenRule]:
        if self.target is None and self.patience is None:
            yield "target", "is required, unless patience is given"


def _refuse_parts(resources: dict[str, float]) -> dict[str, float]:
    if (gpus := resources.get("GPU", 0)) > 1 and gpus != int(gpus):
        raise ValueError("GPU must be an integer above 1")
    return resources


Resources = Annotated[dict[str, PositiveFloat], AfterValidator(_refuse_parts)]


class CountRange(Section):
    """As many workers as the cluster has room for: it may lose nodes and get others."""

    min: PositiveInt
    """Wait for nodes when there is room for fewer."""
    max: PositiveInt
    """Number of workers where the cluster has room."""


class WorkersSection(Section):
    """The data-parallel workers of Ray Train."""

    count: PositiveInt | Literal["auto"] | CountRange = "auto"
    """Number of workers, which share the global batch by speed. auto: the free GPUs, or fewer so
    that the number divides global_batch_size; without GPUs, 1. {min: 2, max: 8}: continue with
    fewer when a node is lost, and with more from the next checkpoint on."""
    use_gpu: bool | Literal["auto"] = "auto"
    """auto: use GPUs if the cluster has any, else the CPU."""
    resources: Resources | None = None
    """Ray resources of each worker. Default: a GPU, or 0.6 of it where there are slots, so that
    one fits on the same device; on CPU, 0.6 of the CPUs per worker, at most 0.6."""
    threads: Annotated[PositiveInt, Field(le=1024)] | None = None
    """Compute threads of a worker on CPU; slots share as many. Default: OMP_NUM_THREADS on one
    machine; else the cores of the node / count, or fewer if timed steps are as fast; on a Ray that
    runs already, its cores / count. A resume keeps the number."""

    def uses_gpu(self, available: bool) -> bool:
        """Return whether to train on GPUs; of `auto`, whether some are `available`."""
        return available if self.use_gpu == "auto" else self.use_gpu

    @property
    def size(self) -> int:
        """The largest number of workers; of `auto`, 1 until the cluster is known."""
        if isinstance(self.count, CountRange):
            return self.count.max
        return 1 if self.count == "auto" else self.count

    @property
    def min_workers(self) -> int:
        """The smallest number of workers that the job may continue with."""
        return self.count.min if isinstance(self.count, CountRange) else self.size

    @property
    def is_given(self) -> bool:
        """Whether the job says how many workers there are, at most."""
        return self.count != "auto"

    def settled(self, count: object, threads: int | None) -> WorkersSection:
        """Return the section with these in place of what it leaves open."""
        found = {} if self.is_given else {"count": count}
        return self.model_copy(update={**found, "threads": self.threads or threads})

    def broken_rules(self) -> Iterator[BrokenRule]:
        if self.min_workers > self.size:
            yield "count.min", f"is more than max, {self.size}"


class SlotsSection(Section):
    """The resident Ray Tune trials that train candidates."""

    count: PositiveInt | None = None
    """Number of slots. Default: one per candidate, if the cluster has room."""
    resources: Resources | None = None
    """Ray resources of each slot. Default: as for workers, with 0.4 for 0.6."""


class TimeoutsSection(Section):
    """How long to wait for processes. Every wait has a limit."""

    start_s: Seconds = 600.0
    """Until all workers and slots are ready."""
    no_progress_s: Seconds = 900.0
    """Without progress of a worker, slot or probe that has a command, of reading the data, or of
    writing a checkpoint."""
    stop_s: Seconds = 20.0
    """Until the current step is done after Ctrl-C or SIGTERM, and until the pools have ended."""


class Job(Section):
    """One training: model, data, method, and where the results are written.

    Raises JobError with everything that is wrong.
    """

    error = JobError

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)
    """First part of the run directory's name."""
    model: ModelSection
    """The network to train."""
    data: DataSection
    """The data to train and evaluate on."""
    epochs: Annotated[PositiveInt, Field(le=100_000)] | None = None
    """Passes over the training set. Either this or `train_for` is required."""
    train_for: Duration | None = None
    """Wall time of the run, start and search included, such as 45min or 1h30min: the schedule is
    laid out, from measured speed, to end within it. In place of `epochs`."""
    global_batch_size: PositiveInt
    """Samples per update over all workers; a multiple of workers.count."""
    learning_rate: LearningRateSection = Field(
        default_factory=lambda: HorizonPolicy(policy="stpt_horizon"), validate_default=True
    )
    """How the learning rate is chosen; by default by stpt_horizon."""
    batch_size_search: BatchSizeSection | None = None
    """Choose global_batch_size by probes before the training, and change learning_rate.initial
    accordingly; without `strategy` by throughput_knee. Default: no search."""
    parallel: ParallelSection = Field(default_factory=ParallelSection)
    """How workers exchange gradients."""
    optimizer: OptimizerChoiceSection = Field(default_factory=_default_optimizer)
    """The optimizer; its rate comes from learning_rate. Default: auto with policy stpt_horizon and
    synchronous workers, else SGD."""
    average: Literal["auto"] | Fraction | None = Field(default_factory=_default_average)
    """Evaluate and save an exponential moving average of the weights, with BatchNorm statistics
    taken at it. A number: weight of the average so far in each update, at most (1 + t) / (10 + t)
    in update t; 0.99 averages over about 100 updates. auto: over a quarter of the updates so far,
    times rate / highest rate. Default: auto with policies stpt_horizon and replay, unless the
    optimizer averages itself, else null: no average."""
    batch_norm: BatchNormSection = Field(default_factory=BatchNormSection)
    """Running averages of batch normalization."""
    batch_ramp: list[RampStep] = Field(default_factory=list)
    """Epochs at which the global batch grows, and factors (Smith et al.). Each worker keeps its
    batch size and accumulates gradients over several batches per update. Default: never."""
    task: TaskSection = Field(default_factory=TaskSection)
    """What is learned."""
    loss: LossSection = Field(default_factory=LossSection)
    """The loss to minimize in classification."""
    seed: NonNegativeInt = Field(0, lt=2**63)
    """Seed of weights, sample order, augmentation and splits."""
    precision: Precision = "auto"
    """auto: bf16 on GPUs that have it, else fp32. fp32: on GPUs with TF32, fp32_strict: without.
    bf16, fp16: automatic mixed precision. With fp16, all optimizers but SGD, Adam and AdamW wait
    for the GPU in each step."""
    channels_last: bool = True
    """Use the channels_last memory format for images and convolutions."""
    compile: Compile = "auto"
    """torch.compile for the model, in its mode default or max-autotune (without CUDA graphs).
    auto: default on GPUs for models with attention, else none. Compiled, dropout draws other
    random numbers."""
    workers: WorkersSection = Field(default_factory=WorkersSection)
    """The data-parallel training processes."""
    slots: SlotsSection = Field(default_factory=SlotsSection)
    """The processes that train candidates."""
    storage_path: Location = "runs"
    """Folder or URI (s3://, gs://, az://, abfss://) of run directories."""
    stop: StopSection | None = None
    """When the training ends early. Default: never."""
    resume: Literal["never", "auto"] = "never"
    """auto: resume the newest unfinished run of this name that has a checkpoint, if there is one.
    never: start a new run."""
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    """Which checkpoints are saved and kept."""
    evaluate: EvaluateSection = Field(default_factory=EvaluateSection)
    """When the test set is evaluated."""
    callbacks: list[NameOrFunction] = Field(default_factory=list)
    """Classes of your own, package.module:Class, that the driver calls after rounds, epochs,
    checkpoints and at the end; see raytrain_opt.Callback."""
    tracking: TrackingSection | None = None
    """Trackers that follow the run. Default: none."""
    max_restarts: NonNegativeInt = 3
    """How often the worker group, and each slot, is restarted after a process died. Then the run
    ends, or the other slots train the candidates."""
    timeouts: TimeoutsSection = Field(default_factory=TimeoutsSection)
    """Time limits, in seconds."""

    @property
    def initial_lr(self) -> float:
        """Return learning_rate.initial, or its default for optimizer and weights."""
        if (initial := self.learning_rate.initial) is not None:
            return initial
        usual = self.optimizers[0].traits.usual_lr if len(self.optimizers) == 1 else None
        return (usual or SGD_LR) / (1 if self.model.weights is None else FINE_TUNING_DIVISOR)

    @property
    def optimizers(self) -> tuple[OptimizerSection, ...]:
        """The optimizers that the search chooses from; without such a choice, the only one."""
        return self.optimizer.choices

    @property
    def search_on(self) -> SearchOn:
        """Where candidates are trained."""
        section = self.learning_rate
        needs_slots = section.candidate_batch == "local" or not self.parallel.common_steps
        return "slots" if needs_slots else section.search_on or "workers"

    @property
    def slot_candidates(self) -> int:
        """Candidates of a round that train on slots, at most."""
        return self.learning_rate.max_candidates if self.search_on == "slots" else 0

    @property
    def functions(self) -> list[tuple[str, object]]:
        """The field and the name of each function that is not this package's."""
        pairs: list[tuple[str, object]] = [
            ("model.name", self.model.name),
            ("data.name", self.data.name),
            ("data.collate", getattr(self.data, "collate", None)),
            ("data.sampler", self.data.sampler),
            ("task.name", self.task.name),
            ("loss.name", self.loss.name),
            *(("optimizer.name", optimizer.name) for optimizer in self.optimizers),
            *((f"callbacks.{i}", name) for i, name in enumerate(self.callbacks)),
        ]
        return [(field, name) for field, name in pairs if is_function_name(name)]

    @property
    def decides_by_validation(self) -> bool:
        """Whether the policy decides by the validation split."""
        return self.learning_rate.has_candidates or self.learning_rate.follows_metric

    @property
    def hold_out(self) -> HoldOut:
        """The validation split: a tenth where a policy decides by it, unless the job says."""
        fraction = self.data.validation_fraction
        if fraction is None:
            fraction = 0.1 if self.decides_by_validation else 0.0
        return HoldOut(fraction, only_in_search=self.learning_rate.searches_first)

    @property
    def batch_size_per_worker(self) -> int:
        """Samples per update in each worker."""
        return self.global_batch_size // self.workers.size

    def broken_rules(self) -> Iterator[BrokenRule]:
        return rules.broken_rules(self)
