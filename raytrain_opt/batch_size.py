"""Phase 1 of a run: choose the batch size by probes, and what follows from the choice.

`with_batch_size` is the driver's step, `find_batch_size` the same alone.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, cast

import ray

from raytrain_opt.batch_size_cache import Answer, Cache
from raytrain_opt.clock import monotonic_s
from raytrain_opt.config.batch_size import BatchSizeSection, ThroughputKneeSearch
from raytrain_opt.config.learning_rate import (
    HorizonPolicy,
    ReplayPolicy,
    SchedulePolicy,
    StptPolicy,
)
from raytrain_opt.config.load import dump_job
from raytrain_opt.config.schema import Job
from raytrain_opt.errors import PoolError
from raytrain_opt.optim.scaling import scale_lr
from raytrain_opt.paths import append_json_line, write_json, write_text
from raytrain_opt.pools.probes import Found, ProbeRecord, ProbeSetup
from raytrain_opt.pools.resources import PoolPlan, plan_pools
from raytrain_opt.pools.session import free_resources, placement_groups, remove_placement_groups
from raytrain_opt.pools.setup import threads_for
from raytrain_opt.report import write_report
from raytrain_opt.search.batch_size import Limits
from raytrain_opt.search.batch_size_build import check_sampler
from raytrain_opt.search.noise_scale import NoiseScale
from raytrain_opt.start import Session, open_session, start_host
from raytrain_opt.telemetry.batch_size import probe_text, probes_table
from raytrain_opt.telemetry.records import SCHEMA_VERSION, finite

_POLL_S = 0.5


@dataclass(frozen=True)
class BatchSizeResult:
    """What came of a search. `job` has the chosen size and the rescaled learning rate, and no
    search any more. `cached`: an earlier answer was taken.
    """

    answer: Answer
    cached: bool
    seconds: float
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
    """Search alone, without training. A job that asks for no search gets `throughput_knee`.

    `fresh`: do not take a kept answer. `trace`: write a torch.profiler trace of the chosen
    size into the run directory (it needs a fresh search). Raises RaytrainOptError.
    """
    section = job.batch_size_search or ThroughputKneeSearch(strategy="throughput_knee")
    job = job.model_copy(update={"batch_size_search": section})
    with open_session(job, address=address, verbose=verbose, began_s=monotonic_s()) as session:
        result = _search(job, section, session, fresh=fresh or trace, trace=trace)
        write_text(session.paths.job, dump_job(result.job))
        report = write_report([str(session.paths.local)], session.paths.shown)
        session.terminal.note(f"report  {report}")
        session.paths.publish()
        return result


def with_batch_size(job: Job, session: Session, *, fresh: bool) -> Job:
    """The job with the size it is to train with; the same one when it asks for no search."""
    section = job.batch_size_search
    if section is None:
        return job
    if session.paths.batch_size.is_file():  # resumed: a finished search is not repeated
        found = json.loads(session.paths.batch_size.read_text(encoding="utf-8"))
        return with_choice(job, found["batch_size_per_worker"])
    return _search(job, section, session, fresh=fresh, trace=False).job


def with_choice(job: Job, batch_size: int) -> Job:
    """The job with `batch_size` samples per worker, its learning rate rescaled: by the search's
    rule, or by `learning_rate.scaling` where the job has that.
    """
    section, policy, given = job.batch_size_search, _policy(job), job.global_batch_size
    chosen = batch_size * job.workers.count
    job = job.model_copy(update={"global_batch_size": chosen, "batch_size_search": None})
    if policy.scaling is not None:
        return with_scaled_lr(job)
    rule = "none" if section is None else section.lr_rule
    return _at_rate(job, scale_lr(rule, policy.initial, given, chosen))


def with_scaled_lr(job: Job) -> Job:
    """The job with `learning_rate.scaling` applied to its rate, and then without it."""
    scaling = getattr(job.learning_rate, "scaling", None)
    if scaling is None:
        return job
    lr = _policy(job).initial
    batch, reference = job.global_batch_size, scaling.reference_batch_size
    return _at_rate(job, scale_lr(scaling.rule, lr, reference, batch))


def _at_rate(job: Job, initial: float) -> Job:
    policy = _policy(job).model_copy(update={"initial": initial, "scaling": None})
    return job.model_copy(update={"learning_rate": policy})


def _policy(job: Job) -> StptPolicy | HorizonPolicy | SchedulePolicy:
    """Of a job that has a rate: a replayed schedule has none, and allows no search."""
    assert not isinstance(job.learning_rate, ReplayPolicy)
    return job.learning_rate


def _search(
    job: Job, section: BatchSizeSection, session: Session, *, fresh: bool, trace: bool
) -> BatchSizeResult:
    started_s = monotonic_s()
    limits = _limits(job, section, session)
    plan = plan_pools(job, free_resources(), 0)
    check_sampler(section, use_gpu=plan.use_gpu)
    cache = Cache.of(job, limits, use_gpu=plan.use_gpu)
    answer = None if fresh else cache.read()
    cached = answer is not None
    if answer is None:
        answer = _probe(job, section, limits, plan, session, trace=trace)
        cache.write(answer)
    else:
        session.terminal.note(
            f"batch size taken from an earlier search, {cache.shown}; --fresh searches again"
        )
        for line in answer.probes:
            append_json_line(session.paths.batch_sizes, line)
    result = BatchSizeResult(
        answer,
        cached=cached,
        seconds=monotonic_s() - started_s,
        job=with_choice(job, answer.batch_size),
        run_dir=session.paths.shown,
    )
    _tell(job, result, session)
    return result


def _limits(job: Job, section: BatchSizeSection, session: Session) -> Limits:
    workers = job.workers.count
    share = session.data.info.train_size // workers
    return Limits(min(share, section.max_batch_size or share), share, workers)


def _probe(
    job: Job,
    section: BatchSizeSection,
    limits: Limits,
    plan: PoolPlan,
    session: Session,
    *,
    trace: bool,
) -> Answer:
    """Probe until the strategy has chosen; every probe is written down as it comes."""
    session.terminal.phase("searching the batch size", 0, job.epochs)
    before = placement_groups()
    host = start_host(local=session.owned, start_s=job.limits.start_s, import_all=False)
    try:
        setup = ProbeSetup(
            job,
            section,
            limits,
            use_gpu=plan.use_gpu,
            threads=threads_for(job.workers.threads, job.workers.count),
            resources=_resources(plan),
            shared=[ray.put(session.data.shared)],
            run_id=session.paths.run_id,
            ray_storage_path=session.paths.ray_storage,
            trace=trace,
        )
        lines: list[dict[str, Any]] = []
        found = _follow(host, setup, lines, session)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except ray.exceptions.RayActorError as error:
        raise PoolError(
            f"the process that searched the batch size died: {error}; its probes are in "
            f"{session.paths.shown}/batch_size.jsonl"
        ) from error
    finally:
        ray.kill(host)
        remove_placement_groups(placement_groups() - before)
    if found.trace is not None:
        write_text(session.paths.trace, found.trace)
    checked = found.records[-1].probe
    return Answer(checked.batch_size, checked.samples_per_s, found.choice.reason, lines)


def _resources(plan: PoolPlan) -> dict[str, float]:
    """A worker's; on a GPU the whole device, since two probes on one would disturb each other."""
    if not plan.use_gpu:
        return plan.worker_resources
    return {**plan.worker_resources, "GPU": max(1.0, plan.worker_resources["GPU"])}


