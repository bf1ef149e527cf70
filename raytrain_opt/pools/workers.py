"""The resident Ray Train workers, seen from where they are started."""

from __future__ import annotations

from typing import Any

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from raytrain_opt.config.schema import WorkersSection
from raytrain_opt.pools.apart import TellGone, apart
from raytrain_opt.pools.setup import Setup

_NEVER_S = 1e9
# Seconds that a collective waits for a peer longer than the driver waits for progress.
_MORE_THAN_THE_DRIVER_S = 60


def run_workers(setup: Setup) -> None:
    """Start the workers and return when they have left; blocks (call it in a thread).

    Raises whatever Ray Train raises when a worker dies more often than the job allows.
    """
    job = setup.job
    _Trainer(
        _worker_main,
        train_loop_config={"setup": setup},
        torch_config=(_together if setup.server is None else apart)(setup),
        scaling_config=ScalingConfig(
            use_gpu=setup.plan.use_gpu,
            resources_per_worker=setup.plan.worker_resources,
            **_group_size(job.workers),
        ),
        run_config=RunConfig(
            name=f"workers-{setup.run_id}",
            storage_path=setup.ray_storage_path,
            failure_config=FailureConfig(max_failures=job.limits.max_restarts),
            callbacks=_callbacks(setup),
        ),
    ).fit()


def _callbacks(setup: Setup) -> list[Any] | None:
    return None if setup.server is None else [TellGone(setup.mailbox, setup.server)]


def _together(setup: Setup) -> TorchConfig:
    return TorchConfig(
        backend="nccl" if setup.plan.use_gpu else "gloo",
        # The driver gives up first: it knows who is silent.
        timeout_s=int(setup.job.limits.stall_s) + _MORE_THAN_THE_DRIVER_S,
    )


def _group_size(workers: WorkersSection) -> dict[str, Any]:
    if workers.least == workers.count:
        return {"num_workers": workers.count}
    # A group that is well stays as it is: another size would start it anew.
    return {
        "num_workers": (workers.least, workers.count),
        "elastic_resize_monitor_interval_s": _NEVER_S,
    }


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
    setup: Setup = config["setup"]
    if setup.server is None:
        from raytrain_opt.pools.worker import serve
    else:
        from raytrain_opt.pools.async_worker import serve

    serve(setup)
