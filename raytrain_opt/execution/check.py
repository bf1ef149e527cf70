"""Every check of a job that needs no Ray: names and files, then its data and its network.

A check reports problems, and facts that `resolve` needs; it decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytrain_opt.config.data import DataSection
from raytrain_opt.config.load import plain_job, resolve_function
from raytrain_opt.config.schema import Job
from raytrain_opt.config.section import is_function_name
from raytrain_opt.config.updates import OptimizerChoiceSection
from raytrain_opt.errors import DataError, JobError, Problem, problems_of
from raytrain_opt.execution.resolve import Facts, count_updates
from raytrain_opt.optim.epoch_steps import length_of
from raytrain_opt.search.factory import build_policy
from raytrain_opt.storage import check_uri
from raytrain_opt.train.learner_config import LearnerConfig

if TYPE_CHECKING:
    from torch import nn

    from raytrain_opt.data.base import Batch, DataInfo
    from raytrain_opt.data.factory import SharedData
    from raytrain_opt.train.task import Task

_DATA_FUNCTIONS = ("name", "collate", "sampler")
# Returns the number of threads to train with, by batch size of a worker and largest number.
ChooseThreads = Callable[[int, int], int]


def check_job(job: Job) -> list[Problem]:
    """Return every problem of names, arguments, functions and files; no data are read."""
    problems = check_sections({name: getattr(job, name) for name in Job.model_fields})
    return problems + problems_of(lambda: plain_job(job))  # which a run writes


def check_sections(sections: Mapping[str, Any]) -> list[Problem]:
    """Check the given sections, some of a job whose others have errors, as `check_job` does."""
    from raytrain_opt.execution.callbacks import check_tracking
    from raytrain_opt.models import check_model
    from raytrain_opt.train.task import check_loss, check_task

    checks: dict[str, Callable[[Any], list[Problem]]] = {
        "model": check_model,
        "data": check_data,
        "learning_rate": _check_schedule,
        "optimizer": _check_optimizers,
        "task": check_task,
        "loss": check_loss,
        "storage_path": check_uri,
        "callbacks": _check_callbacks,
        "tracking": check_tracking,
    }
    return [
        problem
        for name, check in checks.items()
        if name in sections
        for problem in check(sections[name])
    ]


def check_data(data: DataSection) -> list[Problem]:
    """Return every problem of the functions, files or folders that the data are read from."""
    fields = {f"data.{field}": getattr(data, field, None) for field in _DATA_FUNCTIONS}
    problems = [
        problem
        for field, function in fields.items()
        if function is not None and is_function_name(function)
        for problem in problems_of(partial(resolve_function, function, field))
    ]
    faulty: list[str] = []
    for field, path in data.files():
        if path.startswith(tuple(faulty)):  # below a folder that is missing
            continue
        found = check_uri(path, field) if "://" in path else _check_path(field, path)
        problems += found
        faulty += [f"{path}/"] * bool(found)
    return problems


def try_job(
    job: Job, source: str = "job", *, resumed: bool = False
) -> tuple[Facts, SharedData, ChooseThreads]:
    """Read the data of a job that passed `check_job`; try model and loss on them.

    Also returns what all processes share of the data, and a function, which keeps the network. A
    `resumed` run needs no pretrained weights any more. Raises DataError when the data cannot be
    used, JobError with all fields that do not match them.
    """
    shared, info, samples = read_data(job)
    config, problems = LearnerConfig.from_job(job), list[Problem]()
    if job.workers.size > info.train_size:
        rule = f"more than the training set has samples ({info.train_size})"
        problems = [Problem("workers.count", rule, str(job.workers.size))]
    elif job.batch_size_search is None:
        length = length_of(job)
        problems = problems_of(lambda: build_policy(job, length, count_updates(config, info)))
    tried: list[tuple[Facts, ChooseThreads]] = []
    problems += problems_of(
        lambda: tried.append(_try_network(job, config, info, samples, resumed=resumed))
    )
    if problems:
        raise JobError(problems, source)
    facts, choose_threads = tried[0]
    return facts, shared, choose_threads


def try_local_job(job: Job, source: str) -> Facts | None:
    """Try a job without any download; return None if the data must be downloaded first."""
    from raytrain_opt.train.pretrained import names_torchvision_weights

    if names_torchvision_weights(job.model):
        job = job.model_copy(update={"model": job.model.model_copy(update={"weights": None})})
    section = job.data.model_copy(update={"download": False})
    try:
        return try_job(job.model_copy(update={"data": section}), source)[0]
    except DataError:
        if not job.data.download:
            raise
        return None


def read_data(job: Job) -> tuple[SharedData, DataInfo, tuple[Batch, Batch]]:
    """Return what all processes share, the sizes, and two samples of each set."""
    import torch

    from raytrain_opt.data import load_shared_data, open_data

    shared = load_shared_data(job.data)
    data = open_data(
        job.data,
        shared,
        hold_out=job.hold_out,
        seed=job.seed,
        device=torch.device("cpu"),
        channels_last=job.channels_last,
        classification=job.task.is_classification,
    )
    try:
        is_one = job.batch_size_per_worker == 1 and job.batch_size_search is None
        samples = data.first_samples("train", 1 if is_one else 2), data.first_samples("test")
    finally:
        data.close()
    return shared, replace(data.info, digest=data.source.digest()), samples


def _try_network(
    job: Job, config: LearnerConfig, info: DataInfo, samples: tuple[Batch, Batch], *, resumed: bool
) -> tuple[Facts, ChooseThreads]:
    """Build the model on the CPU, as every worker does, try it, and weigh Muon's cost."""
    from torch.nn import GroupNorm
    from torch.nn.modules.batchnorm import _NormBase  # of BatchNorm and InstanceNorm

    from raytrain_opt.data.base import refuse_channels_last
    from raytrain_opt.optim.factory import EMBEDDING, group_parameters
    from raytrain_opt.optim.muon import orthogonalization_flops
    from raytrain_opt.train.kernels import time_threads
    from raytrain_opt.train.pretrained import fit_pretrained, read_pretrained
    from raytrain_opt.train.task import build_task, find_metric_names

    shape, classes = info.sample_shape, info.num_classes
    if not is_function_name(job.model.name):
        refuse_channels_last(shape)
    model = config.build_model(info)
    task = build_task(job.task, job.loss, info)
    _try_model(job, task, model, samples, classes)
    find_metric_names(task, model, samples[1])
    if not job.parallel.common_steps:
        _check_asynchronous(task, model)
    if job.model.weights is not None and not resumed:
        fit_pretrained(model.state_dict(), read_pretrained(job.model), classes)
    groups = [group_parameters(optimizer, model) for optimizer in job.optimizers]
    sample_flops, search_flops = _sample_flops(job, task, model, samples[0], shape)
    muon_flops = 0.0
    if job.optimizer.chooses_freely:
        own = (group for section in groups for group in section if group.get("use_muon"))
        muon_flops = orthogonalization_flops([p.shape for group in own for p in group["params"]])
    facts = Facts(
        info,
        None if any(p.is_complex() for p in model.parameters()) else muon_flops,
        sample_flops,
        search_flops,
        channel_norm=any(isinstance(layer, _NormBase | GroupNorm) for layer in model.modules()),
        embeddings=any(isinstance(layer, EMBEDDING) for layer in model.modules()),
    )
    return facts, partial(time_threads, task, model, samples[0], job.precision)


