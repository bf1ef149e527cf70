"""Metrics of finished runs on the test set, and of ensembles; one process, no Ray."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from raytrain_opt.config.error_messages import shown
from raytrain_opt.config.load import load_job, refuse_functions
from raytrain_opt.config.schema import Job
from raytrain_opt.data import load_shared_data
from raytrain_opt.errors import JobError, Problem, printable
from raytrain_opt.execution.check import check_sections
from raytrain_opt.execution.progress import RunProgress
from raytrain_opt.train.checkpoint import REST, read_metadata, read_weights
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.learner_config import LearnerConfig
from raytrain_opt.train.trained_model import SavedWeights, find_weights, read_description

_NEEDED = ("model", "data", "optimizer", "task", "loss")


class Predictions(NamedTuple):
    """Probabilities, float32 [samples, classes], and labels, int64 [samples], in order, on CPU.

    `digest`: of the data, as a resume compares it. `changes`: in them since the checkpoint.
    """

    probabilities: Tensor
    labels: Tensor
    digest: str = ""
    changes: str = ""


@dataclass(frozen=True)
class Evaluated:
    """The metrics of a task on the test set; with classification `top1_error`, `top5_error`."""

    run: str
    checkpoint: str
    samples: int
    metrics: dict[str, float]
    changes: str = ""  # of the data since the checkpoint


@dataclass(frozen=True)
class Evaluation:
    """The metrics of all runs, and of their ensemble where it was asked for."""

    runs: tuple[Evaluated, ...]
    ensemble: Evaluated | None
    notes: tuple[str, ...] = ()

    def lines(self) -> Iterator[str]:
        """Yield a table for the terminal."""
        rows = [*self.runs, *([self.ensemble] if self.ensemble else [])]
        names = [printable(f"{row.run} ({row.checkpoint})", kept="") for row in rows]
        for name, row in zip(names, rows, strict=True):
            values = "  ".join(f"{metric} {value:.4g}" for metric, value in row.metrics.items())
            size = "; its data ".join(filter(None, (f"{row.samples} samples", row.changes)))
            yield f"{name:{max(map(len, names))}}  {values}  ({size})"


@dataclass(frozen=True)
class SavedRun:
    """One argument of the command, found on disk."""

    argument: str
    job: Job
    weights: SavedWeights


def evaluate_runs(run_dirs: Sequence[str], *, ensemble: bool, trust: bool = False) -> Evaluation:
    """Evaluate the latest checkpoint of each run directory, or single checkpoints in them.

    With `ensemble` the mean of all probabilities is evaluated too; with `trust`, functions that
    the runs' jobs name are run. Raises JobError for an argument that is no run, and for an
    ensemble with different data or a task, CheckpointError or DataError for what cannot be read.
    """
    classifier = "raytrain-opt evaluate --ensemble" if ensemble else None
    runs = [find_run(run_dir, trust, classifier) for run_dir in run_dirs]
    notes = tuple(f"{run.argument}: {note}" for run in runs for note in run.weights.notes)
    if not ensemble:
        return Evaluation(tuple(map(_evaluate, runs)), None, notes)
    predictions = [_predict(run) for run in runs]
    first = predictions[0]
    for run, other in zip(runs, predictions, strict=True):
        if other.digest != first.digest or not torch.equal(other.labels, first.labels):
            raise _problem(f"has other data than {runs[0].argument}: no ensemble", run.argument)
    mean = torch.stack([of_run.probabilities for of_run in predictions]).mean(dim=0)
    averaged = Predictions(mean, first.labels)
    together = evaluate_predictions("ensemble", f"{len(runs)} runs", averaged)
    evaluated = [
        evaluate_predictions(run.argument, run.weights.reached, of_run)
        for run, of_run in zip(runs, predictions, strict=True)
    ]
    return Evaluation(tuple(evaluated), together, notes)


def _problem(rule: str, run_dir: str) -> JobError:
    return JobError([Problem("RUN_DIR", rule, repr(run_dir))], "arguments")


def find_run(run_dir: str, trust: bool, classifier: str | None = None) -> SavedRun:
    """Return a run whose job is valid; `classifier`: the command, if it needs classification."""
    weights = find_weights(run_dir, "RUN_DIR")
    if not weights.job_file.is_file():
        raise _problem(f"is not a run directory: {weights.job_file} is missing", run_dir)
    job = load_job(weights.job_file)
    if classifier is not None:
        job.task.require_classification(classifier)
    if not trust:
        refuse_functions(job.functions, run_dir)
    # The others need not be valid any more: a replayed schedule may be gone.
    if problems := check_sections({name: getattr(job, name) for name in _NEEDED}):
        raise JobError(problems, str(weights.job_file))
    return SavedRun(run_dir, job, weights)


@contextmanager
def trained_learner(run: SavedRun) -> Iterator[Learner]:
    """Yield a learner with the data and the weights of the run, in evaluation mode."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shared, folder = load_shared_data(run.job.data), run.weights.folder
    with closing(Learner(LearnerConfig.from_job(run.job), shared, device)) as learner:
        metadata, classes = read_metadata(folder), learner.info.class_labels
        if metadata and (trained := read_description(folder, metadata).class_names) != classes:
            rule = f"was trained on classes {shown(trained)}; its data now have {shown(classes)}"
            raise _problem(rule, run.argument)
        try:
            learner.model.load_state_dict(read_weights(folder))
        except RuntimeError as error:
            rule = f"the weights do not match the job's model: {error}"
            raise _problem(rule, run.argument) from error
        learner.model.eval()
        with torch.no_grad(), learner.autocast():
            yield learner


