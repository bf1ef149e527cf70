"""The configuration of residents, and the programs that they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

import ray
from ray import cloudpickle

from raytrain_opt.cluster.resources import PoolPlan
from raytrain_opt.config.learning_rate import CandidateBatch
from raytrain_opt.config.schema import TimeoutsSection
from raytrain_opt.threads import compute_threads
from raytrain_opt.train.learner_config import LearnerConfig

if TYPE_CHECKING:
    from ray.train import TrainContext
    from torch import nn

    from raytrain_opt.config.updates import ParallelSection
    from raytrain_opt.data.factory import SharedData
    from raytrain_opt.pools.resident import Group, Handler
    from raytrain_opt.train.data_parallel import Parallel

# Seconds that a collective waits for a peer longer than the driver waits for progress: the driver
# gives up first, because it knows who is silent.
_COLLECTIVE_MARGIN_S = 60


class SynchronousProgram:
    """What runs in workers that compute each step together, and in slots.

    The driver creates it, and imports neither Ray Train nor torch: the methods do.
    """

    forms_group: ClassVar[bool] = True  # of all workers, so that one failure restarts all

    def trainer(self, config: ResidentConfig) -> Callable[..., Any]:
        """Import TorchTrainer, which connects workers; return what takes Ray Train's arguments."""
        from ray.train.torch import TorchTrainer

        from raytrain_opt.pools.process_group import OneAddressTorchConfig, backend_of

        torch_config = OneAddressTorchConfig(
            backend=backend_of(use_gpu=config.plan.use_gpu),
            timeout_s=int(config.timeouts.no_progress_s) + _COLLECTIVE_MARGIN_S,
        )
        return partial(TorchTrainer, torch_config=torch_config)

    def join_group(self, context: TrainContext) -> Group:
        """Return the group of all workers; of a single one, the worker alone."""
        from raytrain_opt.pools.process_group import CommandGroup
        from raytrain_opt.pools.resident import Group

        local_size = context.get_local_world_size()
        return Group() if context.get_world_size() == 1 else CommandGroup(local_size)

    def make_handler(self, config: ResidentConfig, context: TrainContext, group: Group) -> Handler:
        """Build model and data, and distribute the model over the process group."""
        import ray.train.torch
        import torch

        from raytrain_opt.pools.state_store import GroupObjectStore
        from raytrain_opt.pools.worker import Worker
        from raytrain_opt.train.data_parallel import DataParallel, begin_communicator_warmup
        from raytrain_opt.train.learner import Learner

        device = ray.train.torch.get_device()
        connection = begin_communicator_warmup(device)

        def join(model: nn.Module, section: ParallelSection) -> Parallel:
            connection.result()
            return DataParallel(model, section)

        torch.set_num_threads(compute_threads(config.threads, context.get_local_world_size()))
        learner = Learner(*config.fetch_inputs(), device, join)
        rank, world_size = context.get_world_rank(), context.get_world_size()
        return Worker(learner, rank, world_size, GroupObjectStore(group))

    def make_slot(self, config: ResidentConfig, index: int) -> Handler:
        import torch

        from raytrain_opt.pools.state_store import ObjectStore
        from raytrain_opt.pools.worker import Slot
        from raytrain_opt.train.learner import Learner

        plan = config.plan
        # Slots and workers take turns: together, slots have the threads of the workers.
        cores = None if config.threads is None else config.threads * plan.workers_per_node
        torch.set_num_threads(compute_threads(None, plan.slots_per_node, cores))
        device = torch.device("cuda" if config.plan.use_gpu else "cpu")
        learner = Learner(*config.fetch_inputs(), device)
        return Slot(learner, index, ObjectStore(), config.candidate_batch)


@dataclass(frozen=True)
class ResidentConfig:
    """The configuration of a resident; all workers and slots of a run get the same one."""

    learner: LearnerConfig
    candidate_batch: CandidateBatch | None
    plan: PoolPlan
    min_workers: int
    threads: int | None  # on CPU; None for an even part of the node's cores
    max_restarts: int  # of the worker group, and of each slot
    timeouts: TimeoutsSection
    run_id: str
    ray_storage_path: str
    program: SynchronousProgram = field(default_factory=SynchronousProgram)
    mailbox: Any = None  # handle of the Mailbox actor

    def fetch_inputs(self) -> tuple[LearnerConfig, SharedData]:
        """Return the settings with the user's objects, and the data that a node's processes share.

        The configuration itself, which Ray copies and Ray Tune writes to disk, has only names.
        """
        [ref] = ray.get(self.mailbox.shared.remote())
        sections, shared = ray.get(ref)
        return replace(self.learner, **cloudpickle.loads(sections)), cast("SharedData", shared)