def _check_asynchronous(task: Task, model: nn.Module) -> None:
    """Raise JobError if shards cannot hold the weights, or no worker can compute the metrics."""
    from raytrain_opt.async_training.weight_shard import shard_parameters
    from raytrain_opt.train.task import aggregates

    if aggregates(task):
        rule = "has aggregate, and with parallel.mode: async no worker has the outputs of all"
        raise JobError([Problem("task.name", rule)])
    shard_parameters(model, 1)


def _sample_flops(
    job: Job, task: Task, model: nn.Module, batch: Batch, shape: tuple[int, ...]
) -> tuple[float, float]:
    """Return the FLOPs of a sample as counted, and for the limits of a search; 0 and inf without.

    Where they cannot be counted, the second value is as if every weight met every input.
    """
    from raytrain_opt.train.task import count_flops

    if not job.learning_rate.searches_first:
        return 0.0, math.inf
    if math.isfinite(counted := count_flops(task, model, batch)):
        return counted, counted
    weights = sum(parameter.numel() for parameter in model.parameters())
    return counted, 6.0 * weights * math.prod(shape or ())


def _try_model(
    job: Job, task: Task, model: nn.Module, samples: tuple[Batch, Batch], num_classes: int
) -> None:
    """Try model, loss and the first step."""
    import torch

    from raytrain_opt.optim.factory import build_optimizer
    from raytrain_opt.train.step_check import check_steps

    for name, value in model.state_dict().items():
        if not torch.is_tensor(value):  # of `get_extra_state`
            rule = f"state_dict() must hold tensors only, but {name} is a {type(value).__name__}"
            raise JobError([Problem("model.name", rule, hint="store it as a buffer")])
    own = [o for o in job.optimizers if is_function_name(o.name)]
    optimizers = [build_optimizer(o, model, steps_per_epoch=1) for o in own]
    try:
        check_steps(task, model, *samples, num_classes, optimizers)
    except (DataError, JobError) as error:
        if not job.channels_last or "view size is not compatible" not in str(error):
            raise
        rule = "must be false for this network, which calls view; or call reshape(…) in its place"
        raise JobError([Problem("channels_last", rule, "true")]) from error


def _check_callbacks(names: Sequence[str | Callable[..., Any]]) -> list[Problem]:
    checks = (partial(resolve_function, name, f"callbacks.{i}") for i, name in enumerate(names))
    return [problem for check in checks for problem in problems_of(check)]


def _check_optimizers(section: OptimizerChoiceSection) -> list[Problem]:
    from raytrain_opt.optim.factory import check_optimizer

    if not section.is_choice:
        return check_optimizer(section)
    return [
        replace(problem, path=problem.path.replace("optimizer", f"optimizer.candidates.{i}", 1))
        for i, candidate in enumerate(section.candidates)
        for problem in check_optimizer(candidate)
    ]


def _check_schedule(section: Any) -> list[Problem]:
    from raytrain_opt.search.factory import read_schedule

    recorded = getattr(section, "schedule", None)
    return [] if recorded is None else problems_of(lambda: read_schedule(recorded))


def _check_path(field: str, path: str) -> list[Problem]:
    try:
        if Path(path).expanduser().exists():
            return []
        rule = "no such file or folder on this machine (the job is checked where it starts)"
        return [Problem(field, rule, repr(path))]
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: an unknown ~user
        reason = error.strerror if isinstance(error, OSError) else None
        return [Problem(field, f"cannot be read: {reason or error}", repr(path))]
