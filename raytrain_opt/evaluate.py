"""Errors of finished trainings on the test split, each and as an ensemble; one process, no Ray."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytrain_opt.check import check_job
from raytrain_opt.config.load import load_job, plain_job
from raytrain_opt.config.messages import shown
from raytrain_opt.config.schema import Job
from raytrain_opt.errors import JobError, Problem
from raytrain_opt.paths import RunPaths

if TYPE_CHECKING:
    from raytrain_opt.train.ensemble import Errors, Predictions

_ARGUMENT = "RUN_DIR"
# Of `data`: they do not decide which test samples there are, or which class each has.
_MAY_DIFFER = {
    "augment",
    "download",
    "loader_workers",
    "normalize",
    "prefetch",
    "root",
    "selection_fraction",
    "selection_max_samples",
    "train",
}


@dataclass(frozen=True)
class Evaluated:
    """One training: where its weights came from, and its errors."""

    run: str
    commit: str
    errors: Errors


@dataclass(frozen=True)
class Evaluation:
    """Of every training given, and of all together where that was wanted."""

    members: tuple[Evaluated, ...]
    ensemble: Errors | None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """For scripts."""
        return {
            "runs": [
                {"run": each.run, "commit": each.commit, **vars(each.errors)}
                for each in self.members
            ],
            "ensemble": None if self.ensemble is None else vars(self.ensemble),
        }

    def lines(self) -> Iterator[str]:
        """For people."""
        rows = [(f"{each.run} ({each.commit})", each.errors) for each in self.members]
        if self.ensemble is not None:
            rows.append((f"ensemble of {len(self.members)}", self.ensemble))
        width = max(len(name) for name, _ in rows)
        yield f"{'':{width}}  top-1 error  top-5 error  samples"
        for name, at in rows:
            yield f"{name:{width}}  {at.top1_error:11.2%}  {at.top5_error:11.2%}  {at.samples:7}"


@dataclass(frozen=True)
class _Trained:
    given: str
    job: Job
    folder: Path
    commit: str
    notes: tuple[str, ...]


def evaluate_runs(places: Sequence[str], *, ensemble: bool) -> Evaluation:
    """Each place is a run directory, of which the last whole commit counts, or the folder of one
    commit in it. With `ensemble` the probabilities of all are averaged.

    Raises JobError: a place holds no run, or the runs do not have the same test data.
    CheckpointError, DataError: what they name cannot be read.
    """
    trained = [_find(place) for place in places]
    _refuse_other_data(trained)
    return _evaluated(trained, ensemble)


def _evaluated(trained: Sequence[_Trained], as_one: bool) -> Evaluation:
    from raytrain_opt.train.ensemble import ensemble, errors

    found = [_predictions(each) for each in trained]
    members = tuple(
        Evaluated(at.given, at.commit, errors(each))
        for at, each in zip(trained, found, strict=True)
    )
    try:
        together = errors(ensemble(found)) if as_one else None
    except ValueError as error:
        rule = "the runs have the same data section, but not the same test labels"
        raise JobError([Problem(_ARGUMENT, rule)], "arguments") from error
    notes = tuple(f"{at.given}: {note}" for at in trained for note in at.notes)
    return Evaluation(members, together, notes)


def _find(place: str) -> _Trained:
    from raytrain_opt.train.checkpoint import Checkpoints

    folder = Path(place).expanduser().absolute()
    if "://" not in place and (folder / "weights.safetensors").is_file():
        job = _job(folder.parents[1] / "job.yaml", place)
        return _Trained(place, job, folder, folder.name, ())
    paths = RunPaths.existing(place, _ARGUMENT)
    job = _job(paths.job, place)
    commits = Checkpoints(paths.checkpoints, job.checkpoint)
    damages = tuple(f"{damage}; the one before is used" for damage in commits.forget_damaged())
    if commits.latest is None:
        raise JobError([Problem(_ARGUMENT, "has no commit yet", repr(place))], "arguments")
    at = commits.latest
    return _Trained(place, job, paths.checkpoints / at.folder, at.reached, damages)


def _job(path: Path, place: str) -> Job:
    if not path.is_file():
        rule = f"there is no {path}, which a run directory has"
        raise JobError([Problem(_ARGUMENT, rule, repr(place))], "arguments")
    job = load_job(path)
    problems = check_job(job)
    if problems:
        raise JobError(problems, str(path))
    return job


def _refuse_other_data(trained: Sequence[_Trained]) -> None:
    first = trained[0]
    wanted = plain_job(first.job)["data"]
    for other in trained[1:]:
        data = plain_job(other.job)["data"]
        problems = [
            Problem(
                f"data.{key}",
                f"is {shown(wanted.get(key))} in {first.given}",
                shown(data.get(key)),
            )
            for key in sorted({*wanted, *data} - _MAY_DIFFER)
            if wanted.get(key) != data.get(key)
        ]
        if problems:
            raise JobError(problems, f"{other.given} has other test data")


def _predictions(at: _Trained) -> Predictions:
    import torch

    from raytrain_opt.data import load_shared
    from raytrain_opt.train.checkpoint import read_weights
    from raytrain_opt.train.ensemble import predictions
    from raytrain_opt.train.learner import Learner

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    learner = Learner(at.job, load_shared(at.job.data), device)
    try:
        learner.model.load_state_dict(read_weights(at.folder))
        return predictions(learner)
    except RuntimeError as error:
        rule = f"the weights do not fit the job's model: {error}"
        raise JobError([Problem(_ARGUMENT, rule, repr(at.given))], "arguments") from error
    finally:
        learner.close()
