"""The parameter server in this process: the real clock and shards, a lock instead of actors."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from raytrain_opt import Job
from raytrain_opt.clock import monotonic_s
from raytrain_opt.data.base import DataInfo
from raytrain_opt.models import build_model
from raytrain_opt.train.parameter_server import Shard, Weights, Wire, from_wire, to_wire
from raytrain_opt.train.share_clock import Done, Phase, ShareClock, Update
from raytrain_opt.train.state import HostState


def open_shards(job: Job, info: DataInfo, count: int) -> list[Shard]:
    """As many, each with a model of its own."""
    models = [
        build_model(
            job.model, num_classes=info.num_classes, sample_shape=info.sample_shape, seed=job.seed
        )
        for _ in range(count)
    ]
    if job.channels_last and len(info.sample_shape) == 3:
        models = [model.to(memory_format=torch.channels_last) for model in models]
    steps = info.steps_per_epoch(job.global_batch_size)
    return [Shard(job, model, i, count, steps) for i, model in enumerate(models)]


@dataclass
class LocalServer:
    """Shared by the workers' threads; see `member`."""

    clock: ShareClock
    shards: list[Shard]
    wire: torch.dtype = torch.float32
    updates: list[Update] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    @classmethod
    def begun(
        cls, phase: Phase, shards: list[Shard], state: HostState, **kind: Any
    ) -> LocalServer:
        for shard in shards:
            shard.load(state, phase.decay)
        return cls(ShareClock(phase), shards, **kind)

    def make(self, updates: list[Update]) -> None:
        for update in updates:
            for shard in self.shards:
                shard.apply(update)
        self.updates += updates
        self.changed.notify_all()


@dataclass
class Member:
    """The server as one worker sees it."""

    server: LocalServer
    worker: int
    pulled: list[int] = field(default_factory=list)

    def claim(self) -> int | None:
        with self.server.changed:
            return self.server.clock.claim(self.worker, monotonic_s())

    def begin(self, share: int, version: int) -> int | None:
        clock = self.server.clock
        with self.server.changed:
            assert self.server.changed.wait_for(lambda: clock.may_begin(share), timeout=60)
            if not clock.new_enough(version):
                return clock.version
            clock.begin(self.worker, share, version, monotonic_s())
            return None

    def pull(self, at_least: int) -> Weights:
        with self.server.changed:
            shards = self.server.shards
            assert min(shard.version for shard in shards) >= at_least
            parts = [from_wire(to_wire(s.weights.buffer, s.dtype), s.dtype) for s in shards]
            return Weights(min(shard.version for shard in shards), tuple(parts))

    def push(self, share: int, gradients: Sequence[Wire]) -> None:
        with self.server.changed:
            for shard, gradient in zip(self.server.shards, gradients, strict=True):
                shard.add(share, from_wire(gradient, self.server.wire))

    def done(self, share: Done) -> None:
        with self.server.changed:
            self.server.make(self.server.clock.done(self.worker, share, monotonic_s()))

    def wait_for_work(self) -> bool:
        clock = self.server.clock
        with self.server.changed:
            assert self.server.changed.wait_for(
                lambda: clock.has_work or clock.finished, timeout=60
            )
            return not clock.finished