def _follow(host: Any, setup: ProbeSetup, lines: list[dict[str, Any]], session: Session) -> Found:
    """Tell and write down each probe while the host searches. Raises what ended the search."""
    searching, heard_s = host.run_probes.remote(setup), monotonic_s()
    limit_s = setup.job.limits.stall_s
    while True:
        done = bool(ray.wait([searching], timeout=_POLL_S)[0])
        for record in ray.get(host.probe_records.remote(len(lines))):
            line = probe_line(len(lines) + 1, record)
            lines.append(line)
            append_json_line(session.paths.batch_sizes, line)
            session.terminal.note(probe_text(line))
            heard_s = monotonic_s()
        if done:
            break
        if monotonic_s() - heard_s > limit_s:
            raise PoolError(
                f"a probe of the batch-size search took longer than {limit_s:g} s "
                f"(limits.stall_s); {len(lines)} probes are in "
                f"{session.paths.shown}/batch_size.jsonl"
            )
    return cast(Found, ray.get(searching))


def probe_line(number: int, record: ProbeRecord) -> dict[str, Any]:
    """A line of batch_size.jsonl."""
    probe = asdict(record.probe)
    norms, _ = record.probe.norms, probe.pop("norms")
    noise = None if norms is None else NoiseScale.of(norms)
    line = {
        "probe": number,
        "check": record.check,
        "reason": record.reason,
        **probe,
        "noise_scale": None if noise is None else noise.to_record(),
        "pid": record.pid,
    }
    return {"schema_version": SCHEMA_VERSION, **cast("dict[str, Any]", finite(line))}


def _tell(job: Job, result: BatchSizeResult, session: Session) -> None:
    """batch_size.json, the table and the verdict."""
    chosen, answer, scaling = result.job, result.answer, _policy(job).scaling
    searched = job.batch_size_search
    rule = scaling.rule if scaling else searched.lr_rule if searched else "none"
    before, after = _policy(with_scaled_lr(job)).initial, _policy(chosen).initial
    lr = {"rule": rule, "from": before, "to": after}
    summary = {
        "batch_size_per_worker": answer.batch_size,
        "global_batch_size": {"from": job.global_batch_size, "to": chosen.global_batch_size},
        "samples_per_s": answer.samples_per_s,
        "reason": answer.reason,
        "learning_rate": lr,
        "seconds": result.seconds,
        "cached": result.cached,
        "probes": len(answer.probes),
    }
    write_json(session.paths.batch_size, {"schema_version": SCHEMA_VERSION, **summary})
    session.terminal.note(probes_table(answer.probes))
    session.terminal.note(
        f"batch size {answer.batch_size} per worker ({answer.samples_per_s:,.0f} samples/s): "
        f"{answer.reason}; global_batch_size {job.global_batch_size} -> "
        f"{chosen.global_batch_size}, learning_rate.initial {before:.4g} -> {after:.4g} "
        f"({rule}); {len(answer.probes)} probes, {result.seconds:.1f} s"
    )
