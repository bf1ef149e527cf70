"""Combined buffers of workers that computed unequal fractions."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch

from raytrain_opt.async_training.main_training import add_parts
from raytrain_opt.async_training.weight_shard import advance_buffers
from raytrain_opt.data import load_shared_data
from raytrain_opt.results import EvalTotals
from raytrain_opt.train.batch_norm import collect_buffers
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.learner_config import LearnerConfig
from tests.support.small_jobs import small_job


def test_a_worker_counts_by_its_fraction_and_counts_advance_by_the_updates(tmp_path: Path) -> None:
    job = small_job(tmp_path)
    learner = Learner(LearnerConfig.from_job(job), load_shared_data(job.data), torch.device("cpu"))
    start = learner.state(copy=True)
    workers = []
    for indices in ([(0, 0), (3, 1), (4, 0)], [(5, 1)], []):
        learner.load(start)
        learner.begin_micro_batches(1, 2)
        for batch in learner.micro_batches_at(indices):
            learner.add_gradient(batch, (0, 0))
        workers.append(collect_buffers(learner.model, len(indices)))
    buffers = advance_buffers(start, workers, updates=7)
    assert buffers.keys() == dict(learner.model.named_buffers()).keys()
    for name, tensor in buffers.items():
        if name.endswith("num_batches_tracked"):
            assert int(tensor.tensor()) == 7
        else:
            mean = 0.75 * workers[0].values[name] + 0.25 * workers[1].values[name]
            np.testing.assert_allclose(tensor.tensor().numpy(), mean, rtol=1e-6)
            assert tensor.dtype == "float32"
    assert advance_buffers(start, workers[2:], 0).keys() < buffers.keys()  # counts only


def test_the_parts_of_an_evaluation_are_one_result() -> None:
    """With the failure of one of them, and the spread of the losses of all."""
    parts = [
        EvalTotals(6, {"loss": 12.0, "accuracy": 3.0}, 1.0, "accuracy", loss_squares=30.0),
        EvalTotals(2, {"loss": 4.0, "accuracy": 2.0}, 2.0, "accuracy", loss_squares=9.0),
    ]
    total = add_parts(parts)
    assert (total.samples, total.loss, total.duration_s) == (8, 2.0, 2.0)
    assert (total.loss_squares, total.failure) == (39.0, "")
    failed = EvalTotals(1, dict.fromkeys(parts[0].sums, math.nan), 0.1, "accuracy", failure="why")
    assert add_parts([*parts, failed]).failure == "why"
    assert math.isnan(add_parts([*parts, failed]).loss)
