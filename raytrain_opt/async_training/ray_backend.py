"""Ray Train workers without a process group: a worker that dies is restarted alone.

For Ray Train each worker is then a replica group of its own, as with torchft.
"""

from __future__ import annotations

import math
from typing import Any

import ray
import ray.train.torch
from ray.train import UserCallback
from ray.train.backend import Backend
from ray.train.torch import TorchConfig

from raytrain_opt.async_training.actors import ServerHandles
from raytrain_opt.async_training.worker import AsyncWorker
from raytrain_opt.cluster.connection import alive_nodes
from raytrain_opt.pools.commands import WORKER_POOL
from raytrain_opt.pools.mailbox_client import report_lost
from raytrain_opt.pools.resident import Handler
from raytrain_opt.pools.resident_config import ResidentConfig, compute_threads
from raytrain_opt.pools.state_store import ObjectStore
from raytrain_opt.train.data_parallel import use_threads
from raytrain_opt.train.learner import Learner


class UnconnectedBackend(Backend):
    """Connects no workers."""

    has_replica_groups = True


class UnconnectedTorchConfig(TorchConfig):
    """A TorchConfig whose backend connects no workers."""

    @property
    def backend_cls(self) -> type[Backend]:
        """Class of what Ray Train sets up in the workers before they begin."""
        return UnconnectedBackend


class ReportLostWorker(UserCallback):
    """Reports workers that have died, so that nobody waits for them and others do their work.

    They join again when they are back.
    """

    def __init__(self, mailbox: Any, server: ServerHandles) -> None:
        self._mailbox, self._server = mailbox, server

    def after_exception(
        self, run_context: object, worker_exceptions: dict[int, Exception]
    ) -> None:
        """Report these ranks; Ray Train calls this when they failed."""
        for rank in worker_exceptions:
            ray.get(self._server.coordinator.leave.remote(rank))
            report_lost(self._mailbox, WORKER_POOL, rank)


def make_worker(config: ResidentConfig, rank: int, server: ServerHandles) -> Handler:
    """Build a worker inside its process."""
    # Ray Train places each worker separately, so their number on this node is not known.
    workers_on_node = math.ceil(config.plan.workers / len(alive_nodes()))
    use_threads(compute_threads(config.threads, workers_on_node))
    learner = Learner(config.learner, config.fetch_shared_data(), ray.train.torch.get_device())
    return AsyncWorker(learner, rank, server, ObjectStore())
