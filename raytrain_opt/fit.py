"""Do job, data and model fit each other? Known before any process of a run starts, where the
data are local.

The driver reads the data anyway (in-memory sets are read nowhere else), beside the start of Ray.
So an alpha that is longer than the epoch or a label that does not exist costs seconds, not a start
of the pools, and its message comes from here, not from a worker.
"""

from __future__ import annotations

from dataclasses import dataclass

from raytrain_opt.config.schema import Job
from raytrain_opt.data import load_shared, open_data
from raytrain_opt.data.array_sets import Arrays
from raytrain_opt.data.base import DataInfo
from raytrain_opt.errors import DataError, JobError, Problem
from raytrain_opt.optim.batch_ramp import epoch_steps
from raytrain_opt.search import build_policy


@dataclass(frozen=True)
class Data:
    """What the driver read: arrays to share (in-memory sets only), and sizes."""

    shared: Arrays | None
    info: DataInfo


def fitting_data(job: Job, source: str = "job") -> Data:
    """The data of a job that `check_job` found right.

    Raises DataError when they cannot be used, JobError with all that does not fit them.
    """
    data = _read(job)
    problems = [
        *_length_problems(job, data.info),
        *_model_problems(job, data.info),
        *_loss_problems(job, data.info),
    ]
    if problems:
        raise JobError(problems, source)
    return data


def data_if_here(job: Job, source: str) -> Data | None:
    """The same without fetching anything: None where that comes first (data.download)."""
    if not getattr(job.data, "download", False):
        return fitting_data(job, source)
    section = job.data.model_copy(update={"download": False})
    try:
        return fitting_data(job.model_copy(update={"data": section}), source)
    except DataError:
        return None


def _read(job: Job) -> Data:
    import torch

    shared = load_shared(job.data)
    data = open_data(
        job.data,
        shared,
        seed=job.seed,
        device=torch.device("cpu"),
        channels_last=job.channels_last,
    )
    try:
        data.check_samples()
    finally:
        data.close()
    return Data(shared, data.info)


def _length_problems(job: Job, info: DataInfo) -> list[Problem]:
    """Batches, alpha and replayed schedules against the length of an epoch."""
    if job.workers.count > info.train_size:
        rule = f"more than the training set has samples ({info.train_size})"
        return [Problem("workers.count", rule, str(job.workers.count))]
    if job.batch_size_search is not None:
        return []  # the batch size is not known yet
    try:
        steps = epoch_steps(info.train_size, job.global_batch_size, job.batch_ramp)
        build_policy(job, steps)
    except JobError as error:
        return error.problems
    return []


def _model_problems(job: Job, info: DataInfo) -> list[Problem]:
    """Built and called once on the CPU, as every worker does it."""
    from raytrain_opt.models import build_model, check_output

    shape, classes = info.sample_shape, info.num_classes
    try:
        model = build_model(job.model, num_classes=classes, sample_shape=shape, seed=job.seed)
        check_output(model, shape, classes, "cpu")
        if job.parallel.mode == "async":
            from raytrain_opt.train.parameter_server import split_parameters

            split_parameters(model, 1)
    except JobError as error:
        return error.problems
    except DataError as error:
        return [error.problem]
    return []


def _loss_problems(job: Job, info: DataInfo) -> list[Problem]:
    from raytrain_opt.train.loss import check_loss_value

    return check_loss_value(job.loss, info.num_classes)
