"""A resident worker with `parallel.mode: async`: one that dies is restarted alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import ray
from ray.train import UserCallback
from ray.train.backend import Backend
from ray.train.torch import TorchConfig

from raytrain_opt.async_training.actors import ServerHandles
from raytrain_opt.async_training.scheduler import MicroBatchDone, epoch_phase
from raytrain_opt.async_training.weight_shard import Weights, WireArray, from_wire
from raytrain_opt.async_training.worker_loop import AsyncTrainer
from raytrain_opt.errors import PoolError
from raytrain_opt.pools.candidates import LearnerHandler
from raytrain_opt.pools.commands import WORKER_POOL, Command, Evaluate, MainTrain, OnStep, StateRef
from raytrain_opt.pools.interface import States
from raytrain_opt.results import AsyncWorkerMetrics
from raytrain_opt.train.learner import Learner


class AsyncWorker(LearnerHandler):
    """One worker, which trains independently against the parameter server."""

    def __init__(
        self, learner: Learner, index: int, server: ServerHandles, states: States
    ) -> None:
        super().__init__(learner, index, states)
        self._server = server
        self._trainer = AsyncTrainer(learner, len(server.shards))

    def _execute(self, command: Command, on_step: OnStep) -> Any:
        match command:
            case MainTrain():
                return self._main_train(command, on_step)
            case Evaluate():
                if self.index not in command.workers:  # it came back after the others had begun
                    return None
                part = command.workers.index(self.index)
                return self._evaluate_part(command, part, len(command.workers), on_step)
        return super()._execute(command, on_step)

    def _load_into_learner(self, ref: StateRef) -> None:
        self._trainer.load(self.states.get(ref))

    def _main_train(self, command: MainTrain, on_step: OnStep) -> AsyncWorkerMetrics | None:
        """Train; return None if a shard has lost the phase's weights."""
        phase = epoch_phase(self.learner.config, command)
        # Free what this worker had claimed before it died, if it did.
        ray.get(self._server.coordinator.leave.remote(self.index))
        self._load(command.state)
        self._live_id = ""
        server = RemoteServer(self._server, phase.id, self.index, self._trainer.dtype)
        try:
            return self._trainer.train(phase, server, on_step)
        except PhaseLostError:
            return None


class PhaseLostError(Exception):
    """A shard has died, and the one in its place knows nothing of the phase."""


class RemoteServer:
    """The `ParameterServer` through Ray; `pull` and `push` raise PhaseLostError."""

    def __init__(self, handles: ServerHandles, phase: str, worker: int, dtype: Any) -> None:
        self._coordinator, self._shards = handles.coordinator, handles.shards
        self._phase, self._worker, self._dtype = phase, worker, dtype
        self._claims = 0

    def claim(self) -> int | None:
        self._claims += 1
        ref = self._coordinator.claim.remote(self._phase, self._worker, self._claims)
        return cast("int | None", _get(ref))

    def begin(self, number: int, version: int) -> bool:
        ref = self._coordinator.begin_micro_batch.remote(
            self._phase, self._worker, number, version
        )
        return cast(bool, _get(ref))

    def pull(self) -> Weights:
        """Return the weights of all shards."""
        while True:
            answers = self._of_phase([shard.pull.remote(self._phase) for shard in self._shards])
            try:
                wires = ray.get([ref for _, [ref] in answers])
            except ray.exceptions.ObjectLostError:
                continue  # the shard that stored them died; the next one knows no phase
            parts = tuple(from_wire(wire, self._dtype) for wire in wires)
            return Weights(min(version for version, _ in answers), parts)

    def push(self, number: int, version: int, gradients: Sequence[WireArray]) -> int:
        pairs = zip(self._shards, gradients, strict=True)
        refs = [shard.apply.remote(self._phase, number, version, g) for shard, g in pairs]
        staleness: list[int] = self._of_phase(refs)
        return max(staleness)

    def _of_phase(self, refs: list[Any]) -> list[Any]:
        """Return the answers of all shards, or abort the phase."""
        answers: list[Any] = _get(refs)
        if any(answer is None for answer in answers):
            _get(self._coordinator.abort.remote(self._phase))
            raise PhaseLostError
        return answers

    def done(self, result: MicroBatchDone) -> None:
        _get(self._coordinator.done.remote(self._phase, self._worker, result))

    def wait_for_work(self) -> bool:
        return cast(bool, _get(self._coordinator.wait_for_work.remote(self._phase, self._worker)))


def _get(refs: Any) -> Any:
    """Wait for answers. Raises PoolError when the parameter server is lost for good."""
    try:
        return ray.get(refs)
    except ray.exceptions.ActorDiedError as error:
        raise PoolError(
            "the coordinator has died, or a shard of the weights more often than max_restarts "
            f"allows: {error}"
        ) from error


class UnconnectedBackend(Backend):
    """Connects no workers."""

    has_replica_groups = True


class UnconnectedTorchConfig(TorchConfig):
    """A TorchConfig whose backend connects no workers."""

    @property
    def backend_cls(self) -> type[Backend]:
        return UnconnectedBackend


class ReportLostWorker(UserCallback):
    """Reports workers that have died, so that nobody waits for them until they join again."""

    def __init__(self, mailbox: Any, server: ServerHandles) -> None:
        self._mailbox, self._server = mailbox, server

    def after_exception(
        self, run_context: object, worker_exceptions: dict[int, Exception]
    ) -> None:
        for rank in worker_exceptions:
            ray.get(self._server.coordinator.leave.remote(rank))
            # It knows before the restarted process joins.
            ray.get(self._mailbox.lose.remote(WORKER_POOL, rank))
