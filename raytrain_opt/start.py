"""From a job to a session, from that to a run with both pools starting; and back to a clean
machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray

from raytrain_opt.check import check_job
from raytrain_opt.config.load import dump_job
from raytrain_opt.config.schema import Job
from raytrain_opt.data import load_shared, open_data
from raytrain_opt.data.array_sets import Arrays
from raytrain_opt.data.base import DataInfo
from raytrain_opt.errors import JobError
from raytrain_opt.optim.batch_ramp import epoch_steps
from raytrain_opt.paths import RunPaths, write_text
from raytrain_opt.pools.host import Host, environment
from raytrain_opt.pools.mailbox import Mailbox
from raytrain_opt.pools.pool import Pool, Vault, running
from raytrain_opt.pools.resources import PoolPlan, plan_pools
from raytrain_opt.pools.session import cpu_count, free_resources, ray_session
from raytrain_opt.pools.setup import Setup
from raytrain_opt.search import build_policy, most_candidates
from raytrain_opt.telemetry.terminal import Terminal, open_terminal
from raytrain_opt.train.checkpoint import Checkpoints, read_index
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
    data: Callable[[], Data]  # waits until they are read


@contextmanager
def open_session(
    job: Job, *, address: str | None, verbose: bool, began_s: float, resume: str | None = None
) -> Iterator[Session]:
    """Validate, connect, and read the data meanwhile. A Ray that was started here is ended
    when the block is left.
    """
    problems = check_job(job)
    if problems:
        raise JobError(problems)
    startup = Startup(began_s)
    paths = RunPaths.existing(resume) if resume else RunPaths.create(job.storage_path, job.name)
    with open_terminal(job.epochs) as terminal, ThreadPoolExecutor(1) as reader:
        terminal.note(f"{'going on with' if resume else 'run directory:'} {paths.shown}")
        checkpoints = Checkpoints(paths.checkpoints, job.checkpoint)
        for damage in checkpoints.forget_damaged():
            terminal.note(f"{damage}; the one before is used")
        terminal.phase("starting", 0, job.epochs)
        reading = reader.submit(_read_data, job)
        try:
            with ray_session(address, verbose=verbose) as owned:
                startup.mark("ray_connected_s")
                yield Session(paths, terminal, startup, checkpoints, owned, reading.result)
        except KeyboardInterrupt:
            terminal.note(f"interrupted; {how_to_resume(paths)}")
            raise


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


@contextmanager
def open_run(job: Job, session: Session) -> Iterator[TrainingRun]:
    """Start both pools; leaving the block ends them."""
    plan = plan_pools(job, free_resources(), most_candidates(job))
    for note in plan.notes:
        session.terminal.note(note)
    mailbox: Any = ray.remote(Mailbox).options(num_cpus=0, max_concurrency=10_000).remote()
    crowded = _crowded(plan)
    host = start_host(local=session.owned, start_s=job.limits.start_s, import_all=not crowded)
    setup = Setup(job, plan, session.paths.run_id, mailbox, session.paths.ray_storage)
    vault, limit_s = Vault(), job.limits.command_s
    workers = Pool(
        "worker", plan.workers, lambda: host.run_workers.remote(setup), mailbox, vault, limit_s
    )
    slots = Pool("slot", plan.slots, lambda: host.run_slots.remote(setup), mailbox, vault, limit_s)
    pools = (slots, workers) if plan.slots else (workers,)  # slots compute first
    stop_s = _OWN_RAY_STOP_S if session.owned else job.limits.stop_s
    with running(*pools, host=host, stop_s=stop_s):
        pools[0].start()
        if not crowded:
            workers.start()
        read = session.data()
        session.startup.mark("data_read_s")
        ray.get(mailbox.share_data.remote([ray.put(read.shared)]))
        write_text(session.paths.job, dump_job(job))
        steps = epoch_steps(read.info.train_size, job.global_batch_size, job.batch_ramp)
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
        )
        try:
            yield this
        finally:
            this.close()


def how_to_resume(paths: RunPaths) -> str:
    """What is kept of a run that ended early, and the command to go on."""
    commits = read_index(paths.checkpoints)
    if not commits:
        return f"nothing was committed yet to {paths.shown}"
    return f"kept up to {commits[-1].reached}; go on with: raytrain-opt run --resume {paths.shown}"


@dataclass(frozen=True)
class Data:
    """What the driver read: arrays to share (in-memory sets only), and sizes."""

    shared: Arrays | None
    info: DataInfo


def _read_data(job: Job) -> Data:
    """In a thread, while Ray starts."""
    import torch

    shared = load_shared(job.data)
    data = open_data(
        job.data,
        shared,
        seed=job.seed,
        device=torch.device("cpu"),
        channels_last=job.channels_last,
    )
    data.close()
    return Data(shared, data.info)


def _crowded(plan: PoolPlan) -> bool:
    """Starting a process costs ten seconds of CPU, most of it imports. Where there are fewer
    cores than processes, the slots come up first: they take the first steps, and the workers
    start beside the first round.
    """
    return cpu_count() < plan.slots + plan.workers


def _this_node() -> dict[str, str]:
    """Ray's label of the driver's node."""
    return {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
