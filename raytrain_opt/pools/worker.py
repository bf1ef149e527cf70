"""What a worker does: data-parallel training, sharded evaluation; and a slot. Free of Ray."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from raytrain_opt.clock import Stopwatch
from raytrain_opt.config.learning_rate import CandidateBatch
from raytrain_opt.monitoring import Sampler
from raytrain_opt.optim.schedules import scale_lr
from raytrain_opt.pools.candidates import CandidateTrainer
from raytrain_opt.pools.commands import (
    Command,
    Evaluate,
    MainTrain,
    MainTrainReply,
    OnStep,
    ProbeBatchSize,
)
from raytrain_opt.pools.interface import States
from raytrain_opt.results import EvalTotals, Probe, Steps
from raytrain_opt.search.policy import Candidate, TryCandidates
from raytrain_opt.train.batch_size_probe import measure, open_probe_sampler, probed_training
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.micro_batches import MicroBatches

# The check of the chosen size takes three times the steps of a probe: it runs once, and a leak or
# a fragmented allocator shows only after some time.
_CHECK_FACTOR = 3


class Worker(CandidateTrainer):
    """One rank of a process group, or a worker that is alone."""

    def __init__(self, learner: Learner, rank: int, world_size: int, states: States) -> None:
        micro_batches = MicroBatches.all(learner.config.micro_batches)
        super().__init__(learner, rank, states, micro_batches, world_size)
        self._stopwatch = Stopwatch()  # since the state from which the phase goes on

    def _execute(self, command: Command, on_step: OnStep) -> Any:
        match command:
            case MainTrain():
                if self._phase != command.state.id:
                    self._begin(command)
                return self._train_segment(command, on_step)
            case Evaluate():
                return self._evaluate(command, on_step)
        return super()._execute(command, on_step)

    def _begin(self, command: MainTrain) -> None:
        self._stopwatch = Stopwatch()
        with self._stopwatch.measure("load_s"):
            self._load(command.state)
        self._forget_candidates()
        self.learner.begin(command.epoch, command.steps, self._micro_batches)

    def _train_segment(self, command: MainTrain, on_step: OnStep) -> MainTrainReply | None:
        self._live_id = ""
        self.learner.advance(command.end, lambda done: on_step(done, command.total))
        if command.sends:
            return self._end_segments(command)
        self._leaves = command.state.id
        return None

    def _end_segments(self, command: MainTrain) -> MainTrainReply:
        """Send what was trained since the last state, and the new one."""
        learner, is_end = self.learner, command.end == command.total
        totals = learner.end() if is_end else learner.take_totals()
        with self._stopwatch.measure("average_s"):
            if is_end:
                learner.finish_phase()
        self._live_id = f"{command.epoch}.{command.steps.first + totals.steps}"
        with self._stopwatch.measure("hand_over_s"):
            ref = self._send_state(self._live_id) if self.index == 0 else None
        timings_s = {
            **self._stopwatch.timings_s,
            "data_wait_s": totals.data_wait_s,
            "compute_s": totals.duration_s - totals.data_wait_s,
        }
        if not is_end:
            self._leaves = self._live_id
        self._stopwatch = Stopwatch()
        return MainTrainReply(totals, timings_s, ref)

    def _evaluate(self, command: Evaluate, on_step: OnStep) -> EvalTotals:
        totals = self._evaluate_part(command, self.index, self.world_size, on_step)
        return self.learner.add_ranks(totals)


class Slot(CandidateTrainer):
    """One slot: it trains candidates alone, and measures batch sizes.

    `candidate_batch`: what a slot computes of each global batch. `local`: as much as one worker,
    at the rate that a batch so much smaller needs (linear scaling); else all micro-batches.
    """

    def __init__(
        self, learner: Learner, index: int, states: States, candidate_batch: CandidateBatch | None
    ) -> None:
        count = learner.config.micro_batches
        local = max(1, count // learner.config.worker_count)
        indices = range(local if candidate_batch == "local" else count)
        super().__init__(learner, index, states, MicroBatches(indices, count))
        self._sampler: Sampler | None = None  # of a slot that probes

    def _execute(self, command: Command, on_step: OnStep) -> Any:
        if isinstance(command, ProbeBatchSize):
            return self._probe(command)
        return super()._execute(command, on_step)

    def _probe(self, command: ProbeBatchSize) -> Probe:
        section, device = command.section, self.learner.device
        if self._sampler is None:
            self._sampler = open_probe_sampler(section, device, torch.get_num_threads())
        return measure(
            probed_training(self.learner),
            command.batch_size,
            section,
            self._sampler,
            steps_factor=_CHECK_FACTOR if command.check else 1,
        )

    def _steps(self, action: TryCandidates, candidate: Candidate) -> Steps:
        computed, count = len(self._micro_batches.indices), self._micro_batches.count
        steps = candidate.steps(action)
        lrs = tuple(scale_lr("linear", lr, count, computed) for lr in steps.lrs)
        return replace(steps, lrs=lrs)
