"""What a job with `parallel.mode: async` cannot ask for, since no two workers meet in a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from raytrain_opt.config.section import BrokenRule

if TYPE_CHECKING:
    from raytrain_opt.config.schema import Job


def async_rules(job: Job) -> Iterator[BrokenRule]:
    """The rules that the job breaks; none with `mode: sync`."""
    if job.parallel.mode == "sync":
        return
    if job.batch_norm.sync:
        yield "batch_norm.sync", "needs all workers in every step, and parallel.mode is async"
    if job.batch_norm.recalibrate_batches:
        yield (
            "batch_norm.recalibrate_batches",
            "needs all workers together, and parallel.mode is async; leave it out: the running "
            "statistics of the workers are pooled after every epoch",
        )
    if job.precision == "fp16":
        yield (
            "precision",
            "fp16 scales the loss by what overflowed in the last update, which no worker knows "
            "with parallel.mode: async; use bf16",
        )
    if job.workers.least < job.workers.count:
        yield (
            "workers.min_count",
            "belongs to parallel.mode: sync; with async the others go on by themselves when a "
            "worker dies",
        )
