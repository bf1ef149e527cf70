"""What a resident worker does: data-parallel training and sharded evaluation.

Free of Ray: it is given access to states (`protocol.States`).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from raytrain_opt.clock import Stopwatch, monotonic_s
from raytrain_opt.pools.commands import Evaluate, EvaluateReply, MainTrain, MainTrainReply
from raytrain_opt.pools.handler import LearnerHandler, OnStep
from raytrain_opt.pools.protocol import States
from raytrain_opt.results import TrainTotals
from raytrain_opt.train.learner import Learner, reduce_sums
from raytrain_opt.train.micro_batches import MicroBatches


class Worker(LearnerHandler):
    """One rank. `connect_s`: seconds that connecting the process group took beside the start."""

    def __init__(
        self, learner: Learner, rank: int, world_size: int, connect_s: float, states: States
    ) -> None:
        super().__init__(learner, rank, states)
        self.world_size = world_size
        self._connect_s = connect_s
        self._start_s: float | None = None
        self._first_step_s: float | None = None
        self._hasher = ThreadPoolExecutor(1)

    def actions(self) -> dict[type[Any], Callable[[Any, OnStep], Any]]:
        """Return what to do with each kind of command."""
        return super().actions() | {MainTrain: self._main_train, Evaluate: self._evaluate}

    def _main_train(self, command: MainTrain, on_step: OnStep) -> MainTrainReply:
        stopwatch = Stopwatch()
        timings_s, total = stopwatch.timings_s, len(command.lrs)
        digest: Future[str] | None = None
        with stopwatch.measure("load_s"):
            if self._load(command.state):
                # Read back and copied, so that it is hashed while the training continues.
                digest = self._hasher.submit(self.learner.state(copy=True).digest)
        self._live_id = ""
        totals = self.learner.train(
            command.epoch,
            command.first_step,
            command.lrs,
            MicroBatches.for_rank(self.index, self.world_size, self.learner.config.worker_count),
            on_step=lambda done: self._before_step(done, total, on_step),
            weight_decay_factor=command.weight_decay_factor,
            optimizer=command.optimizer,
        )
        timings_s["data_wait_s"] = totals.data_wait_s
        timings_s["compute_s"] = totals.duration_s - totals.data_wait_s
        with stopwatch.measure("average_s"):
            self.learner.sync_batch_norm_stats()
            totals = self._over_all_workers(totals)
        self._live_id = f"{command.epoch}.{command.first_step + total}"
        with stopwatch.measure("hand_over_s"):
            ref = self._send_state(self._live_id) if self.index == 0 else None
        loaded_sha256 = None if digest is None else digest.result()
        return MainTrainReply(totals, loaded_sha256, timings_s, ref, self._describe_parallel())

    def _describe_parallel(self) -> dict[str, object]:
        return {
            **self.learner.parallel.report(),
            "workers": self.world_size,
            "connect_s": self._connect_s,
            "first_step_s": self._first_step_s,
        }

    def _before_step(self, done: int, total: int, on_step: OnStep) -> None:
        """Time the run's first step: connections, kernels and caches are made in it."""
        if self._first_step_s is None:
            if done == 1 and self._start_s is not None:
                self.learner.wait_for_device()
                self._first_step_s = monotonic_s() - self._start_s
            elif done == 0:
                self._start_s = monotonic_s()
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
        totals = self._evaluate_part(command.state, self.index, self.world_size, on_step)
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
