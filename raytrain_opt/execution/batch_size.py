"""Phase 1 of a run: choose the batch size by probes; `find_batch_size` does only that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray

from raytrain_opt.clock import monotonic_s
from raytrain_opt.config.batch_size import BatchSizeSection, ThroughputKneeSearch
from raytrain_opt.config.load import dump_job
from raytrain_opt.config.schema import Job
from raytrain_opt.execution.batch_size_cache import Cache, CachedSearch
from raytrain_opt.execution.preflight import ResolvedJob
from raytrain_opt.execution.rescale import apply_batch_size, resolve_lr_scaling, scalable_policy
from raytrain_opt.execution.session import Session, open_session
from raytrain_opt.pools.launcher import runtime_environment
from raytrain_opt.pools.resident_config import compute_threads
from raytrain_opt.recording.reader import read_record
from raytrain_opt.recording.recorder import append_records, write_record
from raytrain_opt.recording.records import (
    BatchSizeProbeRecord,
    BatchSizeRecord,
    RateChange,
    SizeChange,
)
from raytrain_opt.report import try_write_report
from raytrain_opt.search.batch_size.factory import build_strategy, check_sampler
from raytrain_opt.search.batch_size.strategy import SizeBounds
from raytrain_opt.storage import write_text
from raytrain_opt.terminal.probe_tables import probe_text, probes_table
from raytrain_opt.train.learner_config import LearnerConfig


@dataclass(frozen=True)
class BatchSizeResult:
    """The outcome of a batch-size search."""

    batch_size: int  # samples per worker
    job: Job  # with the chosen size, the rescaled learning rate and no further search
    run_dir: str


def find_batch_size(
    job: Job,
    *,
    address: str | None = None,
    verbose: bool = False,
    fresh: bool = False,
    trace: bool = False,
) -> BatchSizeResult:
    """Search the batch size without training. A job without a search gets `throughput_knee`.

    `fresh`: ignore the result of an earlier search. `trace`: write a torch.profiler trace of the
    chosen size into the run directory (this needs a fresh search). Raises RaytrainOptError.
    """
    section = job.batch_size_search or ThroughputKneeSearch(strategy="throughput_knee")
    job = Job(**{**dict(job), "batch_size_search": section})  # which also checks the rules
    with open_session(
        job, address=address, verbose=verbose, began_s=monotonic_s(), slots=False
    ) as session:
        result = _search(section, session, fresh=fresh or trace, trace=trace)
        report = try_write_report(str(session.paths.local), session.paths.shown)
        session.terminal.note(f"report  {report}")
        session.paths.publish()
        return result


def search_batch_size(session: Session, *, fresh: bool) -> ResolvedJob:
    """Return the job with the batch size it is trained with, searched where the job says so."""
    job, section = session.job, session.job.batch_size_search
    if section is None:
        return session.resolved
    record = read_record(str(session.paths.local), "batch_size.json", BatchSizeRecord)
    if record is not None:  # a resumed run does not repeat a finished search
        sized = apply_batch_size(job, record.batch_size_per_worker)
        write_text(session.paths.job, dump_job(sized))
    else:
        sized = _search(section, session, fresh=fresh, trace=False).job
    return session.preflight.resolve(sized)


def _search(
    section: BatchSizeSection, session: Session, *, fresh: bool, trace: bool
) -> BatchSizeResult:
    """Take the cached result or probe; write the records and the job with the chosen size."""
    started_s, job = monotonic_s(), session.job
    answer, cached = _find(section, session, fresh=fresh, trace=trace)
    chosen = apply_batch_size(job, answer.batch_size)
    write_text(session.paths.job, dump_job(chosen))
    scaling = scalable_policy(job).scaling
    size = SizeChange(before=job.global_batch_size, after=chosen.global_batch_size)
    lr = RateChange(
        rule=scaling.rule if scaling else section.lr_rule,
        before=scalable_policy(resolve_lr_scaling(job)).initial,
        after=scalable_policy(chosen).initial,
    )
    record = BatchSizeRecord(
        batch_size_per_worker=answer.batch_size,
        global_batch_size=size,
        samples_per_s=answer.samples_per_s,
        reason=answer.reason,
        learning_rate=lr,
        duration_s=monotonic_s() - started_s,
        cached=cached,
        probes=len(answer.probes),
    )
    write_record(session.paths.batch_size, record)
    session.terminal.note(probes_table(answer.probes))
    session.terminal.note(
        f"batch size {answer.batch_size} per worker ({answer.samples_per_s:,.0f} samples/s): "
        f"{answer.reason}; global_batch_size {size.before} -> {size.after}, "
        f"learning_rate.initial {lr.before:.4g} -> {lr.after:.4g} ({lr.rule}); "
        f"{record.probes} probes, {record.duration_s:.1f} s"
    )
    return BatchSizeResult(answer.batch_size, chosen, session.paths.shown)


def _find(
    section: BatchSizeSection, session: Session, *, fresh: bool, trace: bool
) -> tuple[CachedSearch, bool]:
    """Return the result of an earlier search or of a new one, and whether it is the former."""
    use_gpu = session.plan.use_gpu
    bounds = _bounds(section, session)
    check_sampler(section, use_gpu=use_gpu)
    cache = Cache.for_job(session.job, bounds, use_gpu=use_gpu)
    answer = None if fresh else cache.read()
    if answer is None:
        answer = _probe(section, bounds, session, trace=trace)
        cache.write(answer)
        return answer, False
    session.terminal.note(
        f"batch size from an earlier search, {cache.shown}; --fresh searches again"
    )
    append_records(session.paths.batch_sizes, answer.probes)
    return answer, True


def _bounds(section: BatchSizeSection, session: Session) -> SizeBounds:
    workers, ramp = session.job.workers.size, session.job.batch_ramp.steps
    epoch_samples = session.preflight.info.train_size // workers
    last_factor = max((step.factor for step in ramp), default=1)
    largest = min(epoch_samples // last_factor, section.max_batch_size or epoch_samples)
    return SizeBounds(largest, epoch_samples, workers)


def _probe(
    section: BatchSizeSection, bounds: SizeBounds, session: Session, *, trace: bool
) -> CachedSearch:
    """Probe until the strategy has chosen; record every probe as soon as it is measured."""
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
        trace=trace,
    )
    process = ProbeProcess(config, _actor_options(session), job.timeouts.no_progress_s)
    records: list[BatchSizeProbeRecord] = []

    def record_probe(record: BatchSizeProbeRecord) -> None:
        records.append(record)
        append_records(session.paths.batch_sizes, [record])
        session.terminal.note(probe_text(record))

    try:
        strategy = build_strategy(section, bounds)
        choice, trace_text = run_probes(strategy, process, job.max_restarts, record_probe)
    finally:
        process.end()
    if trace_text is not None:
        write_text(session.paths.trace, trace_text)
    samples_per_s = records[-1].samples_per_s
    assert samples_per_s is not None  # of the check, which fitted
    return CachedSearch(
        batch_size=choice.batch_size,
        samples_per_s=samples_per_s,
        reason=choice.reason,
        probes=records,
    )


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
