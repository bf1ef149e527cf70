"""What a resident slot does: pre-train candidates, score them, hand the winner's state over."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
import torch

from raytrain_opt.clock import Parts
from raytrain_opt.pools.commands import (
    Command,
    Pretrain,
    PretrainReply,
    ShareState,
    StateRef,
    TakeState,
)
from raytrain_opt.pools.member import OnStep, Post, describe_self, fetch, hand_over
from raytrain_opt.pools.setup import Setup, threads_for
from raytrain_opt.search.policy import Candidate, CandidateResult
from raytrain_opt.train.group import use_threads
from raytrain_opt.train.learner import Learner, Shares
from raytrain_opt.train.state import HostState
from raytrain_opt.train.totals import TrainTotals

POOL = "slot"


def serve(setup: Setup, index: int) -> None:
    """The life of a slot, inside the function that Ray Tune runs."""
    parts = Parts()
    with parts.measure("build_s"):
        use_threads(threads_for(setup.job.workers.threads, setup.plan.slots_per_node))
        device = torch.device("cuda" if setup.plan.use_gpu else "cpu")
        learner = Learner(setup.job, setup.fetch_shared(), device)
    member = describe_self(POOL, index, parts.seconds)
    try:
        Post(setup.mailbox, member, setup.leave_s).serve(Slot(learner, member.index))
    finally:
        learner.close()


class Slot:
    """One slot. It keeps the states of its candidates until the next round."""

    def __init__(self, learner: Learner, index: int) -> None:
        self.learner, self.index = learner, index
        self._stashed: dict[int, HostState] = {}
        self._live = -1

    def handle(self, command: Command, on_step: OnStep) -> Any:
        """Do one command; see `pools.commands`."""
        match command:
            case Pretrain():
                return self._pretrain(command, on_step)
            case TakeState():
                return self._take_state(command)
            case ShareState():
                return hand_over(self.learner, "initial") if self.index == 0 else None
        raise TypeError(f"a slot cannot do {type(command).__name__}")

    def _pretrain(self, command: Pretrain, on_step: OnStep) -> PretrainReply:
        parts = Parts()
        self._stashed.clear()
        self._live = -1
        with parts.measure("load_s"):
            start = fetch(command.state)
        mine = command.candidates[self.index :: command.slots]
        results = []
        for number, candidate in enumerate(mine):
            with parts.measure("load_s"):
                self.learner.load(start)
            offset = number * command.steps
            total = len(mine) * command.steps
            results.append(self._candidate(command, candidate, on_step, offset, total))
            self._live = candidate.index
            if number + 1 < len(mine):  # the last one's state stays in the live model
                with parts.measure("stash_s"):
                    self._stashed[candidate.index] = self.learner.state(copy=True)
        return PretrainReply(tuple(results), parts.seconds)

    def _candidate(
        self, command: Pretrain, candidate: Candidate, on_step: OnStep, offset: int, total: int
    ) -> CandidateResult:
        trained = self._train(command, candidate, lambda done: on_step(offset + done, total))
        scored = self.learner.evaluate("selection")
        fine = math.isfinite(trained.loss) and math.isfinite(scored.loss)
        return CandidateResult(
            candidate,
            "ok" if fine else "diverged",
            val_accuracy=scored.accuracy,
            val_loss=scored.loss,
            train_loss=trained.loss,
            samples=trained.samples,
            train_s=trained.seconds,
            score_s=scored.seconds,
            slot=self.index,
        )

    def _train(
        self, command: Pretrain, candidate: Candidate, on_step: Callable[[int], None]
    ) -> TrainTotals:
        shares, lr = self._shares_and_lr(candidate)
        lrs = [lr] * command.steps
        return self.learner.train(command.epoch, command.first_step, lrs, shares, on_step)

    def _shares_and_lr(self, candidate: Candidate) -> tuple[Shares, float]:
        """global: all shares, at the candidate's rate. local: one share, at the rate that a
        batch so much smaller needs (linear scaling).
        """
        count = self.learner.job.workers.count
        section = self.learner.job.learning_rate
        if section.policy == "stpt" and section.candidate_batch == "local":
            return Shares(range(1), count), candidate.lr / count
        return Shares(range(count), count), candidate.lr

    def _take_state(self, command: TakeState) -> StateRef | None:
        if command.slot != self.index:
            self.learner.release_memory()
            return None
        self._make_live(command)
        state = self._hand_over(f"{command.round.epoch}.candidate{command.candidate.index}")
        self.learner.release_memory()
        return state

    def _make_live(self, command: TakeState) -> None:
        """From the live model or the stash; a slot that was started again trains once more."""
        wanted = command.candidate
        if wanted.index == self._live:
            return
        if wanted.index in self._stashed:
            self.learner.load(self._stashed[wanted.index])
        else:
            self.learner.load(fetch(command.round.state))
            self._train(command.round, wanted, lambda _: None)
        self._live = wanted.index

    def _hand_over(self, state_id: str) -> StateRef:
        """Put and hash at the same time: both leave Python's lock to the other."""
        state = self.learner.state(copy=False)
        with ThreadPoolExecutor(1) as pool:
            digest = pool.submit(state.digest)
            ref = ray.put(state)
            return StateRef(state_id, ref, digest.result())
