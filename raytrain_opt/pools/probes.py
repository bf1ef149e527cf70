"""Batch-size probes: the strategy proposes a size, a process measures it.

One probe runs at a time: on a GPU alone on the device, on CPU with the cores that a worker will
have. The process is used for the next probe, too, unless it ran out of memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import ray
import torch

from raytrain_opt.config.batch_size import BatchSizeSection
from raytrain_opt.data.factory import SharedData
from raytrain_opt.errors import PoolError
from raytrain_opt.pools.commands import Failure
from raytrain_opt.pools.resident import to_failure
from raytrain_opt.results import Probe
from raytrain_opt.search.batch_size.factory import build_strategy
from raytrain_opt.search.batch_size.strategy import (
    BatchSizeChoice,
    Measurement,
    ProbeRequest,
    SizeBounds,
)
from raytrain_opt.train.data_parallel import use_threads
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.learner_config import LearnerConfig
from raytrain_opt.train.probe import measure, open_probe_sampler, probed_training

# The check of the chosen size takes three times the steps of a probe: it runs once, and a leak or
# a fragmented allocator shows only after some time.
CHECK_FACTOR = 3
_CHECK_REASON = "check of the choice in a new process, evaluation included"


@dataclass(frozen=True)
class ProbeConfig:
    """Given to the launcher, and by it to the probing process."""

    learner: LearnerConfig
    max_restarts: int
    section: BatchSizeSection
    limits: SizeBounds
    use_gpu: bool
    threads: int
    resources: dict[str, float]
    shared: list[Any]  # of one reference: Ray would fetch a bare one on the way
    trace: bool


@dataclass(frozen=True)
class ProbeRecord:
    """One probe, the strategy's reason for it, and the process that measured it.

    `check`: whether it is the check of the chosen size.
    """

    probe: Probe
    reason: str
    pid: int | None
    check: bool = False


@dataclass(frozen=True)
class ProbeSearchResult:
    """The result of a search. `trace`: a Chrome trace (JSON text), if the user asked for one."""

    choice: BatchSizeChoice
    records: tuple[ProbeRecord, ...]
    trace: str | None


@dataclass(frozen=True)
class ProbeReply:
    """The result of a probe, and the process that measured it."""

    result: Probe | Failure
    pid: int
    trace: str | None = None

    def probe(self) -> Probe:
        """Return the probe. Raises what happened instead of one."""
        if isinstance(self.result, Failure):
            raise self.result.to_error("batch-size probe")
        return self.result


def run_probes(setup: ProbeConfig, on_record: Callable[[ProbeRecord], None]) -> ProbeSearchResult:
    """Search, check the choice in a new process, and continue the search if the check fails.

    Blocks. Raises what a probe raised, ResourcesError when nothing fits, PoolError when
    probing processes keep dying.
    """
    strategy = build_strategy(setup.section, setup.limits)
    search = _Search(ProbeProcess(setup), setup.max_restarts)
    records: list[ProbeRecord] = []
    while True:
        proposed = strategy.propose([Measurement.from_probe(record.probe) for record in records])
        trace = None
        if isinstance(proposed, BatchSizeChoice):
            record, trace = search.check(proposed.batch_size)
        else:
            record = search.probe(proposed)
        records.append(record)
        on_record(record)
        if isinstance(proposed, BatchSizeChoice) and record.probe.status == "ok":
            return ProbeSearchResult(proposed, tuple(records), trace)


@dataclass
class _Search:
    process: ProbeProcess
    max_deaths: int
    _deaths: int = field(default=0, init=False)

    def probe(self, request: ProbeRequest) -> ProbeRecord:
        """Measure a size; a process that dies is replaced."""
        while True:
            try:
                reply = self.process.measure(request.batch_size, check=False)
            except ray.exceptions.RayActorError as error:
                self._deaths += 1
                if self._deaths > self.max_deaths:
                    raise PoolError(
                        f"probing processes died {self._deaths} times without an answer "
                        f"(max_restarts: {self.max_deaths}); see Ray's session logs"
                    ) from error
                continue
            probe = reply.probe()
            if probe.status != "ok":
                self.process.end()
            return ProbeRecord(probe, request.reason, reply.pid)

    def check(self, batch_size: int) -> tuple[ProbeRecord, str | None]:
        """Measure a size in a process of its own; return the trace, too."""
        self.process.end()
        try:
            reply = self.process.measure(batch_size, check=True)
        except ray.exceptions.RayActorError as error:  # this size is too large to train with
            probe = Probe(batch_size, "out_of_memory", why=f"its process ended: {error}")
            return ProbeRecord(probe, _CHECK_REASON, None, check=True), None
        self.process.end()
        return ProbeRecord(reply.probe(), _CHECK_REASON, reply.pid, check=True), reply.trace


class ProbeProcess:
    """A process that probes: started when it is needed, also after it has ended or died."""

    def __init__(self, setup: ProbeConfig) -> None:
        self._setup = setup
        self._actor: Any = None

    def measure(self, batch_size: int, *, check: bool) -> ProbeReply:
        """Measure one batch size. Raises RayActorError when the process dies."""
        if self._actor is None:
            resources = dict(self._setup.resources)
            probing: Any = ray.remote(ProbeActor).options(
                num_cpus=resources.pop("CPU", 0),
                num_gpus=resources.pop("GPU", 0),
                memory=resources.pop("memory", None),
                resources=resources,
            )
            self._actor = probing.remote(self._setup)
        try:
            return cast(ProbeReply, ray.get(self._actor.measure.remote(batch_size, check)))
        except ray.exceptions.RayActorError:
            self._actor = None
            raise

    def end(self) -> None:
        """End the process, with its loader processes and its memory on the device."""
        if self._actor is not None:
            with suppress(ray.exceptions.RayActorError):
                ray.get(self._actor.close.remote())
            ray.kill(self._actor)
            self._actor = None


class ProbeActor:
    """Measures batch sizes with one model, optimizer and input pipeline."""

    def __init__(self, setup: ProbeConfig) -> None:
        self._setup = setup
        self._learner: Learner | None = None

    def _open(self) -> None:
        """Build model and data once for all probes of this process."""
        setup = self._setup
        use_threads(setup.threads)
        device = torch.device("cuda" if setup.use_gpu else "cpu")
        shared = cast("SharedData", ray.get(setup.shared[0]))
        self._learner = Learner(setup.learner, shared, device)
        self._training = probed_training(self._learner)
        self._sampler = open_probe_sampler(setup.section, device, setup.threads)

    def measure(self, batch_size: int, check: bool) -> ProbeReply:
        """Measure. An exception comes back as a value: to try again would not help."""
        try:
            return self._measure(batch_size, check)
        except Exception as error:  # noqa: BLE001 - raised again where the search was started
            return ProbeReply(to_failure(error), os.getpid())

    def _measure(self, batch_size: int, check: bool) -> ProbeReply:
        if self._learner is None:
            self._open()
        with TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.json" if check and self._setup.trace else None
            probe = measure(
                self._training,
                batch_size,
                self._setup.section,
                self._sampler,
                steps_factor=CHECK_FACTOR if check else 1,
                trace=None if trace is None else str(trace),
            )
            text = trace.read_text() if trace is not None and trace.exists() else None
        return ProbeReply(probe, os.getpid(), text)

    def close(self) -> None:
        """End loader processes."""
        if self._learner is not None:
            self._learner.close()
            self._sampler.close()
