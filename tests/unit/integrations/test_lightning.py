"""A LightningModule with its DataModule trains as it is; what would be ignored is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, TensorDataset, WeightedRandomSampler
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryF1Score, BinaryRecall
from torchmetrics.functional.classification import multiclass_f1_score

from raytrain_opt import Job, load_model, run
from raytrain_opt.errors import DataError, JobError
from raytrain_opt.integrations.lightning import LightningTask, from_module
from tests.support.documents import example
from tests.support.small_jobs import read_lines, without_times

STPT = {"policy": "stpt", "initial": 0.5, "candidates": [1.0, 0.2], "alpha": 4}


@pytest.fixture
def digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return example("lightning.md", "LitDigits", tmp_path, monkeypatch, "lit")


@pytest.mark.usefixtures("without_plots")
def test_the_documented_module_is_searched_trained_and_resumed(
    tmp_path: Path, digits: ModuleType
) -> None:
    given = digits.LitDigits()

    def job(name: str, epochs: int) -> Job:
        fields: Any = {"learning_rate": STPT, "optimizer": "SGD", "workers": {"count": 2}}
        fields |= {"monitor": "val_f1", "mode": "max", "epochs": epochs}
        place = {"storage_path": str(tmp_path / name), "evaluate": {"batch_size_per_worker": 50}}
        data = digits.DigitsData()
        return from_module(given, data, **fields, **place)

    before = {name: tensor.clone() for name, tensor in given.state_dict().items()}
    whole, first = run(job("a", 3), in_process=True), run(job("b", 2), in_process=True)
    resumed = run(job("b", 3), in_process=True, resume=first.run_dir)
    assert all(torch.equal(before[name], t) for name, t in given.state_dict().items())
    rounds = [without_times(read_lines(r.run_dir, "rounds")) for r in (whole, resumed)]
    assert rounds[0] == rounds[1]
    last = read_lines(resumed.run_dir, "epochs")[-1]["test_metrics"]
    assert {*last} == {"loss", "val_loss", "val_f1"}
    assert last["val_loss"] == pytest.approx(last["loss"], rel=1e-5)

    network: Any = load_model(resumed.run_dir, model=digits.LitDigits()).network
    data = digits.DigitsData()
    data.setup("fit")
    x, y = next(iter(DataLoader(data.val, batch_size=len(data.val))))
    expected = multiclass_f1_score(network(x), y, num_classes=10).item()
    assert resumed.test_metric == last["val_f1"] == pytest.approx(expected, rel=1e-6)


class Numbers(lightning.LightningDataModule):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def train_dataloader(self) -> Any:
        x = torch.arange(50.0)[:, None]
        return DataLoader(TensorDataset(x, x[:, 0] > 20), **{"batch_size": 10, **self.options})

    def val_dataloader(self) -> Any:
        return DataLoader(self.train_dataloader().dataset, batch_size=7)


class Small(lightning.LightningModule):
    """Logs a mean, a collection, and a metric within it; the training step needs no index."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.scores = MetricCollection([BinaryF1Score(), BinaryRecall()])

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        loss = (self.layer(x)[:, 0] / 50 - y.float()).square().mean()
        return {"loss": loss}

    def validation_step(self, batch: Any, _: int) -> None:
        x, y = batch
        predictions = (x[:, 0] > 30).float()
        self.log("position", x.mean())
        self.log("val_loss", self.training_step(batch)["loss"])
        self.scores.update(predictions, y)
        self.log_dict(self.scores)


def small_job(tmp_path: Path, module: Any = None, data: Any = None, **fields: Any) -> Job:
    place = {"storage_path": str(tmp_path), "optimizer": "SGD", "epochs": 1}
    schedule = {"policy": "schedule", "initial": 1e-4}
    return from_module(
        module or Small(), data or Numbers(), **{"learning_rate": schedule, **place, **fields}
    )


@pytest.mark.usefixtures("without_plots")
def test_eval_mode_and_drop_last_stay_as_in_lightning(tmp_path: Path) -> None:
    given: Any = Small()
    given.layer = torch.nn.Sequential(torch.nn.BatchNorm1d(1).eval(), given.layer)
    result = run(job := small_job(tmp_path, given), in_process=True)
    trained: Any = load_model(result.run_dir, model=given).network
    assert (trained.layer[0].running_mean, job.data.drop_last) == (0, False)


