"""One process of `test_graphs`: trainings with graphs of the network, and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from raytrain_opt.config.schema import Job
from raytrain_opt.data import load_shared_data
from raytrain_opt.train import step_choices
from raytrain_opt.train.data_parallel import distribute
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.learner_config import LearnerConfig
from raytrain_opt.train.micro_batches import MicroBatches
from raytrain_opt.train.step_choices import StepChoices
from tests.multiprocess.compile_rank import net
from tests.support.fake_graphs import FakeGraphs
from tests.support.process_group import gloo_group

MICRO_BATCHES = 4  # two for each process
STEPS = 20  # enough for `gradient_buckets: auto`, which wraps the model again within them
CASES: dict[str, dict[str, Any]] = {
    "SGD": {"optimizer": {"name": "SGD", "clip_norm": 1.0}},
    "Muon": {"optimizer": "Muon", "parallel": {"gradient_buckets": "growing"}},
    "LARS": {"optimizer": "LARS", "parallel": {"gradient_buckets": "auto"}},
}


def learner(changes: dict[str, Any], world_size: int) -> Learner:
    values = {"model": net, "data": "digits", "epochs": 3, "global_batch_size": 32}
    job = Job.model_validate(values | changes | {"workers": {"count": world_size}})
    device = torch.device("cpu")
    return Learner(LearnerConfig.from_job(job), load_shared_data(job.data), device, distribute)


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    own = MicroBatches.for_rank(rank, [1.0] * world_size, MICRO_BATCHES)
    results: dict[str, Any] = {}
    with gloo_group(rank, world_size, folder):
        for name, changes in CASES.items():
            fakes = FakeGraphs(fails=name == "LARS" and rank == 1)
            torch.cuda.make_graphed_callables = fakes.make_graphed_callables
            step_choices.monotonic_s = fakes.clock()
            eager, graphed = (learner(changes, world_size) for _ in range(2))
            choices = StepChoices(graphed, auto_compile=False, cuda_graphs=True)
            digests = []
            for trained in (eager, graphed):
                for epoch in (1, 2, 3):
                    trained.train(epoch, 0, [0.1] * STEPS, own)
                    trained.sync_batch_norm_stats()
                    if trained is graphed:
                        choices.after_phase(1.0)
                digests.append(trained.state(copy=True).digest())
            results[name] = {
                "digests": digests,
                "replayed": fakes.replayed,
                "used": graphed.network_graph is not None,
                "measured": choices.measured,
            }
    torch.save(results, folder / f"rank-{rank}.pt")
