"""Start and end the pools of a run on Ray. Imported while Ray starts: it loads torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import ray

from raytrain_opt.async_training.actors import AsynchronousProgram, parameter_server
from raytrain_opt.async_training.main_training import AsynchronousTraining
from raytrain_opt.cluster.connection import count_placeable, on_driver_node, total_resources
from raytrain_opt.cluster.resources import PoolPlan
from raytrain_opt.config.schema import Job
from raytrain_opt.execution.resolve import Placement, Resolved
from raytrain_opt.execution.workspace import Workspace
from raytrain_opt.paths import RunPaths
from raytrain_opt.pools.commands import SLOT_POOL, WORKER_POOL
from raytrain_opt.pools.launcher import PoolLauncher, environment
from raytrain_opt.pools.mailbox import Mailbox
from raytrain_opt.pools.programs import ResidentConfig, SynchronousProgram
from raytrain_opt.pools.protocol import Pools, SynchronousTraining
from raytrain_opt.pools.ray_pool import ProbingSlot, RayPool, running
from raytrain_opt.pools.state_store import RayStateStore
from raytrain_opt.remote import RAY_FOLDER
from raytrain_opt.train.learner_config import OBJECT_SECTIONS, LearnerConfig

# Seconds for the pools to leave a Ray that we started: it is shut down anyway.
_OWN_RAY_STOP_S = 1.0
# A look for room between two epochs: Ray places a group within milliseconds, if at all.
_LOOK_S = 2.0


def start_launcher(*, local: bool, start_s: float) -> Any:
    """Start the actor on this node that keeps the pools.

    `local`: all processes of this Ray have the variables of its environment.
    """
    env = {} if local else {"env_vars": environment(local=False, start_s=start_s)}
    options = {"label_selector": on_driver_node(), "runtime_env": env}
    return ray.remote(PoolLauncher).options(num_cpus=0, max_concurrency=2, **options).remote()


def start_mailbox(shared: list[Any]) -> Any:
    """Start the mailbox on the driver's node, with repeated calls.

    `shared`: the reference to what all residents share.
    """
    return (
        ray.remote(Mailbox)
        .options(
            num_cpus=0,
            max_concurrency=10_000,
            max_task_retries=-1,
            enable_task_events=False,  # for Ray's dashboard: a sixth of the CPU of every call
            label_selector=on_driver_node(),
        )
        .remote(shared)
    )


@contextmanager
def start_prober(
    job: Job,
    plan: PoolPlan,
    placement: Placement,
    paths: RunPaths,
    shared: list[Any],
    owns_ray: bool,
) -> Iterator[ProbingSlot]:
    """Start what runs a slot that probes batch sizes; end it, and free its memory, afterwards."""
    assert job.batch_size_search is not None
    launcher = start_launcher(local=owns_ray, start_s=job.timeouts.start_s)
    config = prober_config(job, plan, placement, paths, start_mailbox(shared))
    pool = make_slots(config, launcher, RayStateStore())
    stop_s = _OWN_RAY_STOP_S if owns_ray else job.timeouts.stop_s
    with running(pool, launcher=launcher, stop_s=stop_s):
        yield ProbingSlot(pool, job.batch_size_search, job.timeouts)


def prober_config(
    job: Job, plan: PoolPlan, placement: Placement, paths: RunPaths, mailbox: Any
) -> ResidentConfig:
    """Return the settings of a slot that probes.

    It has a worker's resources and threads, and a full GPU, as two probes on it would interfere.
    The search counts deaths, and takes some for an answer, so Ray Tune restarts none.
    """
    resources = dict(plan.worker_resources)
    if plan.use_gpu:
        resources["GPU"] = max(1.0, resources["GPU"])
    learner = replace(LearnerConfig.from_job(job), worker_count=placement.workers)
    plan = replace(plan, slots=1, slot_resources=resources, slots_per_node=plan.workers_per_node)
    config = _resident_config(job, learner, plan, paths, mailbox)
    return replace(config, candidate_batch=None, threads=placement.threads, max_restarts=0)


@contextmanager
def start_pools(
    resolved: Resolved, plan: PoolPlan, workspace: Workspace, shared: list[Any], owns_ray: bool
) -> Iterator[Pools]:
    """Start both pools, and the parameter server of an asynchronous job; end them afterwards.

    `shared`: the reference to the data and objects that all processes share.
    """
    job = resolved.job
    stop_s = _OWN_RAY_STOP_S if owns_ray else job.timeouts.stop_s
    network = resolved.learner.named("data", "task", "loss")
    with parameter_server(network, resolved.info, job.max_restarts) as server:
        launcher = start_launcher(local=owns_ray, start_s=job.timeouts.start_s)
        mailbox = start_mailbox(shared)
        program = None if server is None else AsynchronousProgram(server)
        config = _resident_config(job, resolved.learner, plan, workspace.paths, mailbox, program)
        store = RayStateStore()
        workers = make_workers(config, launcher, store)
        slots = make_slots(config, launcher, store) if plan.slots else None
        # Starting a process costs ten seconds of CPU, most of it imports. Slots take the first
        # steps, so they start first; `TrainingRun` starts the workers beside the first round.
        pools = (workers,) if slots is None else (slots, workers)
        with running(*pools, launcher=launcher, stop_s=stop_s):
            pools[0].start()
            yield Pools(
                workers,
                slots,
                store,
                SynchronousTraining(workers)
                if server is None
                else AsynchronousTraining(resolved.learner, job.timeouts, workers, store, server),
                plan.use_gpu,
                total_resources,
            )


def make_workers(config: ResidentConfig, launcher: Any, store: RayStateStore) -> RayPool:
    plan = config.plan
    return RayPool(
        WORKER_POOL,
        plan.workers,
        lambda: launcher.run_workers.remote(config),
        config.mailbox,
        store,
        config.timeouts.no_progress_s,
        can_lose_residents=not config.program.forms_group,
        has_room=None
        if config.min_workers == plan.workers
        else lambda: count_placeable(plan.worker_resources, 1, _LOOK_S) == 1,
    )


def make_slots(config: ResidentConfig, launcher: Any, store: RayStateStore) -> RayPool:
    return RayPool(
        SLOT_POOL,
        config.plan.slots,
        lambda: launcher.run_slots.remote(config),
        config.mailbox,
        store,
        config.timeouts.no_progress_s,
        can_lose_residents=True,
    )


def _resident_config(
    job: Job,
    learner: LearnerConfig,
    plan: PoolPlan,
    paths: RunPaths,
    mailbox: Any,
    program: SynchronousProgram | None = None,
) -> ResidentConfig:
    return ResidentConfig(
        learner=learner.named(*OBJECT_SECTIONS),
        candidate_batch=job.learning_rate.candidate_batch,
        plan=plan,
        min_workers=job.workers.min_workers,
        threads=job.workers.threads,
        max_restarts=job.max_restarts,
        timeouts=job.timeouts,
        run_id=paths.run_id,
        mailbox=mailbox,
        ray_storage_path=str(paths.local / RAY_FOLDER),
        program=program or SynchronousProgram(),
    )
