"""Ranks hold the same weights after each phase, or the run ends, unless a candidate raises."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from raytrain_opt.config.schema import Job
from raytrain_opt.data import load_shared_data
from raytrain_opt.errors import JobError
from raytrain_opt.pools.in_process import InProcessStates
from raytrain_opt.pools.worker import Worker
from raytrain_opt.results import Steps
from raytrain_opt.search.policy import Candidate, TryCandidates
from raytrain_opt.train import rank_check
from raytrain_opt.train.data_parallel import DataParallel, Parallel
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.learner_config import LearnerConfig
from raytrain_opt.train.micro_batches import MicroBatches
from tests.support.process_group import Results, run_ranks
from tests.support.rounds import train_round

CPU = torch.device("cpu")
STEPS = 4


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Net(nn.Module):
    """A network whose parameters need several of DDP's buckets; `change` is called in forward."""

    def __init__(self, change: Callable[[Any], None] = lambda _: None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2000, 8)
        self.first, self.middle = nn.Linear(64 * 8, 512), nn.Linear(512, 1024)
        self.last = nn.Linear(1024, 10)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        self.change(self)
        if self.training:
            self.steps += 1 + rank()  # a counter may differ: that of rank 0 counts
        indices = (x.flatten(1) * torch.arange(1, 65)).abs().mul(100).long() % 2000
        hidden = Raise.apply(self.first(self.embedding(indices).flatten(1))).relu()
        return self.last(self.middle(hidden).relu())


def limit_norm(net: Net) -> None:
    net.embedding.max_norm = 0.5


def write_by_rank(net: Net) -> None:
    if net.training:
        net.first.bias.data.add_(1e-6 * rank())


class NoisySGD(torch.optim.SGD):
    """SGD that adds noise from all generators, one of its own among them."""

    own = np.random.default_rng()

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                draws = np.random.random() + random.random() + self.own.random()
                p.data += 1e-3 * draws * torch.randn(p.shape)


class RankSGD(torch.optim.SGD):
    """SGD that keeps in its state what differs between the ranks."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["mean"] = torch.full((2,), float(rank()))


CASES: dict[str, dict[str, Any]] = {
    "max_norm": {"model": lambda: Net(limit_norm)},
    "write": {"model": lambda: Net(write_by_rank)},
    "state": {"model": Net, "optimizer": {"name": RankSGD}},
    "noise": {"model": Net, "optimizer": {"name": NoisySGD}},
    "nan": {"model": Net, "lr": 1e30},
    "ruined": {"model": Net, "lr": 1e30, "task": {"name": f"{__name__}:RuinedTask"}},
    "muon": {"model": Net, "optimizer": "Muon", "average": 0.5},
    "schedule-free": {"model": Net, "optimizer": "ScheduleFreeAdamW"},
    "compressed": {"model": Net, "parallel": {"compression": "bf16"}},
}


def build(world_size: int, **changes: Any) -> Learner:
    values = {
        "data": {"name": "digits", "validation_fraction": 0.1},
        "epochs": 2,
        "global_batch_size": 64,
        "workers": {"count": world_size},
        "learning_rate": {"policy": "schedule", "shape": "constant"},
        "optimizer": "SGD",
        "average": None,
        **changes,
    }
    job = Job.model_validate(values)
    connect = DataParallel if world_size > 1 else Parallel
    return Learner(LearnerConfig.from_job(job), load_shared_data(job.data), CPU, connect)


def train(world_size: int, lr: float = 0.01, **changes: Any) -> tuple[str, str, int]:
    """Train a phase; return the error, a digest of the state, and the network's counter."""
    learner = build(world_size, **changes)
    own = MicroBatches.all(2 * world_size)
    try:
        learner.train(1, Steps(0, (lr,) * 4), own)
        learner.finish_phase()
    except JobError as error:
        return str(error), "", 0
    return "", learner.state(copy=True).digest(), int(learner.model.steps)


class Raise(torch.autograd.Function):
    """Raises in backward where the task says so."""

    planned = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if Raise.planned:
            Raise.planned = False
            raise ValueError("planted: backward")
        return gradient


class RaisingTask:
    """Classification that raises at `place` in one pass of the last rank, counted from 1."""

    metric = "accuracy"
    place, failed_pass, passes = "", 0, 0

    def training_loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        RaisingTask.passes += self.place != ""
        is_planned = rank() == 1 and RaisingTask.passes == self.failed_pass
        Raise.planned = is_planned and self.place == "backward"
        if is_planned and self.place == "before":
            raise ValueError("planted: before")
        output = model("no tensor" if is_planned and self.place == "forward" else x)
        if is_planned and self.place == "loss":
            raise ValueError("planted: loss")
        return functional.cross_entropy(output, y)

    def validation_metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        x, y = batch
        if rank() == 1 and self.place == "evaluation":
            raise ValueError("planted: evaluation")
        output = model(x)
        loss = functional.cross_entropy(output, y, reduction="none")
        return {"loss": loss, "accuracy": output.argmax(1) == y}


