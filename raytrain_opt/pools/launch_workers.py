"""Start the workers: one Ray Train run whose training function is the resident loop."""

from __future__ import annotations

from typing import Any

import ray.train
from ray.train import (
    FailureConfig,
    PreemptionError,
    RunConfig,
    ScalingConfig,
    WorkerGroupError,
)
from ray.util import placement_group, remove_placement_group

from raytrain_opt.clock import monotonic_s
from raytrain_opt.cluster.ray_private import run_without_helpers
from raytrain_opt.pools.commands import WORKER_POOL
from raytrain_opt.pools.resident import peer_failure_grace_s, serve
from raytrain_opt.pools.resident_config import ResidentConfig, WorkerPlace

# Ray learns of resources that became free within seconds; 15 also on a busy machine. The minimum
# lets the check of each further group look at least once.
_PLACEMENT_LIMIT_S, _MIN_WAIT_S = 15.0, 0.1


def run_workers(config: ResidentConfig) -> None:
    """Start the workers and return when they have left; blocks (call it in a thread).

    Raises whatever Ray Train raises when a worker dies more often than the job allows.
    """
    count = config.plan.workers
    if config.min_workers == count:
        _fit(config, "", count, FailureConfig(max_failures=config.max_restarts))
    else:
        _run_with_fewer(config)


def _run_with_fewer(config: ResidentConfig) -> None:
    """Run a group of all workers that fit, and a new group whenever a worker has died.

    This is not an elastic group of Ray Train: the size of one follows from what Ray Train noted of
    the cluster some time ago, without our slots, and includes what an ended run had reserved.
    """
    size, restarts = config.plan.placed_workers, config.max_restarts
    no_retries: dict[str, Any] = {"max_failures": 0, "max_preemption_failures": 0}
    for restart in range(restarts + 1):
        try:
            _fit(config, f"-{restart}", size, FailureConfig(**no_retries))
            return
        except (WorkerGroupError, PreemptionError):
            if restart == restarts:
                raise
        while (size := _count_placeable(config)) < config.min_workers:
            pass  # until a node comes back; the driver's limits end this


def _count_placeable(config: ResidentConfig) -> int:
    """Return how many workers fit now; wait a little for resources of workers that are ending."""
    plan = config.plan
    groups = [placement_group([plan.worker_resources]) for _ in range(plan.workers)]
    deadline_s = monotonic_s() + _PLACEMENT_LIMIT_S
    limits_s = (max(_MIN_WAIT_S, deadline_s - monotonic_s()) for _ in groups)
    count = sum(bool(group.wait(s)) for group, s in zip(groups, limits_s, strict=True))
    for group in groups:
        remove_placement_group(group)
    return count


def _fit(config: ResidentConfig, suffix: str, size: int, failures: FailureConfig) -> None:
    trainer = config.workers.make_trainer(
        config,
        train_loop_per_worker=_worker_main,
        train_loop_config={"config": config},
        scaling_config=ScalingConfig(
            num_workers=size,
            use_gpu=config.plan.use_gpu,
            resources_per_worker=config.plan.worker_resources,
        ),
        run_config=RunConfig(
            name=f"workers-{config.run_id}{suffix}",
            storage_path=config.ray_storage_path,
            failure_config=failures,
            callbacks=config.workers.callbacks(config) or None,
        ),
    )
    run_without_helpers(trainer)
    trainer.fit()


def _worker_main(arguments: dict[str, Any]) -> None:
    config: ResidentConfig = arguments["config"]
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    place = WorkerPlace(rank, world_size, context.get_local_world_size())
    group: dict[str, Any] = {}
    if config.workers.forms_group:
        group = {
            "absent": tuple(range(world_size, config.plan.workers)),
            "peer_failure_grace_s": peer_failure_grace_s(world_size, place.local_world_size),
        }
    serve(config, WORKER_POOL, rank, lambda: config.workers.make_handler(config, place), **group)
