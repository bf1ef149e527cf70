"""A session on Ray: a job, room in a cluster, a run directory. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from shlex import quote
from shutil import copytree

from raytrain_opt.cluster.autoscaling import plan_when_there_is_room
from raytrain_opt.cluster.connection import check_address, ray_session
from raytrain_opt.cluster.preemption import watch_preemption
from raytrain_opt.cluster.ray_private import log_folder
from raytrain_opt.cluster.resources import PoolPlan
from raytrain_opt.config.data import RayData
from raytrain_opt.config.load import dump_job
from raytrain_opt.config.schema import Job
from raytrain_opt.data.base import DataInfo
from raytrain_opt.errors import (
    CheckpointError,
    DataError,
    JobError,
    PoolError,
    Problem,
    ResidentError,
    StorageError,
)
from raytrain_opt.execution.lock import lock_run_directory, remove_if_abandoned
from raytrain_opt.execution.log_markers import announce_run_dir
from raytrain_opt.execution.preflight import (
    Preflight,
    ResolvedJob,
    check_job,
    pool_request,
    run_preflight,
)
from raytrain_opt.execution.progress import RunProgress, Startup
from raytrain_opt.execution.rescale import resolve_lr_scaling, set_workers
from raytrain_opt.execution.resume import keep_workers, resume_command
from raytrain_opt.execution.signals import StopRequest, stop_on_signals
from raytrain_opt.paths import RunPaths, find_runs
from raytrain_opt.pools.launcher import environment
from raytrain_opt.recording.recorder import check_records
from raytrain_opt.search.factory import max_candidates
from raytrain_opt.storage import is_remote, join, remove_tree, write_text
from raytrain_opt.temporary import remove_abandoned
from raytrain_opt.terminal.progress import Terminal, open_terminal
from raytrain_opt.threads import Cores
from raytrain_opt.train.background import start_thread
from raytrain_opt.train.checkpoint import Checkpoints, read_checkpoint, read_index


@dataclass(frozen=True)
class Workspace:
    """What a run has around it, on Ray and in one process. The latest checkpoint is readable."""

    paths: RunPaths
    checkpoints: Checkpoints
    terminal: Terminal
    startup: Startup
    stop: StopRequest


@dataclass(frozen=True)
class Session(Workspace):
    """A workspace, a valid job, and a cluster with room. `owns_ray`: Ray was started here."""

    job: Job
    owns_ray: bool
    preflight: Preflight
    plan: PoolPlan

    @property
    def resolved(self) -> ResolvedJob:
        """The resolved job; only for a job without a batch-size search."""
        resolved = self.preflight.resolved
        assert resolved is not None
        return resolved


@contextmanager
def open_session(
    job: Job,
    *,
    address: str | None,
    verbose: bool,
    began_s: float,
    resume: str | None = None,
    slots: bool = True,
) -> Iterator[Session]:
    """Check the job, connect to Ray, make the run directory and plan the pools.

    The job is checked and its data are read while Ray starts. A Ray that was started here is shut
    down when the block is left. `slots`: whether resources for candidates are needed. Raises
    RaytrainOptError.
    """
    check_address(address)
    startup = Startup(began_s)
    job = keep_workers(job, resume)
    options = f"--address {quote(address)}" if address else ""
    with ExitStack() as stack:
        terminal = stack.enter_context(open_terminal())
        stop = stack.enter_context(stop_on_signals(terminal.note))

        def start_preflight() -> Future[tuple[Job, Preflight]]:
            pending = start_thread(lambda: _prepare(job, resume))
            stack.callback(wait, [pending], job.timeouts.stop_s)
            return pending

        # Ray Datasets can be made only when Ray runs.
        pending_preflight = None if isinstance(job.data, RayData) else start_preflight()
        # Before Ray starts, which uses all cores for seconds.
        cores = Cores.measure() if job.workers.threads is None else None
        terminal.phase("starting Ray")
        variables = environment(local=True, start_s=job.timeouts.start_s)
        with stop.deferred(job.timeouts.start_s):  # half a Ray cannot be shut down
            owns_ray = stack.enter_context(
                ray_session(address, verbose=verbose, environment=variables)
            )
        if not owns_ray:
            stack.enter_context(watch_preemption(terminal.note))
        startup.mark("ray_connected_s")
        terminal.phase("reading data")
        pending_preflight = pending_preflight or start_preflight()
        job, preflight = _result(pending_preflight, job.timeouts.no_progress_s)
        startup.mark("data_read_s")
        paths, checkpoints = stack.enter_context(
            open_run_directory(job, resume, terminal, stop, preflight.info, options)
        )
        if owns_ray:
            stack.push(partial(_keep_ray_logs, paths))
        announce_run_dir(paths.shown)
        for note in preflight.info.notes:
            terminal.note(note)
        plan = _plan(job, terminal, slots=slots)
        workers = {"count": plan.workers} if job.workers.count == "auto" else {}
        if cores is not None and owns_ray and not plan.use_gpu:
            workers["threads"] = cores.threads(plan.workers_per_node)
            cores.tell(workers["threads"], plan.workers_per_node, terminal.note)
        if workers:
            job = set_workers(job, **workers)
            if preflight.resolved is not None:
                preflight.resolved = preflight.resolve(job)
            write_text(paths.job, dump_job(job))
        preflight.check_workers(job)
        yield Session(paths, checkpoints, terminal, startup, stop, job, owns_ray, preflight, plan)


def _keep_ray_logs(paths: RunPaths, _: object, error: BaseException | None, __: object) -> None:
    """Copy Ray's logs, which messages name and which end with Ray, when processes failed."""
    if isinstance(error, PoolError | ResidentError):
        with suppress(OSError, StorageError):
            copytree(log_folder(), paths.local / "ray_logs", dirs_exist_ok=True)
            error.message += f"\nRay's session logs: {join(paths.shown, 'ray_logs')}"
            paths.publish()