@pytest.mark.usefixtures("without_plots")
@pytest.mark.parametrize("batch_size", [3, 100])
def test_means_and_collections_are_those_of_the_whole_set(tmp_path: Path, batch_size: int) -> None:
    evaluate = {"batch_size_per_worker": batch_size}
    result = run(small_job(tmp_path, evaluate=evaluate), in_process=True)
    [epoch] = read_lines(result.run_dir, "epochs")
    metrics = epoch["test_metrics"]
    recall = 19 / 29
    f1 = 2 * recall / (1 + recall)
    named = {"position": 24.5, "BinaryF1Score": f1, "BinaryRecall": recall}
    assert {name: metrics[name] for name in named} == pytest.approx(named)
    assert epoch["metric"] == {"name": "loss", "higher_is_better": False}


@pytest.mark.parametrize(
    ("monitor", "logged", "returned", "loss"),
    [
        ("a_loss", {"val_loss": 1.0, "a_loss": 2.0}, torch.tensor(3.0), 2.0),
        ("loss", {"l2_loss": 1.0, "val_loss": 2.0}, torch.tensor(3.0), 3.0),
        ("loss", {"l2_loss": 1.0, "val_loss": 2.0}, torch.ones(4), 2.0),  # predictions
    ],
)
def test_the_loss_is_the_monitored_one_the_returned_one_or_val_loss(
    monitor: str, logged: dict[str, float], returned: Tensor, loss: float
) -> None:
    task = LightningTask(monitor, "min")
    network = type("Logged", (), {"__call__": lambda *_: returned, "logged": (logged, {})})()
    values = task.validation_metrics(network, (None, torch.ones(4)))
    assert values["loss"].tolist() == [loss] * 4


def with_attributes(**attributes: Any) -> Any:
    return type("Changed", (Small,), attributes)()


def manual() -> Any:
    module = Small()
    module.automatic_optimization = False
    return module


def logs_a_member(module: Any, batch: Any) -> Any:
    module.scores.update(batch[1].float(), batch[1])
    module.log("f1", module.scores["BinaryF1Score"])
    return batch[0].mean()


WEIGHTED = {"sampler": WeightedRandomSampler([1.0] * 50, 50)}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: small_job(p, manual()), "automatic_optimization: manual optimization makes"),
        (lambda p: small_job(p, with_attributes(on_train_epoch_end=print)),
         "on_train_epoch_end: is a hook of Lightning's Trainer"),
        (lambda p: small_job(p, with_attributes(configure_callbacks=list)),
         "configure_callbacks: is a hook .*field of the job"),
        (lambda p: small_job(p, torch.nn.Linear(1, 1)), "Linear is none of LightningModule"),
        (lambda p: small_job(p, monitor="val_mae"), "mode: says which values of val_mae are bett"),
        (lambda p: small_job(p, data=Numbers(**WEIGHTED)), "has a WeightedRandomSampler.*data.sa"),
        (lambda p: small_job(p, data=Numbers(sampler=RandomSampler(range(50), num_samples=9))),
         "train_dataloader: has a RandomSampler"),
        (lambda p: small_job(p, with_attributes(), type(
            "Two", (Numbers,), {"val_dataloader": lambda self: [1, 2]})()),
         "val_dataloader: returns list; return one torch DataLoader"),
    ],
)  # fmt: skip
def test_what_would_be_ignored_is_refused_by_name(
    tmp_path: Path, make: Callable[[Path], Job], message: str
) -> None:
    with pytest.raises(JobError, match=message):
        make(tmp_path)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda self, _: self.log("acc", 1.0), "returns no loss and logs none"),
        (lambda self, _: self.log_dict({"a_loss": 1.0, "b_loss": 2.0}), "logs a_loss and b_loss"),
        (lambda self, _: self.log("a", 1.0, reduce_fx="max"), r"self.log\('a'\) has reduce_fx"),
        (
            lambda self, batch: logs_a_member(self, batch),
            "logs f1, a metric that it does not update",
        ),
        (lambda self, _: self.global_step, "Changed uses current_epoch or global_step"),
        (lambda self, _: self.trainer.datamodule, "Small is not attached to a `Trainer`|Changed"),
    ],
)
def test_a_validation_step_that_cannot_be_used_says_why(
    tmp_path: Path, step: Any, message: str
) -> None:
    with pytest.raises((DataError, JobError), match=message):
        run(small_job(tmp_path, with_attributes(validation_step=step)), in_process=True)
