"""Runs of tasks other than classification: the shipped examples, small, in one process."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor
from torch.nn.functional import cross_entropy

from raytrain_opt import load_model
from raytrain_opt.cli import main
from raytrain_opt.commands.evaluate import evaluate_runs
from raytrain_opt.config.load import load_job
from raytrain_opt.driver import run
from raytrain_opt.errors import JobError
from raytrain_opt.train.checkpoint import read_index
from tests.support.cli_errors import command_error
from tests.support.small_jobs import read_lines, small_job

ROOT = Path(__file__).parents[3]
SMALL = {
    "segmentation": "data.args={train: 120, test: 10}",
    "characters": "data.args={train: 40, test: 10}",
    "regression": "epochs=2",
    "multi_label": "data.args={train: 200, test: 30}",
}
HORIZON = "learning_rate={policy: stpt_horizon, max_search_cost: 1.0}"
STPT = "learning_rate={policy: stpt, candidates: [1, 0.01], initial: 0.1, alpha: 3}"


def train(name: str, folder: Path, *changes: str) -> Any:
    settings = ["epochs=2", SMALL[name], "optimizer=SGD", f"storage_path={folder}", *changes]
    return run(load_job(ROOT / f"jobs/task_{name}.yaml", settings), in_process=True)


@pytest.mark.parametrize("name", SMALL)
def test_the_examples_learn_and_name_their_metric(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = train(name, tmp_path)
    metric = result.summary.final.metric.name
    assert (
        metric
        == {
            "segmentation": "iou",
            "characters": "loss",
            "regression": "absolute_error",
            "multi_label": "correct_labels",
        }[name]
    )
    assert result.test_metric == result.summary.final.test_metrics[metric]
    first, last = read_lines(result.run_dir, "epochs")
    assert last["train_loss"] < first["train_loss"]
    assert f"test {metric}" in capsys.readouterr().out
    page = (Path(result.run_dir) / "report.html").read_text()
    assert f"Test {metric}" in page
    assert "accuracy" not in page.lower()


@pytest.mark.usefixtures("without_plots")
def test_where_less_is_better_the_lowest_wins(tmp_path: Path) -> None:
    """Candidates, the best epoch and the best checkpoint."""
    result = train("regression", tmp_path, "epochs=3", STPT)
    for line in read_lines(result.run_dir, "rounds"):
        candidates = line["candidates"]
        assert line["winner"] == min(candidates, key=lambda c: c["val_metric"])["index"]
        assert [c["score"] for c in candidates] == [-c["val_metric"] for c in candidates]
    errors = [
        line["test_metrics"]["absolute_error"] for line in read_lines(result.run_dir, "epochs")
    ]
    assert result.best_test_metric == min(errors)
    scores = [checkpoint.score for checkpoint in read_index(Path(result.run_dir) / "checkpoints")]
    assert max(score for score in scores if score is not None) == -min(errors)


class Correlation:
    """A task whose metric is not defined in the first epoch, of 44 micro-batches."""

    metric = "correlation"

    def __init__(self) -> None:
        self.calls: list[None] = []

    def training_loss(self, model: Any, batch: Any) -> Tensor:
        self.calls.append(None)
        return self.validation_metrics(model, batch)["loss"].mean()

    def validation_metrics(self, model: Any, batch: Any) -> dict[str, Tensor]:
        loss = cross_entropy(model(batch[0]), batch[1], reduction="none")
        return {"loss": loss, "correlation": -loss if len(self.calls) > 60 else loss * math.nan}


@pytest.mark.usefixtures("without_plots")
def test_an_epoch_whose_metric_is_not_finite_is_saved_and_never_the_best(tmp_path: Path) -> None:
    schedule = {"policy": "schedule", "initial": 0.1}
    job = small_job(tmp_path, task=Correlation, epochs=2, learning_rate=schedule)
    result = run(job, in_process=True)
    assert result.best_epoch == 2
    first, last = read_index(Path(result.run_dir) / "checkpoints")
    assert (first.score, last.score) == (None, result.test_metric)


@pytest.mark.usefixtures("without_plots")
def test_the_default_search_compares_the_losses_of_the_task(tmp_path: Path) -> None:
    result = train("regression", tmp_path, "epochs=8", "optimizer=auto", HORIZON)
    rounds = read_lines(result.run_dir, "rounds")
    candidates = [candidate for line in rounds for candidate in line["candidates"]]
    assert len({candidate["optimizer"] for candidate in candidates}) > 1
    assert all(c["score"] == -c["val_loss"] for c in candidates if c["val_loss"] is not None)
    first, *_, last = read_lines(result.run_dir, "epochs")
    assert last["train_loss"] < first["train_loss"]


def test_a_trained_task_has_its_network_but_no_class_probabilities(tmp_path: Path) -> None:
    run_dir = train("regression", tmp_path).run_dir
    model = load_model(run_dir, trust=True)
    x = model.preprocess([[0.1] * 10])
    assert model.network(x).shape == (1, 1)
    for refused in (lambda: model.classify(x), lambda: evaluate_runs([run_dir], ensemble=True)):
        with pytest.raises(JobError, match="needs task: classification"):
            refused()
    assert "takes arrays of shape (10,)" in command_error("predict", run_dir, "x.png", "--trust")


def test_a_trained_task_is_evaluated_predicts_its_test_set_and_is_exported(tmp_path: Path) -> None:
    result = train("regression", tmp_path)
    evaluation = CliRunner().invoke(main, ["evaluate", result.run_dir, "--trust", "--json"]).stdout
    [row] = json.loads(evaluation)["runs"]
    assert row["metrics"]["absolute_error"] == pytest.approx(result.test_metric, rel=1e-5)
    text = CliRunner().invoke(main, ["evaluate", result.run_dir, "--trust"]).stdout
    assert f"absolute_error {result.test_metric:.4g}" in text
    arguments = ("predict", result.run_dir, "--trust", "--json")
    output = CliRunner().invoke(main, arguments, catch_exceptions=False).stdout
    errors = [row["values"]["absolute_error"] for row in json.loads(output)["predictions"]]
    assert sum(errors) / len(errors) == pytest.approx(result.test_metric, rel=1e-5)
    command = ["export", result.run_dir, "--trust", "--format", "torch_export"]
    path = str(tmp_path / "model")
    assert CliRunner().invoke(main, [*command, "--output", path]).exit_code == 0
    assert torch.export.load(path).module()(torch.zeros(5, 10)).shape == (5, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("loss={label_smoothing: 0.1}", "belongs to task: classification"),
        ("data.sampler=balanced", "balanced needs the labels"),
        ("data.augment={mixup: 0.2}", "mixup and cutmix need the labels"),
        ("data.augment={policy: rand_augment}", "gets the samples as they are"),
        ("data.normalize=none", "gets the samples as they are"),
    ],
)
def test_what_only_classification_has_is_refused(change: str, message: str) -> None:
    with pytest.raises(JobError, match=message) as error:
        load_job(ROOT / "jobs/task_regression.yaml", [change])
    assert {problem.path for problem in error.value.problems} == {change.partition("=")[0]}