def _prepare(job: Job, resume: str | None) -> tuple[Job, Preflight]:
    """Check the job, read its data, and import what the run needs next."""
    problems = check_job(job)
    if problems:
        raise JobError(problems)
    if job.batch_size_search is None:
        job = resolve_lr_scaling(job)
    preflight = run_preflight(job, resumed=resume is not None)
    import_module("raytrain_opt.execution.start")
    return job, preflight


def _result(preflight: Future[tuple[Job, Preflight]], limit_s: float) -> tuple[Job, Preflight]:
    if not wait([preflight], limit_s).done:
        advice = "check that the storage responds"
        rule = f"not read within {limit_s:g} s (timeouts.no_progress_s); {advice}"
        raise DataError("data", rule)
    return preflight.result(timeout=0)


def _plan(job: Job, terminal: Terminal, *, slots: bool) -> PoolPlan:
    """Plan the pools when there is room for them; report where the plan differs from the job."""
    request = pool_request(job, candidates=max_candidates(job) if slots else 0)
    plan = plan_when_there_is_room(request, job.timeouts.start_s, terminal.note)
    for note in plan.notes:
        terminal.note(note)
    if plan.search_reason:
        where = f"{plan.slots} slots" if plan.slots else "all workers"
        terminal.note(f"candidates train on {where}: {plan.search_reason}")
    return plan


@contextmanager
def open_run_directory(
    job: Job,
    resume: str | None,
    terminal: Terminal,
    stop: StopRequest,
    info: DataInfo | None = None,
    options: str = "",
) -> Iterator[tuple[RunPaths, Checkpoints]]:
    """Make a run directory, or open that of an earlier run; lock it against other processes.

    Yields its paths and its checkpoints, of which the latest is readable. Writes the job into it,
    so that storage that cannot be written is reported here. What ends the block early says how
    to resume the run, with these `options` of the command. Raises JobError or CheckpointError, and
    DataError if data that were read (`info`) are not those of the latest checkpoint.
    """
    text = dump_job(job)
    paths = RunPaths.existing(resume) if resume else RunPaths.create(job.storage_path, job.name)
    notes = [f"{'resuming' if resume else 'run directory:'} {paths.shown}"]
    with ExitStack() as stack:
        try:
            stack.callback(paths.release)
            _remove_abandoned(job.storage_path)
            if not resume:
                paths.claim()
            sign_lock = stack.enter_context(lock_run_directory(paths.local))
            checkpoints = Checkpoints(paths.checkpoints, job.checkpoint)
            notes += [f"{damage}; the one before is used" for damage in checkpoints.drop_damaged()]
            _check_latest(checkpoints, paths, job, info)
            if not sign_lock():
                notes.append(
                    "this storage has no locks: do not resume this run twice at the same time"
                )
            for torn in paths.local.glob(".*.tmp"):  # of a process that was killed
                torn.unlink()
            checkpoints.remove_orphans()
            write_text(paths.job, text)
            paths.result.unlink(missing_ok=True)  # a run with a result is not resumed
            paths.publish()
        except CheckpointError:
            raise
        except (StorageError, OSError) as error:
            if not resume:
                remove_tree(paths.local)
            field, path = ("--resume", resume) if resume else ("storage_path", job.storage_path)
            rule = f"cannot be written: {error}"
            raise JobError([Problem(field, rule, repr(path))]) from error
        for note in notes:
            terminal.note(note)
        stop.advice = partial(how_to_resume, paths, job, options)
        try:
            yield paths, checkpoints
        except (JobError, DataError):
            if not resume and not checkpoints.saved:
                stop.advice = None
                remove_tree(paths.local)  # leave no directory of a run that could not start
            raise


def _remove_abandoned(storage_path: str) -> None:
    """Remove what killed runs of this user have left on this machine and nobody needs."""
    remove_abandoned()
    for run in () if is_remote(storage_path) else find_runs(storage_path):
        with suppress(OSError):
            remove_if_abandoned(Path(run.run_dir))


def _check_latest(
    checkpoints: Checkpoints, paths: RunPaths, job: Job, info: DataInfo | None
) -> None:
    """Look at all that a resume reads: one that is refused has changed nothing."""
    if checkpoints.latest is not None:
        _, plain = read_checkpoint(checkpoints.folder / checkpoints.latest.folder)
        progress = RunProgress.from_json(plain)
        if info is not None and progress.data is not None:
            progress.data.require_same(job.data, info)
        check_records(paths, progress.recorded_rounds, progress.next_epoch - 1)


def how_to_resume(paths: RunPaths, job: Job, options: str = "") -> str:
    """Say how much of a run that ended early is saved, and the command that resumes it."""
    if paths.result.exists() and paths.is_published:
        return f"the training is finished: {paths.shown}"
    checkpoints = read_index(paths.checkpoints)
    if not checkpoints:
        return f"no checkpoint was saved yet in {paths.shown}"
    run_dir = paths.shown if paths.is_published else str(paths.local)
    reached = checkpoints[-1].reached
    return f"saved through {reached}; resume with: {resume_command(run_dir, job, options)}"
