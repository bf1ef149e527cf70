"""Networks, Datasets, tasks and losses given as objects, not by the name of a function."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from raytrain_opt import Job, load_model, run
from raytrain_opt.errors import JobError
from raytrain_opt.execution.on_ray import _pickle_sections
from tests.support.cli_errors import command_error
from tests.support.small_jobs import small_job

pytestmark = pytest.mark.usefixtures("without_plots")


class ScaledLoss:
    """A task with a setting."""

    metric, higher_is_better = "accuracy", True

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def training_loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return self.factor * cross_entropy(model(x), y)

    def validation_metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        x, y = batch
        output = model(x)
        loss = cross_entropy(output, y, reduction="none")
        return {"loss": self.factor * loss, "accuracy": output.argmax(1) == y}


def objects() -> dict[str, Any]:
    """Return a network and data that it can learn."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 12, generator=generator)
    y = x[:, :3].argmax(1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))
    return {"model": model, "data": (TensorDataset(x, y), TensorDataset(x[:64], y[:64]))}


def job_of(folder: Path, **changes: Any) -> Job:
    schedule = {"policy": "schedule", "initial": 0.1}
    values = {**objects(), "task": ScaledLoss(0.5), "learning_rate": schedule, **changes}
    return small_job(folder, **values)


def test_a_run_with_objects_leaves_them_and_resumes_with_them_alone(tmp_path: Path) -> None:
    job, longer = job_of(tmp_path, epochs=2), job_of(tmp_path, epochs=3)
    before = {name: value.clone() for name, value in objects()["model"].state_dict().items()}
    result = run(job, in_process=True)
    network = job.model.name.value  # type: ignore[union-attr]
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    message = command_error("run", "--resume", result.run_dir, "--set", "epochs=3")
    assert "was an object given from Python" in message
    assert "run(Job(…), resume=RUN)" in message
    resumed = run(longer, in_process=True, resume=result.run_dir)
    whole = run(longer, in_process=True)
    assert resumed.summary.epochs == whole.summary.epochs == 3
    assert resumed.lrs[: len(result.lrs)] == result.lrs

    with pytest.raises(JobError, match=r"pass it again: .*load_model\(RUN, model=…\)"):
        load_model(result.run_dir, trust=True)
    model = load_model(result.run_dir, model=objects()["model"], device="cpu")
    x, y = objects()["data"][1].tensors
    accuracy = (model.network(x).argmax(1) == y).float().mean().item()
    assert accuracy == pytest.approx(resumed.test_metric)


def test_a_loss_may_be_a_module(tmp_path: Path) -> None:
    data = {"name": objects()["data"], "num_classes": 3}
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    given = run(job_of(tmp_path, task="classification", data=data, loss=loss), in_process=True)
    named = {"name": "cross_entropy", "label_smoothing": 0.1}
    same = run(job_of(tmp_path, task="classification", data=data, loss=named), in_process=True)
    assert given.summary.final.train_loss == same.summary.final.train_loss


class Logged(nn.Linear):
    """A layer with what cannot leave the process."""

    def __init__(self) -> None:
        super().__init__(12, 3)
        self.settings = {"lock": threading.Lock()}


def test_what_cannot_be_sent_to_workers_is_named(tmp_path: Path) -> None:
    job = job_of(tmp_path, model=nn.Sequential(nn.ReLU(), Logged()))
    with pytest.raises(JobError, match=r"model: cannot be sent .*\.lock'"):
        _pickle_sections(job)
    task = ScaledLoss(1.0)
    task.factor = lambda lock=threading.Lock(): lock  # type: ignore[assignment]  # noqa: B008
    with pytest.raises(JobError, match=r"task: cannot be sent"):
        _pickle_sections(job_of(tmp_path, task=task))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": torch.zeros(2)}, "must be or return a torch.nn.Module, not Tensor"),
        ({"model": {"name": nn.Linear(2, 2), "args": {"width": 3}}}, "model.args.width"),
        ({"model": nn.Linear(2, 2, device="meta")}, "Cannot copy out of meta tensor"),
        ({"task": object()}, "must be a class or object with the methods"),
        ({"data": (object(), object())}, "must be a map-style Dataset"),
        ({"data": (TensorDataset(torch.zeros(3)),)}, "must return or be (train, test)"),
    ],
)
def test_objects_of_other_kinds_are_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(Exception, match=r".") as error:
        run(job_of(tmp_path, **change), in_process=True)
    assert message in str(error.value)
