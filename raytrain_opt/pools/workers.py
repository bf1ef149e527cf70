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
from ray.util import placement_group, remove_placement_group

from raytrain_opt.clock import monotonic_s
from raytrain_opt.pools.apart import TellGone, apart
from raytrain_opt.pools.setup import Setup

# Seconds in which places that are free become known as such.
_ROOM_S, _LEAST_WAIT_S = 15.0, 0.1
# Seconds that a collective waits for a peer longer than the driver waits for progress.
_MORE_THAN_THE_DRIVER_S = 60


def run_workers(setup: Setup) -> None:
    """Start the workers and return when they have left; blocks (call it in a thread).

    Raises whatever Ray Train raises when a worker dies more often than the job allows.
    """
    workers, restarts = setup.job.workers, setup.job.limits.max_restarts
    if workers.least == workers.count:
        _fit(setup, "", workers.count, FailureConfig(max_failures=restarts))
    else:
        _run_as_many_as_fit(setup)


def _run_as_many_as_fit(setup: Setup) -> None:
    """A group of all that there is room for, and another one whenever one of them has died.

    Not an elastic group of Ray Train: its size follows from what Ray Train has noted of the
    cluster, some time ago and without our slots, and includes what an ended run had reserved.
    """
    size, restarts = setup.plan.placed_workers, setup.job.limits.max_restarts
    never: dict[str, Any] = {"max_failures": 0, "max_preemption_failures": 0}
    for restart in range(restarts + 1):
        try:
            _fit(setup, f"-{restart}", size, FailureConfig(**never))
            return
        except (WorkerGroupError, PreemptionError):
            if restart == restarts:
                raise
        while (size := _room(setup)) < setup.job.workers.least:
            pass  # until a node comes back; it is the driver that waits only so long


def _room(setup: Setup) -> int:
    """How many workers fit now. When not all do, some time is given to those that are ending."""
    places = [
        placement_group([setup.plan.worker_resources]) for _ in range(setup.job.workers.count)
    ]
    deadline_s = monotonic_s() + _ROOM_S
    waits = (max(_LEAST_WAIT_S, deadline_s - monotonic_s()) for _ in places)
    room = sum(bool(place.wait(wait_s)) for place, wait_s in zip(places, waits, strict=True))
    for place in places:
        remove_placement_group(place)
    return room


def _fit(setup: Setup, name: str, size: int, failures: FailureConfig) -> None:
    _Trainer(
        _worker_main,
        train_loop_config={"setup": setup},
        torch_config=(_together if setup.server is None else apart)(setup),
        scaling_config=ScalingConfig(
            num_workers=size,
            use_gpu=setup.plan.use_gpu,
            resources_per_worker=setup.plan.worker_resources,
        ),
        run_config=RunConfig(
            name=f"workers-{setup.run_id}{name}",
            storage_path=setup.ray_storage_path,
            failure_config=failures,
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
