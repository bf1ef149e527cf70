"""Ray Train workers without a process group: one that dies is started again by itself.

To Ray Train each worker is then a replica group of its own, as with torchft.
"""

from __future__ import annotations

from typing import Any

from ray.train import UserCallback
from ray.train.backend import Backend
from ray.train.torch import TorchConfig

from raytrain_opt.pools.commands import WORKER_POOL
from raytrain_opt.pools.setup import Setup
from raytrain_opt.pools.shards import ServerHandles


class _NoGroup(Backend):
    """Connects nobody."""

    has_replica_groups = True


class _Apart(TorchConfig):
    @property
    def backend_cls(self) -> type[Backend]:
        """What Ray Train sets up in the workers before they begin."""
        return _NoGroup


def apart(setup: Setup) -> TorchConfig:
    """For the trainer."""
    return _Apart()


class TellGone(UserCallback):
    """When workers have died, nobody waits for them, and others do what they had. They join again
    when they are back.
    """

    def __init__(self, mailbox: Any, server: ServerHandles) -> None:
        self._mailbox, self._server = mailbox, server

    def after_exception(
        self, run_context: object, worker_exceptions: dict[int, Exception]
    ) -> None:
        """Ray Train calls this with the ranks that failed."""
        for rank in worker_exceptions:
            self._server.clock.leave.remote(rank)
            self._mailbox.lose.remote(WORKER_POOL, rank)
