"""Pools on a real Ray, all parts as in a run, but the residents compute nothing (`echo`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from raytrain_opt.cluster.resources import PoolPlan
from raytrain_opt.config.schema import TimeoutsSection
from raytrain_opt.execution.start import resident_pools
from raytrain_opt.pools.commands import MainTrain, Pretrain, Progress, SendCandidateState, StateRef
from raytrain_opt.pools.programs import ResidentConfig
from raytrain_opt.pools.ray_pool import RayPool
from raytrain_opt.pools.state_store import RayStateStore
from raytrain_opt.results import Steps
from raytrain_opt.search.policy import Candidate, TryCandidates
from raytrain_opt.train.learner_config import LearnerConfig
from tests.support.echo import DRIVERS, STEPS, EchoProgram
from tests.support.faults import Fault, Faults
from tests.support.small_jobs import small_job


@dataclass(frozen=True)
class EchoPools:
    """Both pools, ready for commands."""

    workers: RayPool
    slots: RayPool
    states: RayStateStore
    start: StateRef  # kept by the driver

    def act_at_work(self, act: Callable[[], object]) -> None:
        """Do something as soon as the workers work on a command, while the driver waits."""
        due = [act]

        def on_wait(_: str, progress: Progress | None) -> None:
            if progress is not None and due:
                due.pop()()

        self.workers.on_wait = on_wait

    def pretrain(self, epoch: int) -> Pretrain:
        candidate = Candidate(0, 1.0, 0.1)
        plan = TryCandidates(epoch, 0.1, (candidate,), (1.0,))
        return Pretrain(self.start, plan, {0: candidate})

    def send_candidate_state(self, epoch: int) -> SendCandidateState:
        return SendCandidateState(self.pretrain(epoch), Candidate(0, 1.0, 0.1), 0)

    def main_train(self, epoch: int) -> MainTrain:
        return MainTrain(self.start, epoch, Steps(0, (0.1,) * STEPS))

    def contents(self, replies: dict[int, StateRef]) -> dict[int, object]:
        """Return the contents of the states that residents have sent."""
        return {index: self.states.get(ref) for index, ref in replies.items()}


@contextmanager
def echo_pools(
    storage: Path,
    *,
    workers: int = 0,
    slots: int = 0,
    min_workers: int | None = None,
    worker_resources: dict[str, float] | None = None,
    worker_environment: Mapping[str, str] | None = None,
    faults: Sequence[dict[str, Any]] = (),
    max_restarts: int = 3,
    no_progress_s: float = 300,
) -> Iterator[EchoPools]:
    """Start pools of these sizes and end them as a run does. `faults`: `tests.support.faults`."""
    small = {"CPU": 0.2}  # so that several pools fit on the Ray of the tests
    config = ResidentConfig(
        learner=LearnerConfig.from_job(small_job(storage)),
        candidate_batch=None,
        plan=PoolPlan(
            False, workers, workers, worker_resources or small, slots, small, max(slots, 1)
        ),
        min_workers=workers if min_workers is None else min_workers,
        threads=1,
        max_restarts=max_restarts,
        timeouts=TimeoutsSection(no_progress_s=no_progress_s, stop_s=2),
        run_id=f"echo-{time.time_ns()}",
        ray_storage_path=str(storage / "ray"),
        program=EchoProgram(worker_environment or {}),
    )
    happened = storage / "faults"
    happened.mkdir()
    config = Faults([Fault(**fault) for fault in faults], str(happened)).install(config)
    with resident_pools(config, [ray.put(None)], owns_ray=False) as (train, tune):
        used, states = [pool for pool in (train, tune) if pool.size], train.states
        for pool in used:
            pool.start()
        start = states.put("start", DRIVERS)  # type: ignore[arg-type]
        for pool in used:
            pool.wait_until_ready(120)
        yield EchoPools(train, tune, states, start)
