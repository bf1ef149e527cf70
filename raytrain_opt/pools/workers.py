"""The resident Ray Train workers, seen from where they are started."""

from __future__ import annotations

from typing import Any

from ray.train import (
    FailureConfig,
    PreemptionError,
    RunConfig,
    ScalingConfig,
    WorkerGroupError,
)
from ray.train.torch import TorchConfig, TorchTrainer

from raytrain_opt.pools.resources import binary
from raytrain_opt.pools.setup import Setup

_NEVER_S = 1e9
# Seconds that a collective waits for a peer longer than the driver waits for progress.
_MORE_THAN_THE_DRIVER_S = 60


def run_workers(setup: Setup) -> None:
    """Start the workers and return when they have left; blocks (call it in a thread).

    Raises whatever Ray Train raises when a worker dies more often than the job allows.
    """
    workers, limits = setup.job.workers, setup.job.limits
    if workers.least == workers.count:
        group = {"num_workers": workers.count, "resources_per_worker": setup.plan.worker_resources}
        _fit(setup, "", group, {"max_failures": limits.max_restarts})
    else:
        _run_as_many_as_fit(setup)


def _run_as_many_as_fit(setup: Setup) -> None:
    """At first with all that the cluster has room for. An elastic group of Ray Train takes their
    place when one of them died: it begins with what Ray Train knows of the cluster at the moment,
    which may be less than there is, and would stay so small.
    """
    workers, restarts = setup.job.workers, setup.job.limits.max_restarts
    resources = setup.plan.worker_resources
    fixed = {"num_workers": setup.plan.placed_workers, "resources_per_worker": resources}
    try:
        _fit(setup, "", fixed, {"max_failures": 0, "max_preemption_failures": 0})
        return
    except (WorkerGroupError, PreemptionError):
        if not restarts:
            raise
    elastic = {
        "num_workers": (workers.least, workers.count),
        "resources_per_worker": binary(resources),
        # A group that is well stays as it is: another size would start it anew.
        "elastic_resize_monitor_interval_s": _NEVER_S,
    }
    _fit(setup, "-fewer", elastic, {"max_failures": restarts - 1})


def _fit(setup: Setup, name: str, group: dict[str, Any], failures: dict[str, Any]) -> None:
    _Trainer(
        _worker_main,
        train_loop_config={"setup": setup},
        torch_config=TorchConfig(
            backend="nccl" if setup.plan.use_gpu else "gloo",
            # The driver gives up first: it knows who is silent.
            timeout_s=int(setup.job.limits.stall_s) + _MORE_THAN_THE_DRIVER_S,
        ),
        scaling_config=ScalingConfig(use_gpu=setup.plan.use_gpu, **group),
        run_config=RunConfig(
            name=f"workers-{setup.run_id}{name}",
            storage_path=setup.ray_storage_path,
            failure_config=FailureConfig(**failures),
        ),
    ).fit()


# Each keeps an idle process on the head node, which wakes many times a second; where workers
# occupy every core, that costs them. We hand no Ray datasets to the trainer, and remove
# placement groups ourselves (`pool.running`).
_UNUSED_CALLBACKS = {"DatasetsCallback", "PlacementGroupCleanerCallback"}


class _Trainer(TorchTrainer):
    """Without the helpers of Ray Train that a run of ours has no use for."""

    def _create_default_callbacks(self) -> list[Any]:
        # Not public in Ray. Should it go, nothing breaks: the helpers are back.
        callbacks: list[Any] = super()._create_default_callbacks()  # type: ignore[misc]
        return [c for c in callbacks if type(c).__name__ not in _UNUSED_CALLBACKS]


def _worker_main(config: dict[str, Any]) -> None:
    from raytrain_opt.pools.worker import serve

    serve(config["setup"])
