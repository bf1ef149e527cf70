"""From a job to a session, from that to a run with both pools starting; and back to a clean
machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import ray

from raytrain_opt.check import check_job
from raytrain_opt.config.load import dump_job
from raytrain_opt.config.schema import Job
from raytrain_opt.errors import CheckpointError, CommitError, DataError, JobError, Problem
from raytrain_opt.fit import Data, fitting_data
from raytrain_opt.lock import only_user
from raytrain_opt.main_training import Apart, Together
from raytrain_opt.optim.batch_ramp import epoch_steps
from raytrain_opt.paths import RunPaths, remove_tree, write_text
from raytrain_opt.pools.commands import SLOT_POOL, WORKER_POOL
from raytrain_opt.pools.faults import planned_faults
from raytrain_opt.pools.growth import plan_when_there_is_room
from raytrain_opt.pools.host import Host, environment
from raytrain_opt.pools.mailbox import Mailbox
from raytrain_opt.pools.pool import Pool, Vault, running
from raytrain_opt.pools.resources import PoolPlan
from raytrain_opt.pools.session import check_address, cpu_count, ray_session
from raytrain_opt.pools.setup import Setup
from raytrain_opt.pools.shards import ServerHandles, parameter_server
from raytrain_opt.position import Position
from raytrain_opt.search import build_policy, most_candidates
from raytrain_opt.stopping import Terminated, stops_on_sigterm
from raytrain_opt.telemetry.terminal import Terminal, open_terminal, run_dir_text
from raytrain_opt.train.checkpoint import Checkpoints, read_checkpoint, read_index
from raytrain_opt.training_run import Startup, TrainingRun

# When Ray is ours it is shut down anyway; no need to wait long for the pools to leave.
_OWN_RAY_STOP_S = 1.0


@dataclass(frozen=True)
class Session:
    """A job that was found valid, a run directory for it, and Ray connected."""

    paths: RunPaths
    terminal: Terminal
    startup: Startup
    checkpoints: Checkpoints  # the last of them is whole
    owned: bool  # Ray was started here, and runs on this machine alone
    data: Data


@contextmanager
def open_session(
    job: Job, *, address: str | None, verbose: bool, began_s: float, resume: str | None = None
) -> Iterator[Session]:
    """Find everything wrong that can be found without Ray, the data while Ray starts. A Ray that
    was started here is ended when the block is left.
    """
    check_address(address)
    problems = check_job(job)
    if problems:
        raise JobError(problems)
    startup = Startup(began_s)
    with ExitStack() as stack:
        terminal = stack.enter_context(open_terminal(job.epochs))
        reader = stack.enter_context(ThreadPoolExecutor(1))
        reading = reader.submit(fitting_data, job)  # beside the start of Ray, before any worker's
        paths, checkpoints, notes = stack.enter_context(_run_directory(job, resume))
        terminal.phase("starting", 0, job.epochs)
        try:
            # Ray takes the signal for itself when it is initialised: this comes after it.
            with ray_session(address, verbose=verbose) as owned, stops_on_sigterm():
                startup.mark("ray_connected_s")
                data = reading.result()
                startup.mark("data_read_s")
                for note in notes:
                    terminal.note(note)
                yield Session(paths, terminal, startup, checkpoints, owned, data)
        except KeyboardInterrupt as stop:
            why = "terminated" if isinstance(stop, Terminated) else "interrupted"
            terminal.note(f"{why}; {how_to_resume(paths)}")
            raise


@contextmanager
def _run_directory(
    job: Job, resume: str | None
) -> Iterator[tuple[RunPaths, Checkpoints, list[str]]]:
    """A new one, or that of an earlier run, locked against others; its commits, the last of
    which can be read; and what a user should know of it. The job is written into it, so that
    storage that cannot be written is found here. Raises JobError or CheckpointError.
    """
    text = dump_job(job)
    paths = RunPaths.existing(resume) if resume else RunPaths.create(job.storage_path, job.name)
    notes = [run_dir_text(paths.shown, resumed=resume is not None)]
    with ExitStack() as stack:
        try:
            if not stack.enter_context(only_user(paths.local)):
                notes.append("no locks on this file system: let no other run resume it")
            checkpoints = Checkpoints(paths.checkpoints, job.checkpoint)
            damages = checkpoints.forget_damaged()
            notes += [f"{damage}; the one before is used" for damage in damages]
            _check_position(checkpoints)
            write_text(paths.job, text)
            paths.publish()
        except CheckpointError:
            raise
        except (CommitError, OSError) as error:
            if not resume:
                remove_tree(paths.local)
            place = ("--resume", resume) if resume else ("storage_path", job.storage_path)
            rule = f"cannot be written: {error}"
            raise JobError([Problem(place[0], rule, repr(place[1]))]) from error
        try:
            yield paths, checkpoints, notes
        except (JobError, DataError):
            if not resume and not checkpoints.commits:
                remove_tree(paths.local)  # nothing of a run that could not begin
            raise


def _check_position(checkpoints: Checkpoints) -> None:
    """Read once more when it is used: a file that is whole is soon read."""
    if checkpoints.latest is not None:
        _, position = read_checkpoint(checkpoints.folder / checkpoints.latest.folder)
        Position.from_plain(position)


def start_host(*, local: bool, start_s: float, import_all: bool) -> Any:
    """The actor on this node that keeps the pools, and probes batch sizes; see `pools.host`."""
    return (
        ray.remote(Host)
        .options(
            num_cpus=0,
            max_concurrency=2,
            label_selector=_this_node(),
            runtime_env={"env_vars": environment(local=local, start_s=start_s)},
        )
        .remote(import_all=import_all)
    )


def start_mailbox() -> Any:
    """The actor through which driver and pools talk; see `pools.mailbox`. On the driver's node: no
    other node's death is the end of it.
    """
    return (
        ray.remote(Mailbox)
        .options(num_cpus=0, max_concurrency=10_000, label_selector=_this_node())
        .remote()
    )


@contextmanager
def open_run(job: Job, session: Session) -> Iterator[TrainingRun]:
    """Start both pools, and the parameter server of a job that wants one; leaving the block ends
    them.
    """
    with parameter_server(job, session.data.info) as server, _pools(job, session, server) as this:
        yield this


@contextmanager
def _pools(job: Job, session: Session, server: ServerHandles | None) -> Iterator[TrainingRun]:
    plan = plan_when_there_is_room(job, most_candidates(job), session.terminal.note)
    for note in plan.notes:
        session.terminal.note(note)
    mailbox: Any = start_mailbox()
    crowded = _crowded(plan)
    host = start_host(local=session.owned, start_s=job.limits.start_s, import_all=not crowded)
    setup = Setup(
        job,
        plan,
        session.paths.run_id,
        mailbox,
        session.paths.ray_storage,
        planned_faults(),
        server,
    )
    vault = Vault()
    workers, slots = _workers_and_slots(setup, host, vault)
    pools = (slots, workers) if plan.slots else (workers,)  # slots compute first
    stop_s = _OWN_RAY_STOP_S if session.owned else job.limits.stop_s
    with running(*pools, host=host, stop_s=stop_s):
        pools[0].start()
        if not crowded:
            workers.start()
        ray.get(mailbox.share_data.remote([ray.put(session.data.shared)]))
        write_text(session.paths.job, dump_job(job))  # with the batch size that was found
        steps = epoch_steps(session.data.info.train_size, job.global_batch_size, job.batch_ramp)
        this = TrainingRun(
            job,
            session.paths,
            session.checkpoints,
            build_policy(job, steps),
            steps,
            workers,
            slots if plan.slots else None,
            vault,
            session.terminal,
            session.startup,
            plan.use_gpu,
            Together(workers) if server is None else Apart(job, workers, vault, server),
        )
        try:
            yield this
        except BaseException as error:
            this.close()
            this.diary.end(this.position.next_epoch, error)
            raise
        finally:
            this.close()


def _workers_and_slots(setup: Setup, host: Any, vault: Vault) -> tuple[Pool, Pool]:
    """Not started yet."""
    plan, limit_s = setup.plan, setup.job.limits.stall_s
    workers = Pool(
        WORKER_POOL,
        plan.workers,
        lambda: host.run_workers.remote(setup),
        setup.mailbox,
        vault,
        limit_s,
        can_lose_members=setup.server is not None,
    )
    slots = Pool(
        SLOT_POOL,
        plan.slots,
        lambda: host.run_slots.remote(setup),
        setup.mailbox,
        vault,
        limit_s,
        can_lose_members=True,
    )
    return workers, slots


def how_to_resume(paths: RunPaths) -> str:
    """What is kept of a run that ended early, and the command to go on."""
    commits = read_index(paths.checkpoints)
    if not commits:
        return f"nothing was committed yet to {paths.shown}"
    return f"kept up to {commits[-1].reached}; go on with: raytrain-opt run --resume {paths.shown}"


def _crowded(plan: PoolPlan) -> bool:
    """Starting a process costs ten seconds of CPU, most of it imports. Where there are fewer
    cores than processes, the slots come up first: they take the first steps, and the workers
    start beside the first round.
    """
    return cpu_count() < plan.slots + plan.workers


def _this_node() -> dict[str, str]:
    """Ray's label of the driver's node."""
    return {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
