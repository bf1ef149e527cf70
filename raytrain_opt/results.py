"""Results of training, evaluation and probes: values without torch that all packages share."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, Field, FiniteFloat

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# What is evaluated; `final`: looked at once, after the training.
Split = Literal["validation", "test", "final"]


@dataclass(frozen=True)
class Steps:
    """Consecutive steps of one epoch, as a policy decided on them."""

    first: Annotated[int, Field(description="Number of the first step in its epoch, from 0.")]
    lrs: Annotated[tuple[FiniteFloat, ...], Field(description="Learning rate of each step.")]
    weight_decay_factor: Annotated[
        float,
        Field(
            description=(
                "Factor on the optimizer's weight decay; with `weight_decay: auto` the decay "
                "itself."
            )
        ),
    ] = 1.0
    optimizer: Annotated[
        int,
        Field(description="Position among the job's optimizers; one that is new starts afresh."),
    ] = 0
    held_out: Annotated[
        int, Field(description="Samples of the validation split that others replace.")
    ] = 0

    @property
    def end(self) -> int:
        """The number of the step after the last."""
        return self.first + len(self.lrs)

    def before(self, count: int) -> Steps:
        """Return the first `count` of the steps."""
        return replace(self, lrs=self.lrs[:count])

    def after(self, count: int) -> Steps:
        """Return the steps without the first `count` of them."""
        return replace(self, first=self.first + count, lrs=self.lrs[count:])

    def plus(self, later: Steps) -> Steps:
        """Return these steps and later ones as one, which were decided on as the later ones."""
        return replace(later, first=later.first - len(self.lrs), lrs=self.lrs + later.lrs)


NO_STEPS = Steps(0, ())


@dataclass(frozen=True)
class Metric:
    """The metric of a task that decides which weights are better."""

    name: Annotated[str, Field(description="Name among the metrics of the task.")] = "accuracy"
    higher_is_better: Annotated[bool, Field(description="False: less is better.")] = True

    def score(self, value: float) -> float:
        """Return a number that is higher for better values."""
        return value if self.higher_is_better else -value

    def text(self, value: float | None) -> str:
        """Return `98.90 %` for an accuracy of 0.989, other metrics with four digits."""
        if value is None:
            return "–"
        return f"{100 * value:.2f} %" if self.is_fraction else f"{value:.4g}"

    @property
    def is_fraction(self) -> bool:
        """Whether it is shown in percent: it counts the correct predictions."""
        return self.name in ("accuracy", "top5")


@dataclass(frozen=True)
class TrainTotals:
    """Sums over the samples of a phase.

    `losses`: the sum of the losses of each step, so that the mean does not depend on where a phase
    was cut. `failure`: the exception that made the loss NaN, as text.
    """

    steps: int
    samples: int
    losses: tuple[float, ...]
    skipped: int
    duration_s: float
    data_wait_s: float
    failure: str = ""

    @property
    def loss(self) -> float:
        """Mean loss; 0 without samples, not finite if the loss of any batch is not."""
        return sum(self.losses) / max(self.samples, 1)

    def plus(self, later: TrainTotals) -> TrainTotals:
        """Return the totals of both parts of a phase that was stopped between two steps."""
        names = ("steps", "samples", "losses", "skipped", "duration_s", "data_wait_s")
        sums = {name: getattr(self, name) + getattr(later, name) for name in names}
        return TrainTotals(**sums, failure=self.failure or later.failure)


# The most confident mistakes of an evaluation that are kept.
MAX_MISTAKES = 12

Triple = Annotated[tuple[int, ...], Field(min_length=3, max_length=3)]


class Mistake(BaseModel, frozen=True, extra="forbid"):
    """A wrong prediction."""

    file: str | None = Field(None, description="Image file, below data.root; null if it has none.")
    sample: int = Field(
        description="Position among the samples of the test split that could be read, from 0."
    )
    label: int = Field(description="Class of the sample.")
    predicted: int = Field(description="Most probable class.")
    confidence: float = Field(description="Probability of that class.")
    jpeg: str | None = Field(
        description="Image of at most 64 x 64, in base64; null if it is none."
    )


class Predictions(BaseModel, frozen=True, extra="forbid"):
    """The most probable class of each sample of a split, or of a part of it, as counts."""

    confusion: tuple[Triple, ...] = Field(
        description="Label, predicted class, and number of samples, where there are any."
    )
    mistakes: tuple[Mistake, ...] = Field(
        description=f"The {MAX_MISTAKES} mistakes with the highest confidence, highest first."
    )

    @classmethod
    def join(cls, parts: Sequence[Predictions | None]) -> Predictions | None:
        """Return the predictions of neighboring parts as one; None if there are none."""
        counts, mistakes = Counter[tuple[int, ...]](), list[Mistake]()
        for part in filter(None, parts):
            start = counts.total()
            mistakes += [m.model_copy(update={"sample": start + m.sample}) for m in part.mistakes]
            for *pair, count in part.confusion:
                counts[tuple(pair)] += count
        worst = sorted(mistakes, key=lambda m: (-m.confidence, m.sample))[:MAX_MISTAKES]
        confusion = tuple((*pair, count) for pair, count in sorted(counts.items()))
        return cls(confusion=confusion, mistakes=tuple(worst)) if counts else None


# Evaluations cut a split between neighboring blocks of this size.
EVAL_BLOCK_SIZE = 16


@dataclass(frozen=True)
class EvalTotals:
    """Sums over the samples of one evaluation; every sample counts exactly once."""

    samples: int
    sums: dict[str, float]  # of the loss and the metrics of the task, by name
    duration_s: float
    metric: Metric = Metric()  # which one decides
    predictions: Predictions | None = None  # of a classifier on the test split
    failure: str = ""  # the exception that made the loss NaN
    loss_squares: float = 0.0  # sum of the squares of the losses
    samples_per_loss: int = 1  # the batch size, where a task gives its mean loss alone
    skipped: int = 0  # samples beside these that could not be read
    outputs: dict[str, list[Any]] | None = None  # of each batch, for a task's `aggregate`
    aggregated: dict[str, float] = field(default_factory=dict)  # what that returned

    @property
    def means(self) -> dict[str, float]:
        """The loss and each metric, as means over the samples or as the task aggregated them."""
        means = {name: value / max(self.samples, 1) for name, value in self.sums.items()}
        return means | self.aggregated

    @property
    def loss(self) -> float:
        """Mean loss; not finite if the loss of any sample is not."""
        return self.means["loss"]

    @property
    def loss_error(self) -> float:
        """Standard error of the mean loss; infinite with one loss, 0 without the squares."""
        if (losses := self.samples / self.samples_per_loss) < 2:
            return math.inf
        variance = self.loss_squares / self.samples - self.loss**2
        return math.sqrt(max(variance, 0.0) / (losses - 1))


@dataclass(frozen=True)
class BufferUpdates:
    """The floating-point buffers of one worker's model after `batches` forward passes."""

    batches: int
    values: dict[str, npt.NDArray[np.float64]]
    trained: frozenset[str]  # names of BatchNorm layers in training mode


@dataclass(frozen=True)
class AsyncWorkerMetrics:
    """One worker's asynchronous phase: its seconds in all (`compute_s`), by part, and buffers."""

    timings_s: dict[str, float]
    buffers: BufferUpdates


@dataclass(frozen=True)
class Probe:
    """One measurement of training at one batch size per worker."""

    batch_size: int
    # Out of memory: also with less than the memory reserve left. Died: the process that measured.
    status: Literal["ok", "out_of_memory", "died"]
    samples_per_s: float = math.nan
    samples_per_s_error: float = math.nan  # standard error
    steps: int = 0
    duration_s: float = 0.0
    timings_s: dict[str, float] = field(default_factory=dict)  # means of a step (`STEP_PARTS`)
    utilization_pct: float = math.nan  # mean of the top half of the samples
    utilization_mean_pct: float = math.nan  # of all
    peak_memory_mib: float = math.nan
    why: str = ""  # memory ran out, or the process died
    pid: int | None = None  # process that measured

    @property
    def fits(self) -> bool:
        """Whether training at this size fits into memory, with the reserve."""
        return self.status == "ok"
