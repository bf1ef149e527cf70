"""Combined buffers of workers that computed unequal fractions."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch import nn

from raytrain_opt.async_training.main_training import add_parts
from raytrain_opt.async_training.weight_shard import advance_buffers, pool_buffers
from raytrain_opt.data import load_shared_data
from raytrain_opt.results import BufferUpdates, EvalTotals
from raytrain_opt.train.batch_norm import collect_buffers
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.learner_config import LearnerConfig
from tests.support.small_jobs import small_job


def of_batches(batches: list[torch.Tensor], momentum: float | None) -> BufferUpdates:
    """Return the updates of a BatchNorm layer after these batches."""
    model = nn.Sequential(nn.BatchNorm1d(3, momentum=momentum))
    for batch in batches:
        model(batch)
    return collect_buffers(model, len(batches))


def test_a_worker_counts_by_its_fraction() -> None:
    torch.manual_seed(0)
    batches = [torch.randn(8, 3) + shift for shift in range(4)]
    buffers = pool_buffers([of_batches(batches[:3], None), of_batches(batches[3:], None)])
    every = torch.cat(batches).double()
    np.testing.assert_allclose(buffers["0.running_mean"], every.mean(0), rtol=1e-5)


def test_a_worker_without_batches_does_not_count() -> None:
    idle = BufferUpdates(0, {"x": np.array([9.0])}, frozenset())
    active = BufferUpdates(2, {"x": np.array([1.0])}, frozenset())
    assert pool_buffers([idle, active])["x"].tolist() == [1.0]
    assert pool_buffers([idle]) == {}


def test_the_counts_of_a_state_advance_by_the_updates(tmp_path: Path) -> None:
    job = small_job(tmp_path)
    learner = Learner(LearnerConfig.from_job(job), load_shared_data(job.data), torch.device("cpu"))
    start = learner.state(copy=True)
    learner.begin_micro_batches(1, 2)
    for batch in learner.micro_batches_at([(0, 0), (3, 1)]):
        learner.add_gradient(batch, (0, 0))
    buffers = advance_buffers(start, [learner.buffers(2)], updates=7)
    learner_buffers = dict(learner.model.named_buffers())
    assert buffers.keys() == learner_buffers.keys()
    for name, tensor in buffers.items():
        if name.endswith("num_batches_tracked"):
            assert int(tensor.tensor()) == 7
        elif name.endswith("running_mean"):
            torch.testing.assert_close(tensor.tensor(), learner_buffers[name])
            assert tensor.dtype == "float32"


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
