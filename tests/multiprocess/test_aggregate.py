"""Metrics of a whole set are scikit-learn's for any batch size and number of workers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.metrics import f1_score, roc_auc_score
from torch import nn
from torch.nn import functional
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryF1Score

from raytrain_opt import Job, run
from raytrain_opt.data import load_shared_data
from raytrain_opt.errors import DataError, JobError
from raytrain_opt.execution.check import try_job
from raytrain_opt.train.data_parallel import DataParallel, Parallel
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.learner_config import LearnerConfig
from tests.support.documents import example
from tests.support.process_group import Results, run_ranks
from tests.support.small_jobs import read_lines, small_job

TEST_SIZE = 359  # of digits


class OneDigit:
    """Whether a digit is an 8; outputs of different sizes as lists."""

    metric = "f1"

    def training_loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        score = model(x)[:, 0] + x[:, 0, 4, 4]
        return functional.binary_cross_entropy_with_logits(score, (y == 8).float())

    def validation_metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        x, y = batch
        # A network that is not trained has the same sign for all samples; a pixel has not.
        score, target = model(x)[:, 0] + x[:, 0, 4, 4], (y == 8).long()
        loss = functional.binary_cross_entropy_with_logits(score, target.float(), reduction="none")
        parts = [score[i : i + 1].expand(1 + i % 3) for i in range(len(y))]
        return {"loss": loss, "preds": score, "target": target, "parts": parts}

    def aggregate(self, outputs: dict[str, Any]) -> dict[str, Any]:
        score, target = outputs["preds"].numpy(), outputs["target"].numpy()
        assert [part[0].item() for part in outputs["parts"]] == list(score)
        return {
            "f1": f1_score(target, score > 0),
            "auc": roc_auc_score(target, score),
            "samples": len(target),
            "first": score[0],
        }


class WithTorchmetrics(OneDigit):
    metric = "BinaryF1Score"

    def __init__(self, collection: bool = False) -> None:
        f1 = BinaryF1Score()
        self.aggregate: Any = MetricCollection({"BinaryF1Score": f1}) if collection else f1


def digit_job(folder: Path, task: Any = OneDigit, **changes: Any) -> Job:
    return small_job(folder, task=task, optimizer="SGD", **changes)


def evaluate(rank: int, world_size: int, folder: Path) -> Results:
    """Return the metrics of a few batch sizes, of outputs that differ from sample to sample."""
    results: Results = {}
    for name, task in (("own", OneDigit), ("torchmetrics", WithTorchmetrics)):
        job = digit_job(folder, task)
        learner = Learner(
            LearnerConfig.from_job(job),
            load_shared_data(job.data),
            torch.device("cpu"),
            DataParallel if world_size > 1 else Parallel,
        )
        for size in (1, 100, 1000):
            learner.config = replace(learner.config, eval_batch_size_per_worker=size)
            totals = learner.add_ranks(learner.evaluate("test", rank, world_size))
            assert totals.outputs is None
            results[f"{name} {size}"] = {**totals.means, "n": totals.samples}
    learner.task.aggregate = lambda outputs: outputs["missing"]  # type: ignore[attr-defined]
    with pytest.raises(DataError, match="aggregate raised KeyError"):
        learner.add_ranks(learner.evaluate("test", rank, world_size))
    for parameter in learner.model.parameters():
        parameter.data.fill_(torch.nan)
    broken = learner.add_ranks(learner.evaluate("test", rank, world_size))
    assert str(broken.means["BinaryF1Score"]) == "nan"
    return results


def test_f1_is_that_of_scikit_learn_for_any_batch_size_and_number_of_workers(
    tmp_path: Path,
) -> None:
    every = [r for n in (1, 2) for r in run_ranks(evaluate, n, tmp_path / f"ranks-{n}")]
    assert len(every) == 3
    reference = every[0]["own 1000"]
    assert reference["samples"] == reference["n"] == TEST_SIZE
    assert 0 < reference["f1"] < 1
    for results in every:
        for name, means in results.items():
            f1 = means["f1" if name.startswith("own") else "BinaryF1Score"]
            assert f1 == pytest.approx(reference["f1"], rel=1e-6), name
            assert means["loss"] == pytest.approx(reference["loss"], rel=1e-5)
            if name.startswith("own"):
                values = [means[key] for key in ("auc", "first")]
                assert values == pytest.approx([reference["auc"], reference["first"]], rel=1e-5)


def make_data(size: int = 1000) -> Any:
    """Return two sets in which 15 % of the samples are of class 1."""
    x = torch.randn(2, size, 8)
    y = (x.sum(-1) > 3).long()
    return tuple(torch.utils.data.TensorDataset(x[i], y[i]) for i in range(2))


@pytest.mark.usefixtures("without_plots")
def test_a_metric_of_a_whole_set_decides_candidates_the_best_epoch_and_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task = example("tasks.md", "RareClass", tmp_path, monkeypatch, "rare").RareClass
    job = digit_job(
        tmp_path,
        task,
        model={"name": lambda sample_shape: nn.Linear(*sample_shape, 1)},
        data={"name": make_data, "loader_workers": 0},
        epochs=9,
        stop={"target": 0.8},
    )
    result = run(job, in_process=True)
    epochs = read_lines(result.run_dir, "epochs")
    assert len(epochs) < 9
    assert {*epochs[-1]["test_metrics"]} == {"loss", "f1", "auc"}
    assert result.test_metric == epochs[-1]["test_metrics"]["f1"]
    assert result.test_metric > 0.8
    best = max(range(len(epochs)), key=lambda i: epochs[i]["test_metrics"]["f1"])
    assert f"best epoch    {best + 1} of " in capsys.readouterr().out
    [first, *_] = read_lines(result.run_dir, "rounds")
    scores = {c["index"]: c["val_metric"] for c in first["candidates"]}
    assert scores[first["winner"]] == max(scores.values())


@pytest.mark.usefixtures("without_plots")
@pytest.mark.parametrize("collection", [False, True])
def test_torchmetrics_objects_are_accepted(tmp_path: Path, collection: bool) -> None:
    task = {"name": WithTorchmetrics, "args": {"collection": collection}}
    result = run(digit_job(tmp_path, task, epochs=8), in_process=True)
    *_, last = read_lines(result.run_dir, "epochs")
    assert {*last["test_metrics"]} == {"loss", "BinaryF1Score"}
    assert 0 < result.test_metric <= 1  # type: ignore[operator]


class Wrong(OneDigit):
    """`values`: what `aggregate` returns, or raises."""

    def __init__(self, values: Any = None, wrong: str = "") -> None:
        self.values, self.wrong = values, wrong

    def validation_metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        values = super().validation_metrics(model, batch)
        if self.wrong == "cut":
            values["preds"] = values["preds"][1:]
        return values

    def aggregate(self, outputs: dict[str, Any]) -> Any:
        if self.wrong == "few" and len(outputs["target"]) < 10:
            raise ValueError("needs both classes")
        if isinstance(self.values, Exception):
            raise self.values
        return {"f1": 0.5} if self.wrong else self.values


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (Wrong(KeyError("predictions")), r"aggregate raised KeyError: 'predictions'"),
        (Wrong({"auc": 0.5}), r"aggregate must return the metric f1, not \['auc'\]"),
        (Wrong([0.5]), "aggregate raised AttributeError"),
        (Wrong({"f1": 0.5, "loss": 0.1}), "aggregate must not return loss, which is the mean"),
        (Wrong(wrong="cut"), "one value per sample; for 2 samples preds is a tensor of shape .1."),
    ],
)
def test_mistakes_are_found_before_the_training(tmp_path: Path, task: Any, message: str) -> None:
    with pytest.raises((DataError, JobError), match=message):
        run(digit_job(tmp_path, task), in_process=True)


@pytest.mark.usefixtures("without_plots")
def test_an_error_that_two_samples_explain_is_none(tmp_path: Path) -> None:
    result = run(digit_job(tmp_path, Wrong(wrong="few"), epochs=1), in_process=True)
    assert result.test_metric == 0.5


def test_asynchronous_workers_refuse_it(tmp_path: Path) -> None:
    job = digit_job(tmp_path, parallel={"mode": "async"}, average=None)
    with pytest.raises(JobError, match=r"task\.name: has aggregate, .* parallel.mode: async"):
        try_job(job)
