"""Phase 1 of a run: choose the batch size by probes, and what follows from the choice.

`search_batch_size` is the driver's step; `find_batch_size` does the same without a training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import ray

from raytrain_opt.clock import monotonic_s
from raytrain_opt.cluster.actor_tree import end_actor_tree
from raytrain_opt.cluster.resources import PoolPlan
from raytrain_opt.config.batch_size import BatchSizeSection, ThroughputKneeSearch
from raytrain_opt.config.load import dump_job
from raytrain_opt.config.schema import Job
from raytrain_opt.errors import PoolError
from raytrain_opt.execution.batch_size_cache import Cache, CachedSearch
from raytrain_opt.execution.preflight import ResolvedJob, resolve
from raytrain_opt.execution.rescale import apply_batch_size, resolve_lr_scaling, scalable_policy
from raytrain_opt.execution.session import Session, open_session
from raytrain_opt.pools.resident_config import compute_threads
from raytrain_opt.recording.recorder import append_records, write_record
from raytrain_opt.recording.records import (
    BatchSizeProbeRecord,
    BatchSizeRecord,
    RateChange,
    SizeChange,
)
from raytrain_opt.report import try_write_report
from raytrain_opt.search.batch_size.factory import check_sampler
from raytrain_opt.search.batch_size.strategy import SizeBounds
from raytrain_opt.storage import write_text
from raytrain_opt.terminal.probe_tables import probe_text, probes_table
from raytrain_opt.train.learner_config import LearnerConfig

if TYPE_CHECKING:
    from raytrain_opt.pools.probes import ProbeConfig, ProbeSearchResult

# Seconds between polls for new probes: short for a probe, long for a call to the launcher.
_POLL_S = 0.5


@dataclass(frozen=True)
class BatchSizeResult:
    """The outcome of a batch-size search.

    `job` has the chosen size, the rescaled learning rate and no further search. `cached`: the
    result of an earlier search was used. `duration_s`: of the search.
    """

    answer: CachedSearch
    cached: bool
    duration_s: float
    job: Job
    run_dir: str

    @property
    def batch_size(self) -> int:
        """Samples per worker."""
        return self.answer.batch_size


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
    job = job.model_copy(update={"batch_size_search": section})
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
    if session.paths.batch_size.is_file():  # a resumed run does not repeat a finished search
        text = session.paths.batch_size.read_text(encoding="utf-8")
        record = BatchSizeRecord.model_validate_json(text)
        sized = apply_batch_size(job, record.batch_size_per_worker)
        write_text(session.paths.job, dump_job(sized))
    else:
        sized = _search(section, session, fresh=fresh, trace=False).job
    return resolve(sized, session.preflight.info)


def _search(
    section: BatchSizeSection, session: Session, *, fresh: bool, trace: bool
) -> BatchSizeResult:
    """Take the cached result or probe; write the records and the job with the chosen size."""
    started_s = monotonic_s()
    job, use_gpu = session.job, session.plan.use_gpu
    bounds = _bounds(section, session)
    check_sampler(section, use_gpu=use_gpu)
    cache = Cache.for_job(job, bounds, use_gpu=use_gpu)
    answer = None if fresh else cache.read()
    cached = answer is not None
    if answer is None:
        answer = _probe(section, bounds, session, trace=trace)
        cache.write(answer)
    else:
        session.terminal.note(
            f"batch size from an earlier search, {cache.shown}; --fresh searches again"
        )
        append_records(session.paths.batch_sizes, answer.probes)
    result = BatchSizeResult(
        answer,
        cached=cached,
        duration_s=monotonic_s() - started_s,
        job=apply_batch_size(job, answer.batch_size),
        run_dir=session.paths.shown,
    )
    write_text(session.paths.job, dump_job(result.job))
    _report(job, result, session)
    return result


def _bounds(section: BatchSizeSection, session: Session) -> SizeBounds:
    workers = session.job.workers.size
    epoch_samples = session.preflight.info.train_size // workers
    largest = min(epoch_samples, section.max_batch_size or epoch_samples)
    return SizeBounds(largest, epoch_samples, workers)


def _probe(
    section: BatchSizeSection, bounds: SizeBounds, session: Session, *, trace: bool
) -> CachedSearch:
    """Probe until the strategy has chosen; record every probe as soon as it is measured."""
    # Not at the top: they load torch, which a job without a search never needs here.
    from raytrain_opt.execution.start import start_launcher
    from raytrain_opt.pools.probes import ProbeConfig

    job, plan = session.job, session.plan
    session.terminal.phase("searching the batch size")
    launcher = start_launcher(
        local=session.owns_ray, start_s=job.timeouts.start_s, import_all=False
    )
    try:
        config = ProbeConfig(
            learner=LearnerConfig.from_job(job),
            max_restarts=job.max_restarts,
            section=section,
            limits=bounds,
            use_gpu=plan.use_gpu,
            threads=compute_threads(job.workers.threads, job.workers.size),
            resources=_probe_resources(plan),
            shared=[ray.put(session.preflight.shared[0])],
            trace=trace,
        )
        lines: list[BatchSizeProbeRecord] = []
        result = _follow(launcher, config, lines, session)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except ray.exceptions.GetTimeoutError as error:
        limit_s = job.timeouts.no_progress_s
        raise PoolError(
            f"the process that searches the batch size did not answer within {limit_s:g} s "
            "(timeouts.no_progress_s)"
        ) from error
    except ray.exceptions.RayActorError as error:
        raise PoolError(
            f"the process that searched the batch size died: {error}; its probes are in "
            f"{session.paths.shown}/batch_size.jsonl"
        ) from error
    finally:
        end_actor_tree(launcher)
    if result.trace is not None:
        write_text(session.paths.trace, result.trace)
    check = result.records[-1].probe
    return CachedSearch(check.batch_size, check.samples_per_s, result.choice.reason, lines)


def _probe_resources(plan: PoolPlan) -> dict[str, float]:
    """Return a worker's resources; on a GPU the full device, since two probes would interfere."""
    if not plan.use_gpu:
        return plan.worker_resources
    return {**plan.worker_resources, "GPU": max(1.0, plan.worker_resources["GPU"])}


