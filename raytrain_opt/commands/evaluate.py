"""Errors of finished runs on the test set, each and as an ensemble; one process, no Ray."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from raytrain_opt.config.error_messages import shown
from raytrain_opt.config.load import load_job, plain_job, refuse_functions
from raytrain_opt.config.schema import Job
from raytrain_opt.data import load_shared_data
from raytrain_opt.errors import JobError, Problem, printable
from raytrain_opt.execution.check import check_sections
from raytrain_opt.train.checkpoint import read_metadata, read_weights
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.learner_config import LearnerConfig
from raytrain_opt.train.trained_model import SavedWeights, find_weights, read_description

_ARGUMENT = "RUN_DIR"
_NEEDED = ("model", "data", "optimizer", "task", "loss")
# Fields of `data` that change neither the test samples nor their classes.
_MAY_DIFFER = {
    "augment",
    "download",
    "drop_last",
    "loader_workers",
    "normalize",
    "root",
    "sampler",
    "validation_fraction",
    "train",
}


@dataclass(frozen=True, eq=False)
class Predictions:
    """Probabilities, float32 [samples, classes], and labels, int64 [samples], in order, on CPU."""

    probabilities: Tensor
    labels: Tensor


@dataclass(frozen=True)
class ErrorRates:
    """Fractions of the samples whose label is not the top prediction, or not in the top five."""

    samples: int
    top1_error: float
    top5_error: float


@dataclass(frozen=True)
class EvaluatedRun:
    """The errors of one run's weights, and the checkpoint that they are from."""

    run: str
    checkpoint: str
    errors: ErrorRates


@dataclass(frozen=True)
class Evaluation:
    """The errors of all runs, and of their ensemble where it was asked for."""

    runs: tuple[EvaluatedRun, ...]
    ensemble: ErrorRates | None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the errors for scripts."""
        return {
            "runs": [
                {"run": run.run, "checkpoint": run.checkpoint, **vars(run.errors)}
                for run in self.runs
            ],
            "ensemble": None if self.ensemble is None else vars(self.ensemble),
        }

    def lines(self) -> Iterator[str]:
        """Yield a table for the terminal."""
        rows = [
            (printable(f"{run.run} ({run.checkpoint})", kept=""), run.errors) for run in self.runs
        ]
        if self.ensemble is not None:
            rows.append((f"ensemble of {len(self.runs)}", self.ensemble))
        width = max(len(name) for name, _ in rows)
        yield f"{'':{width}}  top-1 error  top-5 error  samples"
        for name, errors in rows:
            yield (
                f"{name:{width}}  {errors.top1_error:11.2%}  {errors.top5_error:11.2%}  "
                f"{errors.samples:7}"
            )


@dataclass(frozen=True)
class _SavedRun:
    """One argument of the command, found on disk."""

    argument: str
    job: Job
    weights: SavedWeights


def evaluate_runs(run_dirs: Sequence[str], *, ensemble: bool, trust: bool = False) -> Evaluation:
    """Evaluate the latest checkpoint of each run directory, or single checkpoints in them.

    With `ensemble` the mean of all probabilities is evaluated too; with `trust`, functions that
    the runs' jobs name are run. Raises JobError when an argument is not a run or the runs have
    different test data, CheckpointError or DataError when checkpoint or data cannot be read.
    """
    runs = [_find_run(run_dir, trust) for run_dir in run_dirs]
    _refuse_different_data(runs)
    predictions = [_predict(run) for run in runs]
    evaluated = tuple(
        EvaluatedRun(run.argument, run.weights.reached, error_rates(of_run))
        for run, of_run in zip(runs, predictions, strict=True)
    )
    try:
        of_ensemble = error_rates(average_predictions(predictions)) if ensemble else None
    except ValueError as error:
        rule = "the runs have the same data section, but not the same test labels"
        raise JobError([Problem(_ARGUMENT, rule)], "arguments") from error
    notes = tuple(f"{run.argument}: {note}" for run in runs for note in run.weights.notes)
    return Evaluation(evaluated, of_ensemble, notes)


def _find_run(run_dir: str, trust: bool) -> _SavedRun:
    weights = find_weights(run_dir, _ARGUMENT)
    if not weights.job_file.is_file():
        rule = f"is not a run directory: {weights.job_file} is missing"
        raise JobError([Problem(_ARGUMENT, rule, repr(run_dir))], "arguments")
    job = load_job(weights.job_file)
    job.task.require_classification("raytrain-opt evaluate")
    if not trust:
        refuse_functions(job.functions, run_dir)
    # The others need not be valid any more: a replayed schedule may be gone.
    problems = check_sections({name: getattr(job, name) for name in _NEEDED})
    if problems:
        raise JobError(problems, str(weights.job_file))
    return _SavedRun(run_dir, job, weights)


def _refuse_different_data(runs: Sequence[_SavedRun]) -> None:
    first = runs[0]
    expected = plain_job(first.job)["data"]
    for other in runs[1:]:
        data = plain_job(other.job)["data"]
        problems = [
            Problem(
                f"data.{key}",
                f"is {shown(expected.get(key))} in {first.argument}",
                shown(data.get(key)),
            )
            for key in sorted({*expected, *data} - _MAY_DIFFER)
            if expected.get(key) != data.get(key)
        ]
        if problems:
            raise JobError(problems, f"{other.argument} has different test data")


def _predict(run: _SavedRun) -> Predictions:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shared, folder = load_shared_data(run.job.data), run.weights.folder
    with closing(Learner(LearnerConfig.from_job(run.job), shared, device)) as learner:
        metadata, classes = read_metadata(folder), learner.info.class_labels
        if metadata and (trained := read_description(folder, metadata).class_names) != classes:
            rule = f"was trained on classes {shown(trained)}; its data now have {shown(classes)}"
            raise JobError([Problem(_ARGUMENT, rule, repr(run.argument))], "arguments")
        try:
            learner.model.load_state_dict(read_weights(folder))
        except RuntimeError as error:
            rule = f"the weights do not match the job's model: {error}"
            raise JobError([Problem(_ARGUMENT, rule, repr(run.argument))], "arguments") from error
        return predict(learner)


@torch.no_grad()
def predict(learner: Learner) -> Predictions:
    """Evaluate the learner's current weights on the test split."""
    learner.model.eval()
    probabilities, labels = [], []
    for batch in learner.data.eval_batches("test", 0, 1, learner.eval_batch_size):
        with learner.autocast():
            output = learner.model(batch.x)
        probabilities.append(output.float().softmax(dim=1).cpu())
        labels.append(batch.y.cpu())
    return Predictions(torch.cat(probabilities), torch.cat(labels))


def error_rates(predictions: Predictions) -> ErrorRates:
    """Return the top-1 and top-5 error; of equal probabilities, the lower class ranks first."""
    ranking = predictions.probabilities.sort(dim=1, descending=True, stable=True).indices
    hits = ranking[:, :5] == predictions.labels.unsqueeze(1)
    samples = len(predictions.labels)
    return ErrorRates(
        samples, 1 - int(hits[:, 0].sum()) / samples, 1 - int(hits.any(dim=1).sum()) / samples
    )


def average_predictions(models: Sequence[Predictions]) -> Predictions:
    """Average the probabilities of models. Raises ValueError if their labels differ."""
    first = models[0]
    if any(not torch.equal(predictions.labels, first.labels) for predictions in models):
        raise ValueError("the ensemble's models were evaluated on different samples")
    mean = torch.stack([predictions.probabilities for predictions in models]).mean(dim=0)
    return Predictions(mean, first.labels)
