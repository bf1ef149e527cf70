"""Run workers in a Ray Train run, slots in a Ray Tune experiment. Imports no torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import ray
import ray.train
from ray import tune
from ray.train import FailureConfig, PreemptionError, RunConfig, ScalingConfig, WorkerGroupError
from ray.tune.progress_reporter import TrialProgressCallback

from raytrain_opt.cluster.connection import count_placeable
from raytrain_opt.cluster.ray_private import without_idle_actors
from raytrain_opt.pools.commands import SLOT_POOL, WORKER_POOL
from raytrain_opt.pools.programs import ResidentConfig
from raytrain_opt.pools.resident import serve

# Ray learns of resources that became free within seconds; 15 also on a busy machine.
_PLACEMENT_LIMIT_S = 15.0


def run_workers(config: ResidentConfig, trainer: Callable[..., Any]) -> None:
    """Run the workers until they have left (blocks). Raises what Ray Train does in the end."""
    count = config.plan.workers
    if config.min_workers == count:
        _fit(config, trainer, "", count, FailureConfig(max_failures=config.max_restarts))
    else:
        _run_elastic(config, trainer)


def _run_elastic(config: ResidentConfig, trainer: Callable[..., Any]) -> None:
    """Run a group of all workers that fit, and a new one after a death or on `Regroup`.

    This is not an elastic group of Ray Train: the size of one follows from what Ray Train noted of
    the cluster some time ago, without our slots, and includes what an ended run had reserved.
    """
    size, deaths, resources = config.plan.placed_workers, 0, config.plan.worker_resources
    no_retries: dict[str, Any] = {"max_failures": 0, "max_preemption_failures": 0}
    for group in itertools.count():
        try:
            _fit(config, trainer, f"-{group}", size, FailureConfig(**no_retries))
            if ray.get(config.mailbox.is_closed.remote(WORKER_POOL)):
                return
        except PreemptionError:
            pass  # no failure of the job
        except WorkerGroupError:
            deaths += 1
            if deaths > config.max_restarts:
                raise
        while (
            size := count_placeable(resources, config.plan.workers, _PLACEMENT_LIMIT_S)
        ) < config.min_workers:
            pass  # until a node comes back; the driver's limits end this


def _fit(
    config: ResidentConfig,
    trainer: Callable[..., Any],
    suffix: str,
    size: int,
    failures: FailureConfig,
) -> None:
    training = trainer(
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
        ),
    )
    without_idle_actors(training).fit()


def _worker_main(arguments: dict[str, Any]) -> None:
    config: ResidentConfig = arguments["config"]
    context, program = ray.train.get_context(), config.program
    group = program.join_group(context)
    absent = range(context.get_world_size(), config.plan.workers) if program.forms_group else ()
    serve(
        config,
        WORKER_POOL,
        context.get_world_rank(),
        lambda: program.make_handler(config, context, group),
        group,
        absent,
    )


def run_slots(config: ResidentConfig) -> None:
    """Start the slots and return when they have left (blocks). Raises why, if none is left."""
    results = tune.Tuner(
        tune.with_resources(_slot_main, tune.PlacementGroupFactory([config.plan.slot_resources])),
        param_space={"slot": tune.grid_search(list(range(config.plan.slots))), "config": config},
        run_config=tune.RunConfig(
            name=f"slots-{config.run_id}-{uuid4().hex[:8]}",
            storage_path=config.ray_storage_path,
            failure_config=tune.FailureConfig(max_failures=config.max_restarts),
            callbacks=[ReportLostSlot(config.mailbox)],
            verbose=0,
        ),
    ).fit()
    if results.num_errors == config.plan.slots:
        raise results.errors[0]


class ReportLostSlot(TrialProgressCallback):
    """Reports a slot that died more often than the job allows to the mailbox.

    It replaces the callback of Tune that prints a line for every trial that ends.
    """

    def __init__(self, mailbox: Any) -> None:
        super().__init__()
        self._mailbox = mailbox

    def on_trial_result(self, *_: Any, **__: Any) -> None:
        """Print nothing."""

    def on_trial_complete(self, *_: Any, **__: Any) -> None:
        """Print nothing."""

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        ray.get(self._mailbox.lose.remote(SLOT_POOL, trial.config["slot"]))


def _slot_main(trial: dict[str, Any]) -> None:
    config: ResidentConfig = trial["config"]
    index: int = trial["slot"]
    serve(config, SLOT_POOL, index, lambda: config.program.make_slot(config, index))
