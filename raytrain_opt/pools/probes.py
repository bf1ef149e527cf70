"""Batch-size probes, one at a time: a strategy proposes a size, a process measures it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import ray
import torch

from raytrain_opt.cluster.actor_tree import end_actor_tree
from raytrain_opt.config.batch_size import BatchSizeSection
from raytrain_opt.data.factory import SharedData
from raytrain_opt.errors import PoolError
from raytrain_opt.pools.commands import Failure, to_failure
from raytrain_opt.recording.records import BatchSizeProbeRecord
from raytrain_opt.results import Probe
from raytrain_opt.search.batch_size.strategy import BatchSizeChoice, Strategy
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.learner_config import LearnerConfig
from raytrain_opt.train.probe import measure, open_probe_sampler, probed_training

# The check of the chosen size takes three times the steps of a probe: it runs once, and a leak or
# a fragmented allocator shows only after some time.
CHECK_FACTOR = 3
_CHECK_REASON = "check of the choice in a new process, evaluation included"


@dataclass(frozen=True)
class ProbeConfig:
    """Given to the probing process."""

    learner: LearnerConfig
    section: BatchSizeSection
    use_gpu: bool
    threads: int
    shared: list[Any]  # of one reference: Ray would fetch a bare one on the way


@dataclass(frozen=True)
class ProbeReply:
    """The result of a probe, and the process that measured it."""

    result: Probe | Failure
    pid: int | None

    @property
    def probe(self) -> Probe:
        """The probe. Raises what happened instead of one."""
        if isinstance(self.result, Failure):
            raise self.result.to_error("batch-size probe")
        return self.result


def run_probes(
    strategy: Strategy,
    process: ProbeProcess,
    max_restarts: int,
    on_probe: Callable[[BatchSizeProbeRecord], None],
) -> BatchSizeChoice:
    """Search, check the choice in a new process, and continue the search if the check fails.

    The check may also show that probes differ by more than the strategy knew, and lead it to
    another choice. Raises what a probe raised, ResourcesError when nothing fits, PoolError when
    probing processes keep dying or do not answer.
    """
    probes: list[Probe] = []
    checked: set[int] = set()
    deaths, number = 0, 0
    while True:
        proposal = strategy.propose(probes)
        size, is_check = proposal.batch_size, isinstance(proposal, BatchSizeChoice)
        if isinstance(proposal, BatchSizeChoice):
            if size in checked:
                return proposal
            process.end()
        try:
            reply = process.measure(size, check=is_check)
        except ray.exceptions.RayActorError as error:
            if is_check:  # this size is too large to train with
                why = f"its process ended: {error}"
                reply = ProbeReply(Probe(size, "out_of_memory", why=why), None)
            elif deaths < max_restarts:
                deaths += 1
                continue
            else:
                raise PoolError(
                    f"probing processes died {deaths + 1} times without an answer "
                    f"(max_restarts: {max_restarts}); see Ray's session logs"
                ) from error
        probe = reply.probe
        if is_check or probe.status != "ok":
            process.end()
        if is_check and probe.fits:
            checked.add(size)
        if strategy.weighs_checks or not (is_check and probe.fits):
            probes.append(probe)
        number += 1
        reason = _CHECK_REASON if is_check else proposal.reason
        on_probe(
            BatchSizeProbeRecord.from_probe(number, probe, reason, check=is_check, pid=reply.pid)
        )


class ProbeProcess:
    """A process that probes, started when needed. `options`: Ray's. `limit_s`: of one probe."""

    def __init__(self, config: ProbeConfig, options: dict[str, Any], limit_s: float) -> None:
        self._config, self._options, self._limit_s = config, options, limit_s
        self._actor: Any = None

    def measure(self, batch_size: int, *, check: bool) -> ProbeReply:
        """Measure a batch size. Raises RayActorError at its death, PoolError without an answer."""
        if self._actor is None:
            self._actor = ray.remote(ProbeActor).options(**self._options).remote(self._config)
        try:
            ref = self._actor.measure.remote(batch_size, check)
            return cast(ProbeReply, ray.get(ref, timeout=self._limit_s))
        except ray.exceptions.RayActorError:
            self._actor = None
            raise
        except ray.exceptions.GetTimeoutError as error:
            raise PoolError(
                f"a probe of batch size {batch_size} took longer than {self._limit_s:g} s "
                "(timeouts.no_progress_s); batch_size.jsonl has those before"
            ) from error

    def end(self) -> None:
        """End the process, with its loader processes and its memory on the device."""
        if self._actor is not None:
            end_actor_tree(self._actor)
            self._actor = None


class ProbeActor:
    """Measures batch sizes with one model, optimizer and input pipeline."""

    def __init__(self, config: ProbeConfig) -> None:
        self._config = config
        self._learner: Learner | None = None

    def _open(self) -> Learner:
        """Build model and data once for all probes of this process."""
        config = self._config
        torch.set_num_threads(config.threads)
        device = torch.device("cuda" if config.use_gpu else "cpu")
        shared = cast("SharedData", ray.get(config.shared[0]))
        learner = Learner(config.learner, shared, device)
        self._sampler = open_probe_sampler(config.section, device, config.threads)
        return learner

    def measure(self, batch_size: int, check: bool) -> ProbeReply:
        """Measure. An exception comes back as a value: to try again would not help."""
        try:
            return self._measure(batch_size, check)
        except Exception as error:  # noqa: BLE001 - raised again where the search was started
            return ProbeReply(to_failure(error), os.getpid())

    def _measure(self, batch_size: int, check: bool) -> ProbeReply:
        self._learner = self._learner or self._open()
        probe = measure(
            probed_training(self._learner),
            batch_size,
            self._config.section,
            self._sampler,
            steps_factor=CHECK_FACTOR if check else 1,
        )
        return ProbeReply(probe, os.getpid())
