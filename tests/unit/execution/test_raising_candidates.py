"""A candidate that raises counts as diverged; the run ends when its rate is not the cause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from raytrain_opt import run
from raytrain_opt.errors import DivergedError, JobError, UserCodeError
from tests.support.small_jobs import read_lines, small_job

# Candidates of the rates 0.01 and 1.
ROUNDS = {"policy": "stpt", "initial": 0.01, "candidates": [1.0, 100.0], "alpha": 4}
SEARCH = {"policy": "stpt_horizon", "initial": 10.0, "max_search_cost": 1.0}


class Net(nn.Module):
    """A network without normalization, which a high rate ruins; it counts its passes."""

    passes = 0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        Net.passes += self.training
        return self.last(self.first(x.flatten(1)) ** 3)


def raise_if_large(values: Tensor, place: str, limit: float = 1e4) -> None:
    if not (values.abs() < limit).all():
        raise ValueError(f"planted: {place}")


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise_if_large(ctx.saved_tensors[0], "backward")
        return gradient


class CheckingTask:
    """Classification that raises at a place where the network's output is large, or always."""

    metric = "accuracy"

    def __init__(self, place: str, always: bool = False, limit: float = 1e4) -> None:
        self.place, self.always, self.limit = place, always, limit

    def training_loss(self, model: nn.Module, batch: Any) -> Tensor:
        output = model(batch[0])
        if self.place == "loss":
            offset = 1e9 if self.always and model.training else 0
            raise_if_large(output + offset, "loss", self.limit)
        output = InBackward.apply(output) if self.place == "backward" else output
        return functional.cross_entropy(output, batch[1])

    def validation_metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        output = model(batch[0])
        if self.place == "evaluation":
            raise_if_large(output, "evaluation")
        losses = functional.cross_entropy(output, batch[1], reduction="none")
        return {"loss": losses, "accuracy": output.argmax(1) == batch[1]}


class CheckingSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                raise_if_large(group["lr"] * p.grad, "update")
        return super().step(closure)


def job(folder: Path, place: str, policy: dict[str, Any], **task: Any) -> Any:
    optimizer: Any = {"name": CheckingSGD} if place == "update" else "SGD"
    changes = {"model": Net, "optimizer": optimizer, "learning_rate": policy, "average": None}
    named_task = {"name": CheckingTask, "args": {"place": place, **task}}
    return small_job(folder, task=named_task, **changes)


@pytest.mark.parametrize("place", ["loss", "backward", "update", "evaluation"])
@pytest.mark.parametrize("policy", [ROUNDS, SEARCH], ids=["stpt", "stpt_horizon"])
def test_candidates_that_raise_have_diverged(
    place: str, policy: dict[str, Any], tmp_path: Path
) -> None:
    result = run(job(tmp_path, place, policy), in_process=True)
    rounds = read_lines(result.run_dir, "rounds")
    candidates = [candidate for record in rounds for candidate in record["candidates"]]
    raised = [c for c in candidates if c["failure"]]
    assert raised
    assert {(c["status"], c["failure"]) for c in raised} == {
        ("diverged", f"ValueError: planted: {place}")
    }
    assert any(c["status"] == "ok" for c in candidates)
    report = (Path(result.run_dir) / "report.html").read_text(encoding="utf-8")
    assert f"raised ValueError: planted: {place}" in report


@pytest.mark.parametrize("policy", [ROUNDS, SEARCH], ids=["stpt", "stpt_horizon"])
def test_what_every_rate_raises_ends_the_run_at_once(
    policy: dict[str, Any], tmp_path: Path
) -> None:
    Net.passes = 0
    with pytest.raises(JobError, match="training_loss raised ValueError: planted: loss"):
        run(job(tmp_path, "loss", policy, always=True), in_process=True)
    assert Net.passes < 60


@pytest.mark.parametrize(
    ("error", "expected"),
    [(KeyboardInterrupt, KeyboardInterrupt), (SystemExit, UserCodeError), (MemoryError, JobError)],
)
def test_other_exceptions_end_the_run(
    error: type[BaseException],
    expected: type[BaseException],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise error("planted")

    monkeypatch.setattr("tests.unit.execution.test_raising_candidates.raise_if_large", fail)
    with pytest.raises(expected):
        run(job(tmp_path, "backward", ROUNDS), in_process=True)


def test_a_training_that_raises_because_it_is_ruined_has_diverged(tmp_path: Path) -> None:
    policy = {"policy": "schedule", "initial": 100.0, "shape": "constant"}
    with pytest.raises(DivergedError, match=r"training loss is nan .*raised ValueError: planted"):
        run(job(tmp_path, "loss", policy, limit=float("inf")), in_process=True)
