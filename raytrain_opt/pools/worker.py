"""What a resident Ray Train worker does: data-parallel training and sharded evaluation."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import ray.train
import ray.train.torch
from torch import nn

from raytrain_opt.clock import Parts, monotonic_s
from raytrain_opt.config.optimizer import ParallelSection
from raytrain_opt.pools.commands import (
    WORKER_POOL,
    Command,
    Evaluate,
    EvaluateReply,
    MainTrain,
    MainTrainReply,
    ShareState,
    StateRef,
)
from raytrain_opt.pools.member import OnStep, Post, describe_self, fetch, grace_s, hand_over
from raytrain_opt.pools.setup import Setup, threads_for
from raytrain_opt.train.connection import begin_connection
from raytrain_opt.train.group import Parallel, distribute, use_threads
from raytrain_opt.train.learner import Learner, Shares, reduce_sums
from raytrain_opt.train.totals import TrainTotals


def serve(setup: Setup) -> None:
    """The life of a worker, inside the function that Ray Train runs."""
    context = ray.train.get_context()
    parts, device = Parts(), ray.train.torch.get_device()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    local_world_size = context.get_local_world_size()
    connection = begin_connection(setup.job.parallel, device)

    def join(model: nn.Module, section: ParallelSection) -> Parallel:
        connection.wait()
        return distribute(model, section)

    with parts.measure("build_s"):
        use_threads(threads_for(setup.job.workers.threads, local_world_size))
        learner = Learner(setup.job, setup.fetch_shared(), device, join)
    absent = tuple(range(world_size, setup.job.workers.count))
    member = replace(describe_self(WORKER_POOL, rank, parts.seconds), absent=absent)
    try:
        worker = Worker(learner, rank, world_size, connection.wait())
        grace = grace_s(world_size, local_world_size)
        post = Post(setup.mailbox, member, setup.leave_s, setup.faults, grace)
        post.serve(worker)
    finally:
        learner.close()


class Worker:
    """One rank. The state it holds has an identity, so that it is loaded only when another
    is wanted.
    """

    def __init__(self, learner: Learner, rank: int, world_size: int, connect_s: float) -> None:
        self.learner, self.rank, self.world_size = learner, rank, world_size
        self._connect_s = connect_s
        self._began_s: float | None = None
        self._first_step_s: float | None = None
        self._live_id = ""
        self._hasher = ThreadPoolExecutor(1)

    def handle(self, command: Command, on_step: OnStep) -> Any:
        """Do one command; see `pools.commands`."""
        match command:
            case MainTrain():
                return self._main_train(command, on_step)
            case Evaluate():
                return self._evaluate(command, on_step)
            case ShareState():
                return hand_over(self.learner, "initial") if self.rank == 0 else None
        raise TypeError(f"a worker cannot do {type(command).__name__}")

    def _load(self, state: StateRef) -> bool:
        """Whether it had to be loaded; not when it was there already."""
        if state.id == self._live_id:
            return False
        self.learner.load(fetch(state))
        self._live_id = state.id
        return True

    def _main_train(self, command: MainTrain, on_step: OnStep) -> MainTrainReply:
        parts = Parts()
        digest: Future[str] | None = None
        with parts.measure("load_s"):
            if self._load(command.state):
                # Read back and copied, so that it is hashed while the training goes on.
                digest = self._hasher.submit(self.learner.state(copy=True).digest)
        self._live_id = ""
        totals = self.learner.train(
            command.epoch,
            command.first_step,
            command.lrs,
            Shares.of_rank(self.rank, self.world_size, self.learner.job.workers.count),
            on_step=partial(self._before_step, on_step, len(command.lrs)),
            decay=command.decay,
        )
        parts.seconds["data_wait_s"] = totals.data_wait_s
        parts.seconds["compute_s"] = totals.seconds - totals.data_wait_s
        with parts.measure("average_s"):
            self.learner.settle_statistics()
            totals = self._over_all_workers(totals)
        self._live_id = f"{command.epoch}.{command.first_step + len(command.lrs)}"
        with parts.measure("hand_over_s"):
            state = hand_over(self.learner, self._live_id) if self.rank == 0 else None
        loaded_sha256 = None if digest is None else digest.result()
        parallel = {
            **self.learner.parallel.report(),
            "workers": self.world_size,
            "connect_s": self._connect_s,
            "first_step_s": self._first_step_s,
        }
        return MainTrainReply(totals, loaded_sha256, parts.seconds, state, parallel)

    def _before_step(self, on_step: OnStep, total: int, done: int) -> None:
        """The first step of all is timed: connections, kernels and caches are made in it."""
        if self._first_step_s is None:
            if done == 1 and self._began_s is not None:
                self.learner.wait_for_device()
                self._first_step_s = monotonic_s() - self._began_s
            elif done == 0:
                self._began_s = monotonic_s()
        on_step(done, total)

    def _over_all_workers(self, totals: TrainTotals) -> TrainTotals:
        sums = [totals.loss_sum, totals.samples, totals.correct, totals.skipped]
        loss_sum, samples, correct, skipped = reduce_sums(sums, self.learner.device)
        return replace(
            totals,
            loss_sum=loss_sum,
            samples=int(samples),
            correct=int(correct),
            skipped=int(skipped),
        )

    def _evaluate(self, command: Evaluate, on_step: OnStep) -> EvaluateReply:
        self._load(command.state)
        totals = self.learner.evaluate("test", self.rank, self.world_size, on_step)
        self.learner.release_memory()
        sums = [totals.loss_sum, totals.samples, totals.correct, totals.correct_top5]
        loss_sum, samples, correct, top5 = reduce_sums(sums, self.learner.device)
        return EvaluateReply(
            replace(
                totals,
                loss_sum=loss_sum,
                samples=int(samples),
                correct=int(correct),
                correct_top5=int(top5),
            )
        )