def _evaluate(run: SavedRun) -> Evaluated:
    checkpoint = run.weights.reached
    if run.job.task.is_classification:
        return evaluate_predictions(run.argument, checkpoint, _predict(run))
    with trained_learner(run) as learner:
        totals = learner.add_ranks(learner.evaluate(learner.info.last_set))
        metrics, changes = totals.means, _changes(run, learner)
    return Evaluated(run.argument, checkpoint, totals.samples, metrics, changes)


def _changes(run: SavedRun, learner: Learner) -> str:
    """Return what changed in the data since the checkpoint; "" if it is weights alone."""
    if not (run.weights.folder / REST).exists():
        return ""
    rest = torch.load(run.weights.folder / REST, map_location="cpu", weights_only=True, mmap=True)
    data = RunProgress.from_json(rest["progress"]).data
    return data.changes(replace(learner.info, digest=learner.data.source.digest())) if data else ""


def evaluate_predictions(run: str, checkpoint: str, predictions: Predictions) -> Evaluated:
    """Evaluate a classification; of equal probabilities, the lower class ranks first."""
    ranking = predictions.probabilities.sort(dim=1, descending=True, stable=True).indices
    hits, samples = ranking[:, :5] == predictions.labels.unsqueeze(1), len(predictions.labels)
    top1, top5 = int(hits[:, 0].sum()), int(hits.any(dim=1).sum())
    errors = {"top1_error": 1 - top1 / samples, "top5_error": 1 - top5 / samples}
    return Evaluated(run, checkpoint, samples, errors, predictions.changes)


def _predict(run: SavedRun) -> Predictions:
    """Return what the run's network predicts for the test set, of three sets the third."""
    probabilities, labels = [], []
    with trained_learner(run) as learner:
        size, last = learner.config.eval_batch_size, learner.info.last_set
        for batch in learner.data.eval_batches(last, 0, 1, size):
            probabilities.append(learner.model(batch.x).float().softmax(dim=1).cpu())
            labels.append(batch.y.cpu())
        facts = learner.data.source.digest(), _changes(run, learner)
        return Predictions(torch.cat(probabilities), torch.cat(labels), *facts)
