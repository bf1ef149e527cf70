"""What a resident slot does: pre-train candidates, score them, hand the winner's state over."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import ray
import torch

from raytrain_opt.clock import Parts
from raytrain_opt.pools.commands import (
    SLOT_POOL,
    Command,
    Pretrain,
    PretrainReply,
    ShareState,
    StateRef,
    TakeState,
)
from raytrain_opt.pools.member import OnStep, Post, describe_self, fetch, hand_over
from raytrain_opt.pools.setup import Setup, threads_for
from raytrain_opt.search.policy import Candidate, CandidateResult, Plan
from raytrain_opt.train.group import use_threads
from raytrain_opt.train.learner import Learner, Shares
from raytrain_opt.train.state import HostState
from raytrain_opt.train.totals import TrainTotals


def serve(setup: Setup, index: int) -> None:
    """The life of a slot, inside the function that Ray Tune runs."""
    parts = Parts()
    with parts.measure("build_s"):
        use_threads(threads_for(setup.job.workers.threads, setup.plan.slots_per_node))
        device = torch.device("cuda" if setup.plan.use_gpu else "cpu")
        learner = Learner(setup.job, setup.fetch_shared(), device)
    member = describe_self(SLOT_POOL, index, parts.seconds)
    try:
        post = Post(setup.mailbox, member, setup.leave_s, setup.faults)
        post.serve(Slot(learner, member.index))
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
        parts, plan = Parts(), command.plan
        if self.index not in command.slots:  # it was given up, and was only slow
            return PretrainReply((), {})
        self._stashed.clear()
        self._live = -1
        with parts.measure("load_s"):
            start = fetch(command.state)
        mine = command.share(self.index)
        results = []
        for number, candidate in enumerate(mine):
            with parts.measure("load_s"):
                self.learner.load(start)
            offset, total = number * plan.pretrain_steps, len(mine) * plan.pretrain_steps
            is_last = number + 1 == len(mine)
            results.append(self._candidate(plan, candidate, on_step, offset, total, parts))
            if plan.kept_steps == plan.pretrain_steps:
                self._live = candidate.index
                if not is_last:  # the last one's state stays in the live model
                    self._stash(candidate, parts)
        parts.seconds["compute_s"] = sum(result.train_s for result in results)
        parts.seconds["score_s"] = sum(result.score_s for result in results)
        return PretrainReply(tuple(results), parts.seconds)

    def _candidate(
        self,
        plan: Plan,
        candidate: Candidate,
        on_step: OnStep,
        offset: int,
        total: int,
        parts: Parts,
    ) -> CandidateResult:
        """Train the steps that are kept, then those that only serve the score, and score."""
        trained = []
        for first, end in ((0, plan.kept_steps), (plan.kept_steps, plan.pretrain_steps)):
            if first == end:
                continue
            if first:
                self._stash(candidate, parts)
            told = partial(_tell, on_step, offset + first, total)
            trained.append(self._train(plan, candidate, first, end, told))
        scored = self.learner.evaluate("selection", blocks=plan.paired)
        return CandidateResult.of(candidate, trained, scored, self.index)

    def _stash(self, candidate: Candidate, parts: Parts) -> None:
        with parts.measure("stash_s"):
            self._stashed[candidate.index] = self.learner.state(copy=True)

    def _train(
        self,
        plan: Plan,
        candidate: Candidate,
        first: int,
        end: int,
        on_step: Callable[[int], None],
    ) -> TrainTotals:
        shares, factor = self._shares_and_factor()
        lrs = [factor * lr for lr in candidate.lrs(plan)[first:end]]
        decay = candidate.decay * plan.decay_scale
        return self.learner.train(plan.epoch, first, lrs, shares, on_step, decay)

    def _shares_and_factor(self) -> tuple[Shares, float]:
        """global: all shares, at the candidate's rate. local: one share, at the rate that a
        batch so much smaller needs (linear scaling).
        """
        count = self.learner.job.workers.count
        section = self.learner.job.learning_rate
        if section.policy == "stpt" and section.candidate_batch == "local":
            return Shares(range(1), count), 1 / count
        return Shares(range(count), count), 1.0

    def _take_state(self, command: TakeState) -> StateRef | None:
        if command.slot != self.index:
            self.learner.release_memory()
            return None
        self._make_live(command)
        state = self._hand_over(f"{command.round.plan.epoch}.candidate{command.candidate.index}")
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
            plan = command.round.plan
            self.learner.load(fetch(command.round.state))
            self._train(plan, wanted, 0, plan.kept_steps, lambda _: None)
        self._live = wanted.index

    def _hand_over(self, state_id: str) -> StateRef:
        """Put and hash at the same time: both leave Python's lock to the other."""
        state = self.learner.state(copy=False)
        with ThreadPoolExecutor(1) as pool:
            digest = pool.submit(state.digest)
            ref = ray.put(state)
            return StateRef(state_id, ref, digest.result())


def _tell(on_step: OnStep, offset: int, total: int, done: int) -> None:
    on_step(offset + done, total)
