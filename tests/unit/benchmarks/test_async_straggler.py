"""A worker that sleeps in place of computing."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.async_processes import MICRO_BATCH_SAMPLES, Sleeper, job_of
from raytrain_opt.async_training.scheduler import EpochPhase
from raytrain_opt.async_training.weight_shard import split_parameters
from raytrain_opt.async_training.worker_loop import AsyncTrainer
from raytrain_opt.results import Steps


def test_a_sleeping_learner_is_trained_by_the_real_loop() -> None:
    learner: Any = Sleeper(job_of(1), lambda: 0.0)
    trainer = AsyncTrainer(learner, 2)
    parts = split_parameters(learner.model, 2)
    weights = [torch.zeros(sum(p.numel() for p in part)) for part in parts]
    phase = EpochPhase("1.0", 1, Steps(0, (0.1,)), 1, None)
    [batch] = learner.micro_batches_at(iter([(0, 0)]))
    result, wires = trainer.compute(phase, 0, batch, weights)
    assert (result.loss_sum, result.samples) == (0.0, MICRO_BATCH_SAMPLES)
    assert len(wires) == 2
