"""What a resident Ray Train worker does with `parallel.mode: async`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import ray
import ray.train
import ray.train.torch
from torch import Tensor

from raytrain_opt.clock import Parts
from raytrain_opt.pools.commands import (
    WORKER_POOL,
    Command,
    Evaluate,
    EvaluateReply,
    MainTrain,
    ShareState,
    StateRef,
)
from raytrain_opt.pools.member import OnStep, Post, describe_self, fetch, hand_over
from raytrain_opt.pools.session import alive_nodes
from raytrain_opt.pools.setup import Setup, threads_for
from raytrain_opt.pools.shards import ServerHandles
from raytrain_opt.train.async_trainer import AsyncTrainer
from raytrain_opt.train.group import use_threads
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.parameter_server import Weights, Wire, from_wire
from raytrain_opt.train.share_clock import Done, phase_of
from raytrain_opt.train.totals import Report

# Times that weights are asked for whose shard died with them.
_TRIES = 5


def serve(setup: Setup) -> None:
    """The life of a worker, inside the function that Ray Train runs."""
    assert setup.server is not None
    parts, job = Parts(), setup.job
    with parts.measure("build_s"):
        on_a_node = math.ceil(job.workers.count / len(alive_nodes()))
        use_threads(threads_for(job.workers.threads, on_a_node))
        learner = Learner(job, setup.fetch_shared(), ray.train.torch.get_device())
    member = describe_self(WORKER_POOL, ray.train.get_context().get_world_rank(), parts.seconds)
    try:
        worker = AsyncWorker(learner, member.index, setup.server)
        Post(setup.mailbox, member, setup.leave_s, setup.faults).serve(worker)
    finally:
        learner.close()


class AsyncWorker:
    """One worker. The state it holds has an identity, as in `pools.worker`."""

    def __init__(self, learner: Learner, index: int, server: ServerHandles) -> None:
        self.learner, self.index, self._server = learner, index, server
        self._trainer = AsyncTrainer(learner, len(server.shards))
        self._live_id = ""

    def handle(self, command: Command, on_step: OnStep) -> Any:
        """Do one command; see `pools.commands`."""
        match command:
            case MainTrain():
                return self._main_train(command, on_step)
            case Evaluate():
                return self._evaluate(command, on_step)
            case ShareState():
                return hand_over(self.learner, "initial") if self.index == 0 else None
        raise TypeError(f"a worker cannot do {type(command).__name__}")

    def _load(self, state: StateRef) -> None:
        if state.id != self._live_id:
            self._trainer.load(fetch(state))
            self._live_id = state.id

    def _main_train(self, command: MainTrain, on_step: OnStep) -> Report:
        phase = phase_of(
            self.learner.job, command.epoch, command.first_step, command.lrs, command.decay
        )
        ray.get(self._server.clock.leave.remote(self.index))  # what it had before it died
        self._load(command.state)
        self._live_id = ""
        server = Remote(self._server, phase.id, self.index, self._trainer.dtype)
        return self._trainer.train(phase, server, lambda done: on_step(done, phase.updates))

    def _evaluate(self, command: Evaluate, on_step: OnStep) -> EvaluateReply | None:
        if self.index not in command.members:  # it came back when the others had begun
            return None
        self._load(command.state)
        place, count = command.members.index(self.index), len(command.members)
        totals = self.learner.evaluate("test", place, count, on_step)
        self.learner.release_memory()
        return EvaluateReply(totals)


class Remote:
    """The `Server` of `train.async_trainer` through Ray."""

    def __init__(self, handles: ServerHandles, phase: str, worker: int, dtype: Any) -> None:
        self._clock, self._shards = handles.clock, handles.shards
        self._phase, self._worker, self._dtype = phase, worker, dtype

    def claim(self) -> int | None:
        return cast("int | None", _answer(self._clock.claim.remote(self._phase, self._worker)))

    def begin(self, share: int, version: int) -> int | None:
        answer = self._clock.begin_share.remote(self._phase, self._worker, share, version)
        return cast("int | None", _answer(answer))

    def pull(self, at_least: int) -> Weights:
        for _ in range(_TRIES):
            try:
                return self._pull(at_least)
            except ray.exceptions.ObjectLostError:
                continue  # the shard that put them into the store died
        return self._pull(at_least)

    def _pull(self, at_least: int) -> Weights:
        found = ray.get([shard.pull.remote(at_least) for shard in self._shards])
        boxed = [at for _, at in found if isinstance(at, list)]
        fetched = iter(ray.get([at[0] for at in boxed]))
        wires = [next(fetched) if isinstance(at, list) else at for _, at in found]
        return Weights(min(version for version, _ in found), self._tensors(wires))

    def _tensors(self, wires: Sequence[Wire]) -> tuple[Tensor, ...]:
        return tuple(from_wire(wire, self._dtype) for wire in wires)

    def push(self, share: int, gradients: Sequence[Wire]) -> None:
        pairs = zip(self._shards, gradients, strict=True)
        ray.get([shard.add.remote(self._phase, share, gradient) for shard, gradient in pairs])

    def done(self, share: Done) -> None:
        ray.get(self._clock.done.remote(self._phase, self._worker, share))

    def wait_for_work(self) -> bool:
        answer = self._clock.wait_for_work.remote(self._phase, self._worker)
        return cast(bool, _answer(answer))


def _answer(ref: Any) -> Any:
    """Raises what was raised there, as itself."""
    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
