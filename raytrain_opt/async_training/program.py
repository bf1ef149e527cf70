"""The worker program of `parallel.mode: async`.

Importing this imports neither torch nor Ray Train, because the driver creates the program.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from raytrain_opt.async_training.actors import ServerHandles

if TYPE_CHECKING:
    from raytrain_opt.pools.resident import Handler
    from raytrain_opt.pools.resident_config import ResidentConfig, WorkerPlace


@dataclass(frozen=True)
class AsynchronousWorkers:
    """Workers that train independently against a parameter server.

    Implements `pools.resident_config.WorkerProgram`.
    """

    server: ServerHandles
    forms_group: ClassVar[bool] = False

    def import_modules(self) -> None:
        """Import Ray Train's part for torch."""
        import raytrain_opt.async_training.ray_backend  # noqa: F401

    def make_trainer(self, config: ResidentConfig, **arguments: Any) -> Any:
        """Return a TorchTrainer whose workers are not connected."""
        from ray.train.torch import TorchTrainer

        from raytrain_opt.async_training.ray_backend import UnconnectedTorchConfig

        return TorchTrainer(torch_config=UnconnectedTorchConfig(), **arguments)

    def callbacks(self, config: ResidentConfig) -> list[Any]:
        """Return the callback that reports dead workers."""
        from raytrain_opt.async_training.ray_backend import ReportLostWorker

        return [ReportLostWorker(config.mailbox, self.server)]

    def make_handler(self, config: ResidentConfig, place: WorkerPlace) -> Handler:
        """Build model and data."""
        from raytrain_opt.async_training.ray_backend import make_worker

        return make_worker(config, place.rank, self.server)
