"""A worker that sleeps in place of computing."""

from __future__ import annotations

from typing import Any

from benchmarks.async_processes import INFO, Sleeper, job_of, start_state
from raytrain_opt.async_training.scheduler import EpochPhase
from raytrain_opt.async_training.worker_loop import AsyncTrainer
from raytrain_opt.results import Steps
from tests.support.local_server import LocalClient, LocalServer, open_shards


def test_a_sleeping_learner_is_trained_by_the_real_loop() -> None:
    job = job_of(1)
    learner: Any = Sleeper(job, lambda: 0.0)
    phase = EpochPhase("1.0", 1, Steps(0, (0.1, 0.1)), 1, None)
    server = LocalServer.for_phase(phase, open_shards(job, INFO, 2), start_state(job))
    AsyncTrainer(learner, 2).train(phase, LocalClient(server, 0), lambda *_: None)
    assert server.pushed == [0, 1]
    assert server.scheduler.finished
