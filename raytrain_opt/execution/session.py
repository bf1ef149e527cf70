"""Sessions and runs on Ray: open what a job needs, start the pools, end everything afterwards.

`open_session` does what needs no pools: preflight, run directory, Ray, resources. `start_run`
starts the pools and yields the `TrainingRun` that `driver.train` moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import ray

from raytrain_opt.async_training.actors import ServerHandles, parameter_server
from raytrain_opt.async_training.main_training import AsynchronousTraining
from raytrain_opt.async_training.program import AsynchronousWorkers
from raytrain_opt.cluster.autoscaling import plan_when_there_is_room
from raytrain_opt.cluster.connection import (
    alive_nodes,
    check_address,
    cpu_count,
    ray_session,
)
from raytrain_opt.cluster.resources import PoolPlan
from raytrain_opt.config.load import dump_job
from raytrain_opt.config.schema import Job
from raytrain_opt.errors import CheckpointError, DataError, JobError, Problem, StorageError
from raytrain_opt.execution.lock import lock_run_directory
from raytrain_opt.execution.log_markers import announce_run_dir
from raytrain_opt.execution.preflight import (
    Preflight,
    ResolvedJob,
    check_job,
    pool_request,
    run_preflight,
)
from raytrain_opt.execution.progress import RunProgress, Startup
from raytrain_opt.execution.rescale import resolve_lr_scaling
from raytrain_opt.execution.signals import Terminated, stop_on_sigterm
from raytrain_opt.execution.training_run import TrainingRun, open_training_run
from raytrain_opt.paths import RunPaths
from raytrain_opt.pools.commands import SLOT_POOL, WORKER_POOL
from raytrain_opt.pools.faults import planned_faults
from raytrain_opt.pools.launcher import PoolLauncher, environment
from raytrain_opt.pools.mailbox import Mailbox
from raytrain_opt.pools.mailbox_client import share_data
from raytrain_opt.pools.main_training import SynchronousTraining
from raytrain_opt.pools.protocol import Backend
from raytrain_opt.pools.ray_pool import RayPool, running
from raytrain_opt.pools.resident_config import ResidentConfig, SynchronousWorkers
from raytrain_opt.pools.state_store import RayStateStore
from raytrain_opt.search.factory import max_candidates
from raytrain_opt.storage import remove_tree, write_text
from raytrain_opt.terminal.progress import Terminal, open_terminal
from raytrain_opt.train.checkpoint import Checkpoints, read_checkpoint, read_index

# Seconds for the pools to leave a Ray that we started: it is shut down anyway.
_OWN_RAY_STOP_S = 1.0


@dataclass(frozen=True)
class Session:
    """A valid job, its run directory, and a Ray cluster with room for it."""

    job: Job
    paths: RunPaths
    terminal: Terminal
    startup: Startup
    checkpoints: Checkpoints  # the latest is readable
    owns_ray: bool  # Ray was started here, and runs on this machine alone
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
    """Check the job, make its run directory, connect to Ray and plan the pools.

    The data are read while Ray starts. A Ray that was started here is shut down when the block is
    left. `slots`: whether resources for candidates are needed. Raises RaytrainOptError.
    """
    check_address(address)
    problems = check_job(job)
    if problems:
        raise JobError(problems)
    if job.batch_size_search is None:
        job = resolve_lr_scaling(job)
    startup = Startup(began_s)
    with ExitStack() as stack:
        terminal = stack.enter_context(open_terminal(job.epochs))
        thread = stack.enter_context(ThreadPoolExecutor(1))
        pending_preflight = thread.submit(run_preflight, job)
        paths, checkpoints, notes = stack.enter_context(open_run_directory(job, resume))
        terminal.phase("starting", 0, job.epochs)
        # In this order: `ray.init` installs a SIGTERM handler of its own, which ours replaces.
        with (
            explain_interruption(terminal, paths),
            ray_session(address, verbose=verbose) as owns_ray,
            stop_on_sigterm(),
        ):
            startup.mark("ray_connected_s")
            preflight = pending_preflight.result()
            startup.mark("data_read_s")
            announce_run_dir(paths.shown)
            for note in notes:
                terminal.note(note)
            candidates = max_candidates(job) if slots else 0
            plan = plan_when_there_is_room(
                pool_request(job, candidates=candidates), job.timeouts.start_s, terminal.note
            )
            for note in plan.notes:
                terminal.note(note)
            yield Session(job, paths, terminal, startup, checkpoints, owns_ray, preflight, plan)


@contextmanager
def explain_interruption(terminal: Terminal, paths: RunPaths) -> Iterator[None]:
    """Say how to resume a run that Ctrl-C or SIGTERM ends within the block."""
    try:
        yield
    except KeyboardInterrupt as stop:
        cause = "terminated" if isinstance(stop, Terminated) else "interrupted"
        terminal.note(f"{cause}; {how_to_resume(paths)}")
        raise


@contextmanager
def open_run_directory(
    job: Job, resume: str | None
) -> Iterator[tuple[RunPaths, Checkpoints, list[str]]]:
    """Make a run directory, or open that of an earlier run; lock it against other processes.

    Yields its paths, its checkpoints (the latest is readable) and notes for the user. Writes the
    job into it, so that storage that cannot be written is reported here. Raises JobError or
    CheckpointError.
    """
    text = dump_job(job)
    paths = RunPaths.existing(resume) if resume else RunPaths.create(job.storage_path, job.name)
    notes = [f"{'resuming' if resume else 'run directory:'} {paths.shown}"]
    with ExitStack() as stack:
        try:
            if not stack.enter_context(lock_run_directory(paths.local)):
                notes.append(
                    "this file system has no locks: do not resume this run twice at the same time"
                )
            checkpoints = Checkpoints(paths.checkpoints, job.checkpoint)
            damages = checkpoints.drop_damaged()
            notes += [f"{damage}; the one before is used" for damage in damages]
            _check_latest(checkpoints)
            write_text(paths.job, text)
            paths.publish()
        except CheckpointError:
            raise
        except (StorageError, OSError) as error:
            if not resume:
                remove_tree(paths.local)
            field, path = ("--resume", resume) if resume else ("storage_path", job.storage_path)
            rule = f"cannot be written: {error}"
            raise JobError([Problem(field, rule, repr(path))]) from error
        try:
            yield paths, checkpoints, notes
        except (JobError, DataError):
            if not resume and not checkpoints.saved:
                remove_tree(paths.local)  # leave no directory of a run that could not start
            raise


def _check_latest(checkpoints: Checkpoints) -> None:
    """Read the latest checkpoint, so that a run that cannot resume stops before Ray starts.

    It is read again when it is used, which takes little of the time that Ray needs to start.
    """
    if checkpoints.latest is not None:
        _, progress = read_checkpoint(checkpoints.folder / checkpoints.latest.folder)
        RunProgress.from_json(progress)


def start_launcher(*, local: bool, start_s: float, import_all: bool) -> Any:
    """Start the actor on this node that keeps the pools and probes batch sizes."""
    return (
        ray.remote(PoolLauncher)
        .options(
            num_cpus=0,
            max_concurrency=2,
            label_selector=_driver_node(),
            runtime_env={"env_vars": environment(local=local, start_s=start_s)},
        )
        .remote(import_all=import_all)
    )


def start_mailbox() -> Any:
    """Start the actor through which driver and pools communicate, on the driver's node.

    The death of another node then never ends it.
    """
    return (
        ray.remote(Mailbox)
        .options(num_cpus=0, max_concurrency=10_000, label_selector=_driver_node())
        .remote()
    )


@contextmanager
def start_run(resolved: ResolvedJob, session: Session) -> Iterator[TrainingRun]:
    """Start both pools, and the parameter server of an asynchronous job; end them afterwards."""
    with (
        parameter_server(
            resolved.learner, session.preflight.info, resolved.job.max_restarts
        ) as server,
        _start_pools(resolved, session, server) as run,
    ):
        yield run


@contextmanager
def _start_pools(
    resolved: ResolvedJob, session: Session, server: ServerHandles | None
) -> Iterator[TrainingRun]:
    job, plan = resolved.job, session.plan
    mailbox: Any = start_mailbox()
    oversubscribed = _is_oversubscribed(plan)
    launcher = start_launcher(
        local=session.owns_ray, start_s=job.timeouts.start_s, import_all=not oversubscribed
    )
    config = _resident_config(resolved, session, mailbox, server)
    store = RayStateStore()
    workers, slots = _make_pools(config, launcher, store)
    pools = (slots, workers) if plan.slots else (workers,)  # slots compute first
    stop_s = _OWN_RAY_STOP_S if session.owns_ray else job.timeouts.stop_s
    with running(*pools, launcher=launcher, stop_s=stop_s):
        pools[0].start()
        if not oversubscribed:
            workers.start()
        share_data(mailbox, session.preflight.shared)
        backend = Backend(
            workers,
            slots if plan.slots else None,
            store,
            SynchronousTraining(workers)
            if server is None
            else AsynchronousTraining(config.learner, config.timeouts, workers, store, server),
            plan.use_gpu,
            lambda: [node["Resources"] for node in alive_nodes()],
        )
        with open_training_run(
            resolved,
            backend,
            session.paths,
            session.checkpoints,
            session.terminal,
            session.startup,
        ) as run:
            yield run


def _resident_config(
    resolved: ResolvedJob, session: Session, mailbox: Any, server: ServerHandles | None
) -> ResidentConfig:
    """Return the settings that workers and slots get from the job and the session."""
    job = resolved.job
    return ResidentConfig(
        learner=resolved.learner,
        candidate_batch=job.learning_rate.candidate_batch,
        plan=session.plan,
        min_workers=job.workers.min_workers,
        threads=job.workers.threads,
        max_restarts=job.max_restarts,
        timeouts=job.timeouts,
        run_id=session.paths.run_id,
        mailbox=mailbox,
        ray_storage_path=session.paths.ray_storage,
        faults=planned_faults(),
        workers=SynchronousWorkers() if server is None else AsynchronousWorkers(server),
    )


def _make_pools(
    config: ResidentConfig, launcher: Any, store: RayStateStore
) -> tuple[RayPool, RayPool]:
    """Return the pools of workers and of slots, not started yet."""
    plan, limit_s = config.plan, config.timeouts.no_progress_s
    workers = RayPool(
        WORKER_POOL,
        plan.workers,
        lambda: launcher.run_workers.remote(config),
        config.mailbox,
        store,
        limit_s,
        can_lose_residents=not config.workers.forms_group,
    )
    slots = RayPool(
        SLOT_POOL,
        plan.slots,
        lambda: launcher.run_slots.remote(config),
        config.mailbox,
        store,
        limit_s,
        can_lose_residents=True,
    )
    return workers, slots


def how_to_resume(paths: RunPaths) -> str:
    """Say how much of a run that ended early is saved, and the command that resumes it."""
    checkpoints = read_index(paths.checkpoints)
    if not checkpoints:
        return f"no checkpoint was saved yet in {paths.shown}"
    reached = checkpoints[-1].reached
    return f"saved through {reached}; resume with: raytrain-opt run --resume {paths.shown}"


def _is_oversubscribed(plan: PoolPlan) -> bool:
    """Return whether there are fewer cores than processes.

    Starting a process costs ten seconds of CPU, most of it imports. With too few cores the slots
    start first, since they take the first steps; the workers start beside the first round.
    """
    return cpu_count() < plan.slots + plan.workers


def _driver_node() -> dict[str, str]:
    return {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
