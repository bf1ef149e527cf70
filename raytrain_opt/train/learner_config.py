"""The settings of a learner: the part of a job that training in one process depends on."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from raytrain_opt.config.data import DataSection, HoldOut
from raytrain_opt.config.schema import (
    Compile,
    Job,
    LossSection,
    ModelSection,
    Precision,
    TaskSection,
)
from raytrain_opt.config.section import function_name
from raytrain_opt.config.updates import (
    BatchNormSection,
    OptimizerSection,
    ParallelSection,
    RampStep,
)
from raytrain_opt.results import EVAL_BLOCK_SIZE

if TYPE_CHECKING:
    from torch import nn

    from raytrain_opt.data.base import DataInfo

# Sections that may hold objects of the user's own, which can be large.
OBJECT_SECTIONS = ("model", "data", "task", "loss")
# Forward passes keep no activations, so 256 samples fit wherever a training step does.
_MIN_EVAL_BATCH_SIZE = 256
# BatchNorm normalizes each micro-batch: with less than 8 samples it is noisy.
_MAX_MICRO_BATCHES, _MIN_MICRO_BATCH_SIZE = 4, 8


@dataclass(frozen=True)
class LearnerConfig:
    """Settings of a `Learner`, the same in every process of a run. Free of torch."""

    model: ModelSection
    data: DataSection
    hold_out: HoldOut
    task: TaskSection
    loss: LossSection
    optimizers: tuple[OptimizerSection, ...]
    average: Literal["auto"] | float | None
    batch_norm: BatchNormSection
    batch_ramp: list[RampStep]
    parallel: ParallelSection
    precision: Precision
    channels_last: bool
    compile: Compile
    seed: int
    global_batch_size: int
    worker_count: int  # of workers that split a global batch
    eval_batch_size_per_worker: int | None  # None: derived from the batch size of training
    data_digest: str = ""  # of the data that the driver read; "" where no other process does

    @classmethod
    def from_job(cls, job: Job) -> LearnerConfig:
        values: dict[str, Any] = {f.name: getattr(job, f.name, None) for f in fields(cls)}
        values["worker_count"] = job.workers.size
        values["eval_batch_size_per_worker"] = job.evaluate.batch_size_per_worker
        return cls(**values)

    def named(self, *sections: str) -> LearnerConfig:
        """Return the settings with names only, in these sections, of functions and objects."""
        changes: dict[str, Any] = {}
        for name in sections:
            section = getattr(self, name)
            changes[name] = section.model_copy(update={"name": function_name(section.name)})
        return replace(self, **changes)

    def build_model(self, info: DataInfo) -> nn.Module:
        """Build the network for these data, on the CPU; see `models.build_model`."""
        from raytrain_opt.models import build_model

        return build_model(
            self.model,
            num_classes=info.num_classes,
            sample_shape=info.sample_shape,
            seed=self.seed,
            channels_last=self.channels_last,
        )

    @property
    def batch_size_per_worker(self) -> int:
        return self.global_batch_size // self.worker_count

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a global batch, before the batch ramp: by default one per worker."""
        return self.parallel.micro_batches or self.worker_count

    @property
    def async_updates(self) -> int:
        """The micro-batches of a worker's share of a step in `async`; each is an update."""
        if self.parallel.micro_batches is not None:
            return self.parallel.micro_batches // self.worker_count
        samples = self.batch_size_per_worker
        most = min(_MAX_MICRO_BATCHES, samples // _MIN_MICRO_BATCH_SIZE)
        return max([1, *(n for n in range(1, most + 1) if samples % n == 0)])

    @property
    def eval_batch_size(self) -> int:
        """Samples in one forward pass without gradients."""
        in_blocks = self.batch_size_per_worker // EVAL_BLOCK_SIZE * EVAL_BLOCK_SIZE
        return self.eval_batch_size_per_worker or max(in_blocks, _MIN_EVAL_BATCH_SIZE)
