"""The settings of a learner: the part of a job that training in one process depends on."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from raytrain_opt.config.data import DataSection, HoldOut
from raytrain_opt.config.schema import (
    Compile,
    Job,
    LossSection,
    ModelSection,
    Precision,
    TaskSection,
)
from raytrain_opt.config.updates import (
    AverageSection,
    BatchNormSection,
    BatchRampSection,
    OptimizerSection,
    ParallelSection,
)
from raytrain_opt.results import EVAL_BLOCK_SIZE

# Forward passes keep no activations, so 256 samples fit wherever a training step does.
_MIN_EVAL_BATCH_SIZE = 256
# A step of balanced workers ends within one micro-batch: with 16 per worker, 1/32 is lost on
# average. Smaller ones than 8 samples cost more than that in BatchNorm's noise and in calls.
_MAX_SPLIT = 16
_MIN_BALANCED_SAMPLES = 8


@dataclass(frozen=True)
class LearnerConfig:
    """Settings of a `Learner`, the same in every process of a run. Free of torch."""

    model: ModelSection
    data: DataSection
    hold_out: HoldOut
    task: TaskSection
    loss: LossSection
    optimizers: tuple[OptimizerSection, ...]
    average: AverageSection | None
    batch_norm: BatchNormSection
    batch_ramp: BatchRampSection
    parallel: ParallelSection
    precision: Precision
    channels_last: bool
    compile: Compile
    seed: int
    global_batch_size: int
    worker_count: int  # of workers that split a global batch
    eval_batch_size_per_worker: int | None  # None: derived from the batch size of training

    @classmethod
    def from_job(cls, job: Job) -> LearnerConfig:
        """Return the settings that a job has for its learners."""
        values: dict[str, Any] = {
            field.name: getattr(job, field.name, None) for field in fields(cls)
        }
        values["worker_count"] = job.workers.size
        values["eval_batch_size_per_worker"] = job.evaluate.batch_size_per_worker
        return cls(**values)

    @property
    def batch_size_per_worker(self) -> int:
        """Samples per update in each worker."""
        return self.global_batch_size // self.worker_count

    @property
    def balanced_split(self) -> int:
        """Micro-batches per worker that share a global batch finely enough (`parallel`)."""
        size = self.batch_size_per_worker
        if self.parallel.micro_batches is not None:
            return self.parallel.micro_batches // self.worker_count
        parts = range(1, min(_MAX_SPLIT, size // _MIN_BALANCED_SAMPLES) + 1)
        return max((part for part in parts if size % part == 0), default=1)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a global batch, before a batch ramp."""
        split = self.balanced_split if self.parallel.mode == "balanced" else 1
        return self.worker_count * split

    def eval_batch_size(self, batch_size_per_worker: int) -> int:
        """Return the batch size of an evaluation when training has `batch_size_per_worker`."""
        in_blocks = batch_size_per_worker // EVAL_BLOCK_SIZE * EVAL_BLOCK_SIZE
        return self.eval_batch_size_per_worker or max(in_blocks, _MIN_EVAL_BATCH_SIZE)