class RuinedTask(RaisingTask):
    place, failed_pass = "backward", 6


class RaisingSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        if RaisingTask.place == "update" and RaisingTask.passes >= RaisingTask.failed_pass:
            raise ValueError("planted: update")
        return super().step(closure)


# The fourth pass, of the two in each update, is one after which gradients are exchanged.
PLACES = [
    *product(("before", "forward", "loss", "backward"), (3, 4)),
    ("update", 4),
    ("evaluation", 0),
]


def try_candidates(world_size: int) -> dict[str, Any]:
    """Let the second of three candidates raise; return the results of all, and the last state.

    The third has the rate of the first, so it has its results.
    """
    learner = build(
        world_size,
        model=Net,
        task={"name": RaisingTask},
        optimizer={"name": RaisingSGD},
        workers={"count": 2 * world_size},
    )
    states = InProcessStates()
    worker = Worker(learner, rank(), world_size, states)
    start = states.put("start", learner.state(copy=True))
    candidates = tuple(Candidate(i, 1.0, lr) for i, lr in enumerate((0.01, 0.02, 0.01)))
    plan = TryCandidates(1, 0.01, candidates, (1.0,) * STEPS)
    outcomes: dict[Any, Any] = {}
    for place, RaisingTask.failed_pass in PLACES:
        number = iter(range(len(candidates) * STEPS))

        def on_step(_: int, __: int, place: str = place, number: Any = number) -> None:
            is_second = next(number) // STEPS == 1
            RaisingTask.place = place if is_second else ""
            RaisingTask.passes *= is_second

        reply = train_round(worker, start, plan, on_step)
        results = [(r.status, r.failure, r.val_loss) for r in reply]
        outcomes[place, RaisingTask.failed_pass] = results, learner.state(copy=True).digest()
    return outcomes


def raise_always(world_size: int) -> str:
    """Let the only candidate raise whatever its rate; return what the round raises."""
    learner = build(world_size, model=Net, task={"name": RaisingTask})
    states = InProcessStates()
    worker = Worker(learner, rank(), world_size, states)
    start = states.put("start", learner.state(copy=True))
    plan = TryCandidates(1, 0.01, (Candidate(0, 1.0, 0.01),), (1.0,) * STEPS)
    RaisingTask.place = "evaluation"
    try:
        train_round(worker, start, plan)
    except ValueError as error:
        return str(error)
    return ""


def run_rank(rank: int, world_size: int, folder: Path) -> Results:
    results: dict[str, Any] = {name: train(world_size, **case) for name, case in CASES.items()}
    rank_check._processor = lambda _: f"kind {rank}"
    results["unlike processors"] = train(world_size, **CASES["state"])
    results["candidates"] = try_candidates(world_size)
    results["always"] = raise_always(world_size)
    return results


EXPECTED = {
    "max_norm": "embedding.weight",
    "write": "first.bias",
    "state": "mean of embedding.weight in the optimizer",
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(run_rank, 2, tmp_path_factory.mktemp("two") / "run")


@pytest.mark.parametrize("case", EXPECTED)
def test_weights_that_differ_are_an_error_with_their_names(
    ranks: list[dict[str, Any]], case: str
) -> None:
    for results in ranks:
        error, *_ = results[case]
        assert "in epoch 1 the workers hold different values" in error
        assert EXPECTED[case] in error


@pytest.mark.parametrize("case", [*sorted({*CASES} - {*EXPECTED}), "unlike processors"])
def test_equal_weights_are_none(ranks: list[dict[str, Any]], case: str) -> None:
    """Noise is alike; NaN equals NaN, also where a pass raises; counters become rank 0's."""
    first, second = (results[case] for results in ranks)
    assert first[0] == ""
    assert first == second


@pytest.mark.parametrize(("place", "failed_pass"), PLACES)
def test_a_candidate_that_raises_on_one_rank_has_diverged_on_all(
    ranks: list[dict[str, Any]], place: str, failed_pass: int
) -> None:
    (results, digest), (_, other_digest) = (r["candidates"][place, failed_pass] for r in ranks)
    first, failed, last = results
    assert [failed[0], last[0]] == ["diverged", "ok"]
    assert ("planted: " + place in failed[1]) or (place == "forward" and "str" in failed[1])
    assert first == last
    assert digest == other_digest == ranks[0]["candidates"][PLACES[0]][1]


def test_what_no_rate_avoids_is_raised_where_it_happened(ranks: list[dict[str, Any]]) -> None:
    assert [results["always"] for results in ranks] == ["", "planted: evaluation"]
