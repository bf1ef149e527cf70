"""The worker program of `parallel.mode: async`; the driver imports it without torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from raytrain_opt.async_training.actors import ServerHandles
from raytrain_opt.cluster.connection import alive_nodes
from raytrain_opt.pools.resident_config import compute_threads

if TYPE_CHECKING:
    from ray.train import TrainContext

    from raytrain_opt.pools.resident import Group, Handler
    from raytrain_opt.pools.resident_config import ResidentConfig


@dataclass(frozen=True)
class AsynchronousWorkers:
    """Workers that train against a parameter server; implements `WorkerProgram`."""

    server: ServerHandles
    forms_group: ClassVar[bool] = False

    def trainer(self, config: ResidentConfig) -> Callable[..., Any]:
        """Import TorchTrainer, whose workers are not connected; it reports dead ones."""
        from ray.train.torch import TorchTrainer

        from raytrain_opt.async_training.worker import ReportLostWorker, UnconnectedTorchConfig

        def make(**arguments: Any) -> TorchTrainer:
            arguments["run_config"].callbacks = [ReportLostWorker(config.mailbox, self.server)]
            return TorchTrainer(torch_config=UnconnectedTorchConfig(), **arguments)

        return make

    def join_group(self, context: TrainContext) -> Group:
        """Return this worker alone: each one calls the mailbox itself."""
        from raytrain_opt.pools.resident import Alone

        return Alone()

    def make_handler(self, config: ResidentConfig, context: TrainContext, group: Group) -> Handler:
        """Build model and data."""
        import ray.train.torch
        import torch

        from raytrain_opt.async_training.worker import AsyncWorker
        from raytrain_opt.pools.state_store import ObjectStore
        from raytrain_opt.train.learner import Learner

        # Ray Train places each worker separately, so their number on this node is not known.
        workers_on_node = math.ceil(config.plan.workers / len(alive_nodes()))
        torch.set_num_threads(compute_threads(config.threads, workers_on_node))
        learner = Learner(config.learner, config.fetch_shared_data(), ray.train.torch.get_device())
        return AsyncWorker(learner, context.get_world_rank(), self.server, ObjectStore())
