"""Phase 1 of a run: choose the batch size by probes; `find_batch_size` does only that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import harmonic_mean
from typing import Any

import ray

from raytrain_opt.clock import monotonic_s
from raytrain_opt.config.batch_size import BatchSizeSection, ThroughputKneeSearch
from raytrain_opt.config.load import dump_job, plain_job
from raytrain_opt.config.schema import Job
from raytrain_opt.config.yaml_loader import read_yaml
from raytrain_opt.errors import RaytrainOptError
from raytrain_opt.execution.preflight import ResolvedJob
from raytrain_opt.execution.rescale import apply_batch_size, resolve_lr_scaling, scalable_policy
from raytrain_opt.execution.session import Session, open_session
from raytrain_opt.paths import own_runs
from raytrain_opt.pools.launcher import runtime_environment
from raytrain_opt.recording.reader import read_record, read_text
from raytrain_opt.recording.recorder import append_records, write_record
from raytrain_opt.recording.records import (
    BatchSizeProbeRecord,
    BatchSizeRecord,
    RateChange,
    ResultRecord,
    SizeChange,
)
from raytrain_opt.report import try_write_report
from raytrain_opt.search.batch_size.factory import build_strategy, check_sampler
from raytrain_opt.search.batch_size.strategy import (
    LARGEST_LR_FACTOR,
    SizeBounds,
    Updates,
    largest_size,
)
from raytrain_opt.storage import write_text
from raytrain_opt.terminal.progress import probe_text
from raytrain_opt.threads import compute_threads
from raytrain_opt.train.learner_config import LearnerConfig

# Of train_for, the part in which updates are made; start, search and evaluations take the rest.
_TRAINING_FRACTION = 0.8
# The sections that decide how noisy gradients are.
_NOISE_SECTIONS = ("model", "data", "task", "loss")


@dataclass(frozen=True)
class BatchSizeResult:
    """The outcome of a batch-size search."""

    batch_size: int  # samples per worker
    job: Job  # with the chosen size, the rescaled learning rate and no further search
    run_dir: str


def find_batch_size(
    job: Job, *, address: str | None = None, verbose: bool = False
) -> BatchSizeResult:
    """Search the batch size without training. A job without a search gets `throughput_knee`.

    Raises RaytrainOptError.
    """
    section = job.batch_size_search or ThroughputKneeSearch(strategy="throughput_knee")
    job = Job(**{**dict(job), "batch_size_search": section})  # which also checks the rules
    with open_session(
        job, address=address, verbose=verbose, began_s=monotonic_s(), slots=False
    ) as session:
        result = _search(section, session)
        report = try_write_report(str(session.paths.local), session.paths.shown)
        session.terminal.note(f"report  {report}")
        session.paths.publish()
        return result


def search_batch_size(session: Session) -> ResolvedJob:
    """Return the job with the batch size it is trained with, searched where the job says so."""
    job, section = session.job, session.job.batch_size_search
    if section is None:
        return session.resolved
    record = read_record(str(session.paths.local), "batch_size.json", BatchSizeRecord)
    if record is not None:  # a resumed run does not repeat a finished search
        sized = apply_batch_size(job, record.batch_size_per_worker)
        write_text(session.paths.job, dump_job(sized))
    else:
        sized = _search(section, session).job
    return session.preflight.resolve(sized)


def _search(section: BatchSizeSection, session: Session) -> BatchSizeResult:
    """Probe; write the records and the job with the chosen size, and say what it leads to."""
    started_s, job = monotonic_s(), session.job
    check_sampler(section, use_gpu=session.plan.use_gpu)
    size, reason, probes = _probe(section, _bounds(section, session), session)
    chosen = apply_batch_size(job, size)
    write_text(session.paths.job, dump_job(chosen))
    scaling = scalable_policy(job).scaling
    samples_per_s = next(p.samples_per_s for p in reversed(probes) if p.check)
    assert samples_per_s is not None  # of the last check, which fitted
    record = BatchSizeRecord(
        batch_size_per_worker=size,
        global_batch_size=SizeChange(before=job.global_batch_size, after=chosen.global_batch_size),
        samples_per_s=samples_per_s,
        reason=reason,
        learning_rate=RateChange(
            rule=scaling.rule if scaling else section.lr_rule,
            before=scalable_policy(resolve_lr_scaling(job)).initial,
            after=scalable_policy(chosen).initial,
        ),
        duration_s=monotonic_s() - started_s,
        probes=len(probes),
    )
    write_record(session.paths.batch_size, record)
    for line in _summary(record, job, session.preflight.info.train_size):
        session.terminal.note(line)
    return BatchSizeResult(size, chosen, session.paths.shown)


def _summary(record: BatchSizeRecord, job: Job, train_size: int) -> Iterator[str]:
    """Yield the result of a search in words, and what it may cost the training."""
    size, lr = record.global_batch_size, record.learning_rate
    before, after = (
        Updates.count(train_size, batch, job.epochs, job.batch_ramp.steps)
        for batch in (size.before, size.after)
    )
    yield (
        f"batch size {record.batch_size_per_worker} per worker "
        f"({record.samples_per_s:,.0f} samples/s): {record.reason}; global_batch_size "
        f"{size.before} -> {size.after}, learning_rate.initial {lr.before:.4g} -> "
        f"{lr.after:.4g} ({lr.rule}); updates: {before} -> {after}; {record.probes} probes, "
        f"{record.duration_s:.1f} s"
    )
    factor = lr.after / lr.before
    if factor > LARGEST_LR_FACTOR:
        yield (
            f"warning: learning_rate.initial grows {factor:.3g}-fold, as max_batch_size allows. "
            f"Beyond {LARGEST_LR_FACTOR} the training may end worse or diverge. Use a warm-up "
            "(learning_rate.warmup), batch_size_search.lr_rule: sqrt, or no max_batch_size, and "
            "compare the accuracies."
        )


def _bounds(section: BatchSizeSection, session: Session) -> SizeBounds:
    """Return the sizes that leave enough memory and updates; say where updates bound them."""
    job, info, own = session.job, session.preflight.info, session.job.batch_size_per_worker
    workers, note = job.workers.size, session.terminal.note
    scaling = scalable_policy(job).scaling
    rule = section.lr_rule if scaling is None else scaling.rule
    largest = largest_size(
        section, own, info.train_size, job.epochs, workers, job.batch_ramp.steps, rule
    )
    bounds = SizeBounds(largest, info.train_size // workers, workers, own)
    note(
        f"batch sizes of 1 to {largest} per worker are allowed, by the size of the training set, "
        f"min_updates_per_epoch: {section.min_updates_per_epoch}, min_updates: "
        f"{section.min_updates} and max_batch_size of batch_size_search (without it, the rate "
        f"grows {LARGEST_LR_FACTOR}-fold at most)"
    )
    if job.train_for is not None:
        max_step_s = _TRAINING_FRACTION * job.train_for / section.min_updates
        bounds = replace(bounds, max_step_s=max_step_s)
    if getattr(section, "objective", None) in ("auto", "goodput"):
        bounds = replace(bounds, noise_scale=_measured_noise_scale(job, note))
    return bounds


def _measured_noise_scale(job: Job, note: Callable[[str], None]) -> float | None:
    """Return the noise scale that the newest finished run of the job measured, if one did.

    Runs of other sizes and rates count too: the noise scale depends on them little.
    """
    plain = plain_job(job)
    for run_dir in own_runs(job.storage_path, job.name):
        try:
            result = read_record(run_dir, "result.json", ResultRecord)
            stages = result.noise_scale.stages if result and result.noise_scale else ()
            if not stages:
                continue
            earlier: Any = read_yaml(read_text(run_dir, "job.yaml") or "{}", run_dir)
            if any(earlier.get(name) != plain[name] for name in _NOISE_SECTIONS):
                continue
        except RaytrainOptError as error:
            note(f"the noise scale of {run_dir} is not used: {error}")
            continue
        # For the same progress, samples grow by 1 + B / N: the mean over the training's halves.
        scale = harmonic_mean([max(stage.value, 1e-9) for stage in stages])
        note(f"noise scale {scale:.3g}, as {run_dir} measured it")
        return scale
    return None


def _probe(
    section: BatchSizeSection, bounds: SizeBounds, session: Session
) -> tuple[int, str, list[BatchSizeProbeRecord]]:
    """Probe until the strategy has chosen; record every probe as soon as it is measured.

    Returns the size, the reason and the probes.
    """
    # Not at the top: it loads torch, which a job without a search never needs here.
    from raytrain_opt.pools.probes import ProbeConfig, ProbeProcess, run_probes

    job, plan = session.job, session.plan
    session.terminal.phase("searching the batch size")
    config = ProbeConfig(
        learner=LearnerConfig.from_job(job),
        section=section,
        use_gpu=plan.use_gpu,
        threads=compute_threads(job.workers.threads, plan.workers_per_node),
        shared=[ray.put(session.preflight.shared)],
    )
    process = ProbeProcess(config, _actor_options(session), job.timeouts.no_progress_s)
    records: list[BatchSizeProbeRecord] = []

    def record_probe(record: BatchSizeProbeRecord) -> None:
        records.append(record)
        append_records(session.paths.batch_sizes, [record])
        session.terminal.note(probe_text(record))

    try:
        strategy = build_strategy(section, bounds)
        choice = run_probes(strategy, process, job.max_restarts, record_probe)
    finally:
        process.end()
    return choice.batch_size, choice.reason, records


def _actor_options(session: Session) -> dict[str, Any]:
    """Return a worker's resources and environment; a full GPU, as two probes would interfere."""
    resources = dict(session.plan.worker_resources)
    if session.plan.use_gpu:
        resources["GPU"] = max(1.0, resources["GPU"])
    return {
        "num_cpus": resources.pop("CPU", 0),
        "num_gpus": resources.pop("GPU", 0),
        "memory": resources.pop("memory", None),
        "resources": resources,
        "runtime_env": runtime_environment(
            local=session.owns_ray, start_s=session.job.timeouts.start_s
        ),
    }
