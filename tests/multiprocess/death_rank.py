"""One process of `test_death`: measured shares, and a rank that dies in its fourth step.

Writes to `folder`/rank-RANK.pt what is left of the phase: of a process alone, which trains to its
end, the weights after three steps and at the end.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from raytrain_opt.results import Steps, TrainTotals
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.micro_batches import MicroBatches
from tests.multiprocess.balanced_rank import LRS, MICRO_BATCHES, OPTIMIZERS, build
from tests.support.process_group import gloo_group

CASES = ("SGD", "Muon")
STEPS, DEATH = 2 * len(LRS), 3
RATES = (0.02,) * STEPS


def continue_alone(case: str, state: Any) -> dict[str, torch.Tensor]:
    """Train the steps that are left of the phase in one process; return its weights."""
    learner = build(1, OPTIMIZERS[case])
    learner.load(state)
    learner.train(1, Steps(DEATH, RATES[DEATH:]), MicroBatches(range(1), 1))
    return weights_of(learner)


def weights_of(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in learner.model.named_parameters()}


def train_alone(case: str) -> dict[str, Any]:
    learner = build(1, OPTIMIZERS[case])
    micro_batches = MicroBatches(range(1), 1)
    totals = learner.train(1, Steps(0, RATES), micro_batches, lambda done: done == DEATH)
    return {
        "totals": numbers(totals),
        "weights": weights_of(learner),
        "end": continue_alone(case, learner.state(copy=True)),
    }


def lose_the_last_rank(case: str, rank: int, world_size: int) -> dict[str, Any]:
    """Train until the last rank leaves within a step; return what the others still have."""
    learner = build(world_size, OPTIMIZERS[case])
    assert learner.config.parallel.measures_shares
    assert learner.end_broken_phase() is None

    def on_step(done: int) -> None:
        if done == DEATH and rank == world_size - 1:
            os._exit(0)

    micro_batches = MicroBatches.for_rank(rank, [1.0] * world_size, world_size)
    with pytest.raises(RuntimeError, match="gloo"):
        learner.train(1, Steps(0, RATES), micro_batches, on_step)
    totals = learner.end_broken_phase()
    assert totals is not None
    weights, state = weights_of(learner), learner.state(copy=True)
    end = continue_alone(case, state)
    return {"totals": numbers(totals), "weights": weights, "end": end}


def numbers(totals: TrainTotals) -> tuple[int, int, int, float]:
    return totals.steps, totals.samples, totals.skipped, totals.loss


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    assert MICRO_BATCHES % world_size == 0
    case = folder.name
    torch.save({}, folder / f"rank-{rank}.pt")  # of the rank that dies
    with gloo_group(rank, world_size, folder):
        if world_size == 1:
            results = train_alone(case)
        else:
            results = lose_the_last_rank(case, rank, world_size)
    torch.save(results, folder / f"rank-{rank}.pt")
