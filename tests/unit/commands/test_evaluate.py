"""Errors of runs, of single checkpoints and of ensembles, on the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from torch import Tensor

from raytrain_opt import cli
from raytrain_opt.commands.evaluate import Predictions, evaluate_predictions
from raytrain_opt.config.data import DataSection
from raytrain_opt.config.load import dump_job
from raytrain_opt.data import load_shared_data
from raytrain_opt.data.base import DataFingerprint
from raytrain_opt.data.factory import SharedData
from raytrain_opt.data.in_memory_sets import DatasetArrays
from raytrain_opt.execution.progress import RunProgress
from raytrain_opt.paths import RunPaths
from raytrain_opt.results import Steps
from raytrain_opt.train.checkpoint import Checkpoints, Point
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.learner_config import LearnerConfig
from raytrain_opt.train.micro_batches import MicroBatches
from raytrain_opt.train.trained_model import model_metadata
from tests.support.cli_errors import command_error
from tests.support.small_jobs import small_job


def trained(
    storage: Path, epochs: int = 2, *, progress: Any = None, **changes: Any
) -> tuple[str, list[Tensor]]:
    """A run directory, and the test probabilities after each epoch, computed literally."""
    job = small_job(storage, **changes)
    paths = RunPaths.create(job.storage_path, job.name)
    paths.job.write_text(dump_job(job))
    learner = Learner(LearnerConfig.from_job(job), load_shared_data(job.data), torch.device("cpu"))
    checkpoints, probabilities = Checkpoints(paths.checkpoints, job.checkpoint), []
    checkpoints.metadata = model_metadata(job.model, job.task, learner.info)
    for epoch in range(1, epochs + 1):
        learner.train(epoch, Steps(0, (0.1,) * 15), MicroBatches(range(1), 1))
        checkpoints.save(Point(epoch), learner.state(copy=True), progress or {}, None)
        learner.model.eval()
        batches = list(learner.data.eval_batches("test", 0, 1, 500))
        with torch.no_grad():
            probabilities.append(torch.cat([learner.model(b.x).softmax(1) for b in batches]))
    return str(paths.local), probabilities


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, list[Tensor]]]:
    return [trained(tmp_path_factory.mktemp("runs"), seed=seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def labels() -> Tensor:
    shared = load_shared_data(small_job(Path()).data)
    assert shared is not None
    return torch.from_numpy(shared.test_y)


def evaluate(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, ["evaluate", *arguments])


def reference_errors(probabilities: Tensor, labels: Tensor) -> tuple[float, float]:
    """The definition of top-1 and top-5 error, sample by sample."""
    wrong = [0, 0]
    for row, label in zip(probabilities.numpy(), labels.tolist(), strict=True):
        order = np.argsort(-row, kind="stable").tolist()
        wrong[0] += label != order[0]
        wrong[1] += label not in order[:5]
    return wrong[0] / len(labels), wrong[1] / len(labels)


def test_data_that_changed_since_the_checkpoint_are_named(tmp_path: Path) -> None:
    """A function that splits them by an unseeded generator, for example."""
    progress = RunProgress(data=DataFingerprint((), {}, "")).to_json()
    result = evaluate(trained(tmp_path, 1, progress=progress)[0])
    assert "samples; its data changed since the checkpoint: class 0 is new, " in result.output


def test_each_run_and_their_ensemble(runs: list[tuple[str, list[Tensor]]], labels: Tensor) -> None:
    result = evaluate(*[run for run, _ in runs], "--ensemble", "--json")
    assert result.exit_code == 0, result.output
    evaluation = json.loads(result.output)
    for line, (run, epochs) in zip(evaluation["runs"], runs, strict=True):
        assert (line["run"], line["checkpoint"], line["samples"]) == (run, "epoch 2", len(labels))
        expected = reference_errors(epochs[-1], labels)
        assert (*line["metrics"].values(),) == pytest.approx(expected)
    mean = (runs[0][1][-1] + runs[1][1][-1]) / 2
    of_ensemble = evaluation["ensemble"]
    assert of_ensemble["run"] == "ensemble"
    expected = reference_errors(mean, labels)
    assert (*of_ensemble["metrics"].values(),) == pytest.approx(expected)


def test_a_single_checkpoint_of_a_run(
    runs: list[tuple[str, list[Tensor]]], labels: Tensor
) -> None:
    run, epochs = runs[0]
    evaluation = json.loads(evaluate(f"{run}/checkpoints/epoch-0001", "--json").output)
    assert evaluation["ensemble"] is None
    [line] = evaluation["runs"]
    assert line["checkpoint"] == "epoch-0001"
    assert line["metrics"]["top1_error"] == pytest.approx(reference_errors(epochs[0], labels)[0])


def test_runs_on_different_data_make_no_ensemble(
    runs: list[tuple[str, list[Tensor]]], tmp_path: Path
) -> None:
    for name in ("x.npy", "y.npy"):
        array = np.zeros((64, 8, 8, 1), np.uint8) if name == "x.npy" else np.arange(64) % 10
        np.save(tmp_path / name, array)
    files = [str(tmp_path / "x.npy"), str(tmp_path / "y.npy")]
    data = {"name": "arrays", "train": files, "test": files}
    other, _ = trained(tmp_path, epochs=1, data=data, global_batch_size=2)
    message = command_error("evaluate", runs[0][0], other, "--ensemble")
    assert f"has other data than {runs[0][0]}: no ensemble (given: '{other}')" in message
    assert evaluate(runs[0][0], other).exit_code == 0


def test_weights_of_another_network_are_refused(tmp_path: Path) -> None:
    run, _ = trained(tmp_path, epochs=1)
    job = Path(run, "job.yaml")
    job.write_text(dump_job(small_job(tmp_path, model="resnet8")))
    assert "the weights do not match the job's model" in command_error("evaluate", run)


def test_data_whose_classes_were_renamed_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = trained(tmp_path, epochs=1)

    def load(section: DataSection) -> SharedData:
        shared = load_shared_data(section)
        assert isinstance(shared, DatasetArrays)
        return replace(shared, class_names=tuple("9876543210"))

    monkeypatch.setattr("raytrain_opt.commands.evaluate.load_shared_data", load)
    assert "was trained on classes ('0', '1'," in command_error("evaluate", run)


def test_top_5_of_fewer_classes_and_ties() -> None:
    two = Predictions(torch.tensor([[0.5, 0.5], [0.2, 0.8]]), torch.tensor([0, 0]))
    evaluated = evaluate_predictions("run", "epoch 1", two)
    assert (evaluated.samples, *evaluated.metrics.values()) == (2, 0.5, 0.0)