def _follow(
    launcher: Any, config: ProbeConfig, lines: list[BatchSizeProbeRecord], session: Session
) -> ProbeSearchResult:
    """Show and record each probe while the launcher searches. Raises what ended the search."""
    pending, heard_s = launcher.run_probes.remote(config), monotonic_s()
    limit_s = session.job.timeouts.no_progress_s
    while True:
        done = bool(ray.wait([pending], timeout=_POLL_S)[0])
        for record in ray.get(launcher.probe_records.remote(len(lines)), timeout=limit_s):
            line = BatchSizeProbeRecord.from_probe(
                len(lines) + 1, record.probe, record.reason, check=record.check, pid=record.pid
            )
            lines.append(line)
            append_records(session.paths.batch_sizes, [line])
            session.terminal.note(probe_text(line))
            heard_s = monotonic_s()
        if done:
            break
        if monotonic_s() - heard_s > limit_s:
            raise PoolError(
                f"a probe of the batch-size search took longer than {limit_s:g} s "
                f"(timeouts.no_progress_s); {len(lines)} probes are in "
                f"{session.paths.shown}/batch_size.jsonl"
            )
    return cast("ProbeSearchResult", ray.get(pending, timeout=limit_s))


def _report(job: Job, result: BatchSizeResult, session: Session) -> None:
    """Write batch_size.json; print the table of probes and the choice."""
    chosen, answer, scaling = result.job, result.answer, scalable_policy(job).scaling
    section = job.batch_size_search
    rule = scaling.rule if scaling else section.lr_rule if section else "none"
    before = scalable_policy(resolve_lr_scaling(job)).initial
    after = scalable_policy(chosen).initial
    record = BatchSizeRecord(
        batch_size_per_worker=answer.batch_size,
        global_batch_size=SizeChange(before=job.global_batch_size, after=chosen.global_batch_size),
        samples_per_s=answer.samples_per_s,
        reason=answer.reason,
        learning_rate=RateChange(rule=rule, before=before, after=after),
        duration_s=result.duration_s,
        cached=result.cached,
        probes=len(answer.probes),
    )
    write_record(session.paths.batch_size, record)
    session.terminal.note(probes_table(answer.probes))
    session.terminal.note(
        f"batch size {answer.batch_size} per worker ({answer.samples_per_s:,.0f} samples/s): "
        f"{answer.reason}; global_batch_size {job.global_batch_size} -> "
        f"{chosen.global_batch_size}, learning_rate.initial {before:.4g} -> {after:.4g} "
        f"({rule}); {len(answer.probes)} probes, {result.duration_s:.1f} s"
    )
