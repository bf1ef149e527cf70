"""What is wrong with a job beyond its schema, as far as this machine can tell without Ray.

`check_job` looks at names and files, `fit` then at the data themselves.
"""

from __future__ import annotations

from pathlib import Path
from stat import S_ISDIR, S_ISREG

from raytrain_opt.config.functions import resolve_function
from raytrain_opt.config.learning_rate import ReplayPolicy
from raytrain_opt.config.schema import (
    ArraysData,
    ArraySetData,
    DatasetData,
    ImageFolderData,
    Job,
)
from raytrain_opt.errors import JobError, Problem
from raytrain_opt.paths import check_storage


def check_job(job: Job) -> list[Problem]:
    """Every problem of names, arguments, functions and files; no data are read."""
    from raytrain_opt.models import check_model
    from raytrain_opt.optim.build import check_optimizer
    from raytrain_opt.train.loss import check_loss

    return [
        *check_model(job.model),
        *check_data(job),
        *_check_schedule(job),
        *_check_sampler(job),
        *check_optimizer(job.optimizer),
        *check_loss(job.loss),
        *check_storage(job.storage_path),
    ]


def _check_schedule(job: Job) -> list[Problem]:
    if not isinstance(job.learning_rate, ReplayPolicy):
        return []
    from raytrain_opt.search import read_schedule

    try:
        read_schedule(job.learning_rate.schedule)
    except JobError as error:
        return error.problems
    return []


def _check_sampler(job: Job) -> list[Problem]:
    """Where the job itself says that there are no GPUs; else the cluster must tell."""
    if job.batch_size_search is None or job.workers.use_gpu is not False:
        return []
    from raytrain_opt.search.batch_size_build import check_sampler

    try:
        check_sampler(job.batch_size_search, use_gpu=False)
    except JobError as error:
        return error.problems
    return []


def check_data(job: Job) -> list[Problem]:
    """Every problem of the files, folders or function that the job's data are read from."""
    data = job.data
    if isinstance(data, ArraysData):
        files = {"train": data.train, "test": data.test}
        places = [
            (f"data.{k}.{i}", path) for k, pair in files.items() for i, path in enumerate(pair)
        ]
        return [problem for place in places for problem in _missing(*place, folder=False)]
    if isinstance(data, ImageFolderData):
        return _check_image_folder(data)
    if isinstance(data, ArraySetData):
        return _check_array_set(data)
    return _check_function(data)


def _check_array_set(data: ArraySetData) -> list[Problem]:
    if data.name == "digits" or data.download:
        return []
    hint = "data.download: true fetches the set"
    return _missing("data.root", data.root, folder=True, hint=hint)


def _check_image_folder(data: ImageFolderData) -> list[Problem]:
    problems = _missing("data.root", data.root, folder=True)
    splits = {"data.train_split": data.train_split, "data.test_split": data.test_split}
    return problems or [
        problem
        for path, split in splits.items()
        for problem in _missing(path, f"{data.root}/{split}", folder=True)
    ]


def _check_function(data: DatasetData) -> list[Problem]:
    try:
        resolve_function(data.name, "data.name")
    except JobError as error:
        return error.problems
    return []


def _missing(path: str, given: str, *, folder: bool, hint: str | None = None) -> list[Problem]:
    """A problem unless `given` exists as asked."""
    kind = "folder" if folder else "file"
    if "://" in given:
        rule = f"must be a {kind} in the file system of every node, not a URI"
        return [Problem(path, rule, repr(given))]
    try:
        place = Path(given).expanduser()
        found = place.stat()
    except FileNotFoundError:
        rule = f"there is no such {kind} on this machine (the job is checked where it starts)"
        return [Problem(path, rule, repr(given), hint)]
    except (OSError, ValueError, RuntimeError) as error:  # of RuntimeError: an unknown ~user
        rule = f"cannot be looked at: {getattr(error, 'strerror', None) or error}"
        return [Problem(path, rule, repr(given), hint)]
    right = S_ISDIR(found.st_mode) if folder else S_ISREG(found.st_mode)
    return [] if right else [Problem(path, f"must be a {kind}", repr(given), hint)]
