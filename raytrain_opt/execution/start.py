"""Start and end the pools of a run on Ray. Imported while Ray starts: it loads torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import ray

from raytrain_opt.async_training.actors import AsynchronousProgram, parameter_server
from raytrain_opt.async_training.main_training import AsynchronousTraining
from raytrain_opt.clock import monotonic_s
from raytrain_opt.cluster.actor_tree import end_actor_tree
from raytrain_opt.cluster.connection import count_placeable, on_driver_node, total_resources
from raytrain_opt.cluster.ray_private import ended_processes
from raytrain_opt.cluster.resources import PoolPlan
from raytrain_opt.config.schema import Job
from raytrain_opt.execution.resolve import Placement, Resolved
from raytrain_opt.execution.workspace import Workspace
from raytrain_opt.paths import RunPaths
from raytrain_opt.pools.commands import SLOT_POOL, WORKER_POOL
from raytrain_opt.pools.interface import Pools, SynchronousTraining
from raytrain_opt.pools.launcher import PoolLauncher, environment
from raytrain_opt.pools.mailbox import Mailbox
from raytrain_opt.pools.programs import ResidentConfig, SynchronousProgram
from raytrain_opt.pools.ray_pool import ProbingSlot, RayPool
from raytrain_opt.pools.state_store import RayStateStore
from raytrain_opt.run_copy import RAY_FOLDER
from raytrain_opt.train.learner_config import OBJECT_SECTIONS, LearnerConfig

# Seconds for the pools to leave a Ray that we started: it is shut down anyway.
_OWN_RAY_STOP_S = 1.0
# A look for room between two epochs: Ray places a group within milliseconds, if at all.
_LOOK_S = 2.0


@contextmanager
def resident_pools(
    config: ResidentConfig, shared: list[Any], owns_ray: bool
) -> Iterator[tuple[RayPool, RayPool]]:
    """Keep workers and slots for the time of the block; `RayPool.start` starts their processes.

    Leaving the block asks them to leave and gives them `timeouts.stop_s`, unless they are starting
    or work on a command. Then the launcher is ended with everything it ever started.

    Args:
        config: without the mailbox.
        shared: the reference to what all residents share; Ray would fetch a bare one on the way.
        owns_ray: all processes of this Ray have the launcher's environment.
    """
    plan, timeouts = config.plan, config.timeouts
    env = {} if owns_ray else {"env_vars": environment(local=False, start_s=timeouts.start_s)}
    place: dict[str, Any] = {"num_cpus": 0, "label_selector": on_driver_node()}
    launcher: Any = ray.remote(PoolLauncher)
    launcher = launcher.options(max_concurrency=2, runtime_env=env, **place).remote()
    mailbox: Any = ray.remote(Mailbox).options(
        max_concurrency=10_000,
        max_task_retries=-1,
        enable_task_events=False,  # for Ray's dashboard: a sixth of the CPU of every call
        **place,
    )
    config = replace(config, mailbox=mailbox.remote(shared))
    states, limit_s = RayStateStore(), timeouts.no_progress_s
    pool = partial(RayPool, mailbox=config.mailbox, states=states, limit_s=limit_s)
    workers = pool(
        WORKER_POOL,
        plan.workers,
        lambda: launcher.run_workers.remote(config),
        can_lose_residents=not config.program.forms_group,
        has_room=None
        if config.min_workers == plan.workers
        else lambda: count_placeable(plan.worker_resources, 1, _LOOK_S) == 1,
    )
    slots = pool(
        SLOT_POOL, plan.slots, lambda: launcher.run_slots.remote(config), can_lose_residents=True
    )
    try:
        yield workers, slots
    finally:
        if not ended_processes():
            _end((slots, workers), launcher, _OWN_RAY_STOP_S if owns_ray else timeouts.stop_s)


def _end(pools: Sequence[RayPool], launcher: Any, stop_s: float) -> None:
    for pool in pools:
        pool.request_close()
    deadline_s = monotonic_s() + stop_s
    for pool in pools:
        if not pool.at_work:
            pool.wait_for_end(max(0.0, deadline_s - monotonic_s()))
    end_actor_tree(launcher)
    ray.kill(pools[0].mailbox)


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
    config = prober_config(job, plan, placement, paths)
    with resident_pools(config, shared, owns_ray) as (_, slots):
        yield ProbingSlot(slots, job.batch_size_search, job.timeouts)


def prober_config(
    job: Job, plan: PoolPlan, placement: Placement, paths: RunPaths
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
    config = _resident_config(job, learner, plan, paths, SynchronousProgram())
    return replace(config, candidate_batch=None, threads=placement.threads, max_restarts=0)


@contextmanager
def start_pools(
    resolved: Resolved, plan: PoolPlan, workspace: Workspace, shared: list[Any], owns_ray: bool
) -> Iterator[Pools]:
    """Start both pools, and the parameter server of an asynchronous job; end them afterwards.

    `shared`: the reference to the data and objects that all processes share.
    """
    job, learner = resolved.job, resolved.learner
    network = learner.named("data", "task", "loss")
    open_server = partial(parameter_server, network, resolved.info, job.max_restarts)
    with nullcontext() if learner.parallel.common_steps else open_server() as server:
        program = SynchronousProgram() if server is None else AsynchronousProgram(server)
        config = _resident_config(job, learner, plan, workspace.paths, program)
        with resident_pools(config, shared, owns_ray) as (workers, slots):
            # Starting a process costs ten seconds of CPU, most of it imports. Slots take the first
            # steps, so they start first; `TrainingRun` starts the workers beside the first round.
            (slots if plan.slots else workers).start()
            yield Pools(
                workers,
                slots if plan.slots else None,
                workers.states,
                SynchronousTraining(workers)
                if server is None
                else AsynchronousTraining(learner, job.timeouts, workers, server),
                plan.use_gpu,
                total_resources,
            )


def _resident_config(
    job: Job, learner: LearnerConfig, plan: PoolPlan, paths: RunPaths, program: SynchronousProgram
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
        ray_storage_path=str(paths.local / RAY_FOLDER),
        program=program,
    )
