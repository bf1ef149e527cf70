"""The parameter server in this process: real scheduler and shards, a lock instead of actors."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from raytrain_opt import Job
from raytrain_opt.async_training.scheduler import EpochPhase, MicroBatchDone, SspScheduler
from raytrain_opt.async_training.weight_shard import (
    Weights,
    WeightShard,
    WireArray,
    from_wire,
    to_wire,
)
from raytrain_opt.async_training.worker import RemoteServer
from raytrain_opt.data.base import DataInfo
from raytrain_opt.models import build_model
from raytrain_opt.train.state import TrainingState


def open_shards(job: Job, info: DataInfo, count: int) -> list[WeightShard]:
    """Build the shards, each with a model of its own."""
    models = [
        build_model(
            job.model, num_classes=info.num_classes, sample_shape=info.sample_shape, seed=job.seed
        )
        for _ in range(count)
    ]
    if job.channels_last and len(info.sample_shape) == 3:
        models = [model.to(memory_format=torch.channels_last) for model in models]
    steps = info.steps_per_epoch(job.global_batch_size)
    return [WeightShard(job.optimizer, model, i, count, steps) for i, model in enumerate(models)]


@dataclass
class LocalServer:
    """Shared by the workers' threads, which use `LocalClient`."""

    scheduler: SspScheduler
    shards: list[WeightShard]
    wire: torch.dtype = torch.float32
    pushed: list[int] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    @classmethod
    def for_phase(
        cls, phase: EpochPhase, shards: list[WeightShard], state: TrainingState, **kind: Any
    ) -> LocalServer:
        for shard in shards:
            shard.load(state, phase)
        return cls(SspScheduler(phase), shards, **kind)


@dataclass
class LocalClient(RemoteServer):
    """The server as one worker sees it."""

    server: LocalServer
    worker: int

    def claim(self) -> int | None:
        with self.server.changed:
            return self.server.scheduler.claim(self.worker)

    def begin(self, number: int, version: int) -> bool:
        scheduler = self.server.scheduler
        with self.server.changed:
            assert self.server.changed.wait_for(lambda: scheduler.may_begin(), timeout=60)
            if not scheduler.may_begin(version):
                return False
            scheduler.begin(number, version)
            return True

    def pull(self) -> Weights:
        with self.server.changed:
            shards = self.server.shards
            parts = [from_wire(to_wire(s.weights_ahead(), s.dtype), s.dtype) for s in shards]
            return Weights(min(shard.version for shard in shards), tuple(parts))

    def push(self, number: int, version: int, gradients: Sequence[WireArray]) -> int:
        with self.server.changed:
            self.server.pushed.append(number)
            pairs = zip(self.server.shards, gradients, strict=True)
            return max(
                shard.apply(number, version, from_wire(gradient, self.server.wire))
                for shard, gradient in pairs
            )

    def done(self, result: MicroBatchDone) -> None:
        with self.server.changed:
            self.server.scheduler.done(self.worker, result)
            self.server.changed.notify_all()

    def wait_for_work(self) -> bool:
        scheduler = self.server.scheduler
        with self.server.changed:
            assert self.server.changed.wait_for(
                lambda: scheduler.has_work or scheduler.finished, timeout=60
            )
            return not scheduler.finished
