"""Predict a job on a described cluster, and print what it takes (docs/planning.md)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from raytrain_opt.config.data import ImageFolderData
from raytrain_opt.config.schema import Job
from raytrain_opt.config.section import parse_duration
from raytrain_opt.data.base import DataInfo
from raytrain_opt.errors import JobError, Problem
from raytrain_opt.execution.check import check_job, try_local_job
from raytrain_opt.models import build_model
from raytrain_opt.planning.cluster import ClusterSection, read_cluster
from raytrain_opt.planning.prediction import Planner, Prediction
from raytrain_opt.planning.terms import (
    count_work,
    measured_steps,
    measured_terms,
    public_terms,
    state_bytes,
)
from raytrain_opt.report.formatting import duration

# ImageNet's validation set, as a fraction of its training set.
_TEST_FRACTION = 0.04
# Less is a waste: a doubling then costs a third more device time than one that is ideal.
_MIN_DOUBLING_SPEEDUP = 1.5


def plan(
    job: Job,
    cluster: str,
    measured: Sequence[str] = (),
    data: str | None = None,
    within: str | None = None,
    budget: float | None = None,
) -> str:
    """Return the plan of a job as text; the arguments are those of the command line."""
    section = read_cluster(cluster)
    if budget is not None and section.price_per_node_hour is None:
        rule = "needs price_per_node_hour in the YAML file of --cluster"
        raise JobError([Problem("--budget", rule, f"{budget:g}")], "plan")
    within_s = None if within is None else _seconds(within)
    planner = _planner(job, section, measured, data)
    lines = [*_summary(planner), "", *_scaling(planner)]
    if within_s is not None:
        lines += [_choose(planner, f"within {within}", lambda p: p.total_s, within_s)]
    if budget is not None:
        lines += [_choose(planner, f"for {budget:g}", lambda p: p.cost, budget)]
    return "\n".join(lines)


def _planner(
    job: Job, cluster: ClusterSection, measured: Sequence[str], data: str | None
) -> Planner:
    if job.epochs is None:
        rule = "a plan needs epochs: --set train_for=null --set epochs=90"
        raise JobError([Problem("train_for", rule)], "plan")
    job.task.require_classification("raytrain-opt plan")
    info = _read_info(job, data)
    model = build_model(
        job.model, num_classes=info.num_classes, sample_shape=info.sample_shape, seed=job.seed
    )
    work = count_work(model, info.sample_shape, info.num_classes)
    terms = public_terms(job, work, cluster)
    if measured:
        terms = measured_terms(measured, terms, cluster.devices)
    if terms is None:
        rule = "CPUs have no public figures: measure one worker and give its run with --measured"
        raise JobError([Problem("--cluster", rule, cluster.kind)], "plan")
    width = 4 if job.parallel.compression == "none" else 2
    planner = Planner(
        job,
        info,
        cluster,
        terms,
        exchange_bytes=width * work.parameters,
        checkpoint_bytes=state_bytes(job, work.parameters),
        sample_flops=work.flops,
    )
    return planner.calibrated(measured_steps(measured))


def _read_info(job: Job, data: str | None) -> DataInfo:
    """Return the sizes of the data, from the data or from `SAMPLESxCLASSES`."""
    if data is None:
        problems = check_job(job)
        facts = None if problems else try_local_job(job, "plan")
        if facts is not None:
            return facts.info
        hint = "for an image folder give its size: --data 1281167x1000 (samples x classes)"
        missing = Problem("data", "are not on this machine", None, hint)
        raise JobError([*problems, missing], "plan")
    match = re.fullmatch(r"(\d+)x(\d+)", data)
    if match is None or not isinstance(job.data, ImageFolderData):
        rule = "must be SAMPLESxCLASSES, for data of name image_folder"
        raise JobError([Problem("--data", rule, repr(data))], "plan")
    samples, classes = map(int, match.groups())
    held_out = job.hold_out.count(samples)
    train = samples if job.hold_out.only_in_search else samples - held_out
    shape = (3, job.data.image_size, job.data.image_size)
    test = round(_TEST_FRACTION * samples)
    return DataInfo(classes, shape, train, samples - held_out, held_out, test)


def _summary(planner: Planner) -> list[str]:
    job, cluster, batch = planner.job, planner.cluster, planner.job.global_batch_size
    workers = job.workers.size
    if job.workers.count == "auto":
        workers = next(n for n in range(cluster.size, 0, -1) if batch % n == 0)
    planned = planner.predict(workers, batch)
    kept = job.checkpoint.keep
    assert job.epochs is not None  # see `_planner`
    kept = job.epochs if kept == "all" else kept + 1
    checkpoints = kept * planner.checkpoint_bytes
    missing = " (it has less)" if planned.memory_bytes > cluster.memory_bytes else ""
    lines = {
        "cluster": f"{cluster.nodes} nodes x {cluster.devices} {cluster.kind}",
        "terms": planner.terms.source,
        "workers": f"{workers}, {batch // workers} samples each",
        "step": f"{_ms(planned.step_s)}, {batch / planned.step_s:,.0f} samples/s; all-reduce "
        f"{_ms(planned.exchange_s)}, of which {_ms(planned.hidden_s)} beside the backward pass",
        "epoch": duration(planned.epoch_s),
        "search": f"{duration(planned.search_s)}, {planned.search_on}",
        "training": duration(planned.training_s),
        "memory": f"{planned.memory_bytes / 2**30:.3g} GiB of each device{missing}",
        "storage": f"{checkpoints / 2**30:.3g} GiB of checkpoints",
        "cost": _cost(planned),
    }
    return [f"{name:9} {value}" for name, value in lines.items()]


def _scaling(planner: Planner) -> list[str]:
    """Return a row per number of workers, where a doubling stops paying, and of a larger batch."""
    predictions = planner.doublings()
    lines = ["workers  step         samples/s  search + training"]
    for p in predictions:
        row = f"{p.workers:7}  {_ms(p.step_s):11} {p.global_batch_size / p.step_s:10,.0f}"
        lines.append(f"{row}  {duration(p.total_s)}, {_cost(p)}")
    advice = "every doubling pays, as far as the cluster and its memory go"
    for before, after in zip(predictions, predictions[1:], strict=False):
        speedup, ratio = before.total_s / after.total_s, after.workers / before.workers
        if speedup < _MIN_DOUBLING_SPEEDUP * ratio / 2:
            shares = (after.exchange_s - after.hidden_s, planner.terms.update_s)
            exchange, update = (share / after.step_s for share in shares)
            advice = (
                f"{after.workers} workers do not pay: only {speedup:.2f} times as fast as "
                f"{before.workers}. Of a step the exchange takes {exchange:.0%}, what does not "
                f"depend on the batch {update:.0%}"
            )
            break
    noise, batch = planner.terms.noise_scale, planner.job.global_batch_size
    larger = "a larger batch: unknown, no --measured run has a noise scale"
    if noise is not None:
        cost = planner.progress(2 * batch) - 1
        larger = f"a doubled batch needs {cost:.0%} more samples (noise scale {noise:.3g})"
    return [*lines, advice, larger]


def _choose(
    planner: Planner, goal: str, value: Callable[[Prediction], float], limit: float
) -> str:
    """Return the choice with this goal: the cheapest in time, or the fastest for the price."""
    choices = planner.choices()
    possible = [p for p in choices if value(p) <= limit]
    if not choices:
        return f"{goal}: the batch does not fit into the memory of any number of workers"
    if not possible:
        best, verdict = min(choices, key=value), "not possible; the nearest is "
    elif goal.startswith("within"):
        best, verdict = min(possible, key=lambda p: p.cost or p.device_hours), ""
    else:
        best, verdict = min(possible, key=lambda p: p.total_s), ""
    return (
        f"{goal}: {verdict}{best.workers} workers, global batch {best.global_batch_size}: "
        f"{duration(best.total_s)}, {_cost(best)}"
    )


def _seconds(text: str) -> float:
    seconds = parse_duration(text)
    if not isinstance(seconds, float):
        rule = "must be a time, such as 90m or 1h30min"
        raise JobError([Problem("--within", rule, repr(text))], "plan")
    return seconds


def _ms(value_s: float) -> str:
    return f"{1000 * value_s:.3g} ms"


def _cost(p: Prediction) -> str:
    price = f", price {p.cost:,.2f}" if p.cost else ""
    return f"{p.device_hours:,.3g} device hours{price}"
