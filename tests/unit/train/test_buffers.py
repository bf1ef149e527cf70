"""Buffers of workers that computed unequal parts: against the formula for equal ones, against all
values at once, and without bias.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from small_jobs import small_job
from torch import nn

from raytrain_opt.data import load_shared
from raytrain_opt.train.buffers import buffers_of, moved_on, pooled
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.totals import Buffers


def of_batches(batches: list[torch.Tensor], momentum: float | None) -> Buffers:
    """What a BatchNorm layer saw."""
    model = nn.Sequential(nn.BatchNorm1d(3, momentum=momentum))
    for batch in batches:
        model(batch)
    return buffers_of(model, len(batches[0]), {"0": 1.0}, {"0": 0}, len(batches))


def test_plain_means_are_the_statistics_of_all_values() -> None:
    """One batch each, counted in full: the law of total variance."""
    torch.manual_seed(0)
    batches = [torch.randn(8, 3) * 2 + shift for shift in range(4)]
    found = pooled([of_batches([batch], None) for batch in batches])
    every = torch.cat(batches).double()
    np.testing.assert_allclose(found["0.running_mean"], every.mean(0), rtol=1e-5)
    np.testing.assert_allclose(found["0.running_var"], every.var(0), rtol=1e-5)


def test_a_workers_part_is_its_weight() -> None:
    torch.manual_seed(0)
    batches = [torch.randn(8, 3) + shift for shift in range(4)]
    found = pooled([of_batches(batches[:3], None), of_batches(batches[3:], None)])
    every = torch.cat(batches).double()
    np.testing.assert_allclose(found["0.running_mean"], every.mean(0), rtol=1e-5)


def test_the_variance_has_no_bias_whoever_did_how_much() -> None:
    torch.manual_seed(0)
    trials = []
    for _ in range(300):
        workers = [of_batches(list(torch.randn(n, 4, 3)), 0.3) for n in (9, 2, 5)]
        # The starts, mean 0 and variance 1, are right, so nothing but chance moves them.
        trials.append(pooled(workers)["0.running_var"].mean())
    assert np.mean(trials) == pytest.approx(1.0, abs=0.03)


def test_who_computed_nothing_has_no_say() -> None:
    idle = Buffers(0, {"x": np.array([9.0])}, {})
    at_work = Buffers(2, {"x": np.array([1.0])}, {})
    assert pooled([idle, at_work])["x"].tolist() == [1.0]
    assert pooled([idle]) == {}


def test_a_state_moves_on_by_the_updates(tmp_path: Path) -> None:
    job = small_job(tmp_path)
    learner = Learner(job, load_shared(job.data), torch.device("cpu"))
    start = learner.state(copy=True)
    learner.begin_shares(1, 2)
    for batch in learner.batches_at([(0, 0), (3, 1)]):
        learner.add_gradient(batch, (0, 0))
    found = moved_on(start, [learner.buffers(2)], updates=7)
    own = dict(learner.model.named_buffers())
    assert found.keys() == own.keys()
    for name, tensor in found.items():
        if name.endswith("num_batches_tracked"):
            assert int(tensor.tensor()) == 7
        elif name.endswith("running_mean"):
            torch.testing.assert_close(tensor.tensor(), own[name])
            assert tensor.dtype == "float32"
