"""One execution of a job: the moves that the driver's algorithm is made of.

Each public method is one line of `driver.train`. They talk to the pools, measure, and
write records; they decide nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import ray

from raytrain_opt.clock import monotonic_s
from raytrain_opt.config.schema import Job
from raytrain_opt.errors import DivergedError, PoolError
from raytrain_opt.main_training import MainTraining
from raytrain_opt.optim.batch_ramp import EpochSteps, ramp_factor
from raytrain_opt.paths import RunPaths, write_json
from raytrain_opt.pools.commands import (
    MainTrain,
    Pretrain,
    Progress,
    ShareState,
    StateRef,
    TakeState,
)
from raytrain_opt.pools.pool import Pool, Vault
from raytrain_opt.position import Begun, EpochInHand, Position, round_record
from raytrain_opt.search.fixed import FoundSchedule
from raytrain_opt.search.noise_scale import NoiseScale
from raytrain_opt.search.policy import CandidateResult, Plan, Policy, Round, is_finite
from raytrain_opt.telemetry.diary import Diary
from raytrain_opt.telemetry.records import EpochRecord, Recorder
from raytrain_opt.telemetry.terminal import Terminal
from raytrain_opt.train.average import averaged
from raytrain_opt.train.checkpoint import Checkpoints, Commit, read_checkpoint
from raytrain_opt.train.totals import TrainTotals


@dataclass
class Startup:
    """Seconds from the beginning of the run to each mark; monotonic."""

    began_s: float
    marks_s: dict[str, float] = field(default_factory=dict)

    def mark(self, name: str) -> None:
        """Reached now, for the first time."""
        self.marks_s.setdefault(name, monotonic_s() - self.began_s)


class TrainingRun:
    """Everything alive of one run. Made by `start.open_run`."""

    def __init__(
        self,
        job: Job,
        paths: RunPaths,
        checkpoints: Checkpoints,
        policy: Policy,
        steps: EpochSteps,
        workers: Pool,
        slots: Pool | None,
        vault: Vault,
        terminal: Terminal,
        startup: Startup,
        uses_gpu: bool,
        main: MainTraining,
    ) -> None:
        self.job, self.paths, self.policy = job, paths, policy
        self.steps, self.main = steps, main
        self.workers, self.slots, self.vault = workers, slots, vault
        self.terminal, self.startup, self.uses_gpu = terminal, startup, uses_gpu
        self.recorder = Recorder(paths)
        self.diary = Diary(self.recorder, terminal, startup.began_s)
        self.checkpoints = checkpoints
        self.position = Position()
        self.parallel: dict[str, object] = {}  # how gradients travelled, of the latest epoch
        self._epoch = EpochInHand(monotonic_s())
        self._commits = ThreadPoolExecutor(1, thread_name_prefix="commit")
        self._pending_commit: Future[Commit] | None = None
        self._workers_ready = False
        self._workers_at_work = workers.size
        self._first_step = workers.mailbox.first_step.remote()
        for pool in self._pools:
            pool.on_wait = self._on_wait

    @property
    def _pools(self) -> list[Pool]:
        return [self.workers] if self.slots is None else [self.workers, self.slots]

    @property
    def losses(self) -> tuple[float, ...]:
        """Mean training loss of each epoch so far."""
        return self.position.losses

    # The moves, in the order in which the algorithm makes them.

    def initial_state(self) -> StateRef:
        """The state that all start from: the last commit's, or else slot 0's or rank 0's, so
        that equal seeds need not give equal weights in every process.
        """
        self.terminal.phase("starting", 0, self.job.epochs)
        if self.slots is not None:
            self.slots.wait_until_ready(self.job.limits.start_s)
            self.startup.mark("slots_ready_s")
            self.workers.start()
        if self.checkpoints.latest is not None:
            return self._resumed_state(self.checkpoints.latest)
        pool = self.slots or self._ready_workers()
        state: StateRef = pool.command(ShareState(), expected=range(1))[0]
        self.vault.hold(state)
        return state

    def pretrain(self, state: StateRef, plan: Plan) -> list[CandidateResult]:
        """Every candidate from the same state on the same batches, over the slots in waves."""
        assert self.slots is not None
        self._begin(plan, f"pre-train {len(plan.candidates)} candidates")
        with self._epoch.parts.measure("pretrain_s"):
            slots = self.slots.alive()
            replies = self.slots.command(Pretrain(state, plan, slots), slots)
        if not replies:
            raise PoolError(
                f"epoch {plan.epoch}: every slot died more often than limits.max_restarts "
                f"({self.job.limits.max_restarts}) allows"
            )
        results = [result for reply in replies.values() for result in reply.results]
        results += self._lost_results(plan, results)
        results.sort(key=lambda result: result.candidate.index)
        self._add_samples(search=sum(result.samples for result in results))
        slowest = max(
            replies.values(), key=lambda reply: sum(result.seconds for result in reply.results)
        )
        self._epoch.parts.seconds["longest_slot_s"] = sum(r.seconds for r in slowest.results)
        return results

    def take_state(
        self, start: StateRef, plan: Plan, results: Sequence[CandidateResult], choice: Round
    ) -> StateRef:
        """The winner's state after the steps that are kept, from the slot that trained it from
        `start`, or the mean that was chosen; `start` itself where nobody won or nothing is kept.
        """
        if choice.winner is None or plan.kept_steps == 0:
            return self._leave_state(start, plan, results, choice)
        with self._epoch.parts.measure("take_state_s"):
            if choice.averaged:
                state = self._averaged_state(start, plan, choice.averaged)
            else:
                state = self._state_of(start, plan, choice.winner)
            self.vault.hold(state)
        self._epoch.lrs = list(choice.winner.candidate.lrs(plan)[: plan.kept_steps])
        self._epoch.round_record = round_record(plan, results, choice, state.sha256)
        return state

    def _lost_results(
        self, plan: Plan, results: Sequence[CandidateResult]
    ) -> list[CandidateResult]:
        """Of the candidates whose slot died once too often: the round goes on without them."""
        assert self.slots is not None
        there = {result.candidate.index for result in results}
        lost = [c for c in plan.candidates if c.index not in there]
        if lost:
            rates = ", ".join(f"{candidate.lr:.3g}" for candidate in lost)
            self.diary.note(
                "lost",
                plan.epoch,
                f"epoch {plan.epoch}: learning rate {rates} is left out: its slot died more often "
                "than limits.max_restarts allows, or was silent for longer than limits.stall_s; "
                f"{len(self.slots.alive())} of {self.slots.size} slots are left",
            )
        return [CandidateResult.of_lost(candidate) for candidate in lost]

    def _state_of(self, start: StateRef, plan: Plan, of: CandidateResult) -> StateRef:
        assert self.slots is not None
        slots = self.slots.alive()
        # One that did not train it can do so now.
        for slot in sorted(slots, key=lambda slot: slot != of.slot):
            command = TakeState(Pretrain(start, plan, slots), of.candidate, slot)
            replies = self.slots.command(command, (slot,))
            if replies:
                state: StateRef = replies[slot]
                return state
        raise PoolError(f"epoch {plan.epoch}: no slot is left to hand over the winner's state")

    def _averaged_state(
        self, start: StateRef, plan: Plan, members: Sequence[CandidateResult]
    ) -> StateRef:
        """Made in the driver, which sees the states of all slots in place."""
        # A slot's last candidate is still in its model, and the others would push it out.
        in_turn = sorted(members, key=lambda r: r.candidate.index, reverse=True)
        views = {
            r.candidate.index: self.vault.view(self._state_of(start, plan, r)) for r in in_turn
        }
        mean = averaged([views[r.candidate.index] for r in members])
        return replace(self.vault.put(f"{plan.epoch}.average", mean), sha256=mean.digest())

    def _leave_state(
        self, start: StateRef, plan: Plan, results: Sequence[CandidateResult], choice: Round
    ) -> StateRef:
        record = round_record(plan, results, choice, None)
        self._write_round({**record, "loaded_sha256": [], "parts_s": self._epoch.parts.seconds})
        self.terminal.note(f"epoch {plan.epoch}: {choice.reason}")
        return start

    def main_train(self, state: StateRef, plan: Plan) -> StateRef:
        """All workers together, from `state`, the rest of the epoch at the plan's rates."""
        lrs = plan.lrs
        self._ready_workers()
        self._begin(plan, "main train")
        first_step = self.steps(plan.epoch) - len(lrs)
        with self._epoch.parts.measure("main_train_s"):
            command = MainTrain(state, plan.epoch, first_step, lrs, plan.decay)
            trained = self.main.train(command, check=self._epoch.round_record is not None)
        self._tell_when_fewer(plan, trained.workers)
        self.vault.hold(trained.state)
        self._epoch.train, self.parallel = trained.totals, trained.parallel
        self._epoch.staleness = trained.staleness
        self._epoch.lrs.extend(lrs)
        seconds = {f"main_{name}": value for name, value in trained.parts_s.items()}
        self._epoch.parts.seconds.update(seconds)
        factor = ramp_factor(self.job.batch_ramp, plan.epoch)
        self._add_samples(main=self.steps(plan.epoch) * self.job.global_batch_size * factor)
        self._finish_round(trained.loaded_sha256)
        self._refuse_when_diverged(plan, trained.totals, lrs)
        return trained.state

    def evaluate(self, state: StateRef, plan: Plan) -> None:
        """Top-1 and top-5 on the test split, when the job wants it after this epoch."""
        due = plan.epoch % self.job.evaluate.every_epochs == 0 or plan.epoch == self.job.epochs
        if not due:
            return
        self.terminal.phase("evaluate", plan.epoch, self.job.epochs)
        with self._epoch.parts.measure("evaluate_s"):
            self._epoch.test = self.main.evaluate(state)

    def commit_round(self, state: StateRef, plan: Plan, history: tuple[Round, ...]) -> None:
        """Write the state after a round beside the next phase, so that no round is repeated."""
        self.position = replace(self.position, history=history, begun=self._epoch.begun())
        rounds = sum(choice.epoch == plan.epoch for choice in history)
        self._save(state, plan.epoch - 1, rounds=rounds)

    def commit(self, state: StateRef, plan: Plan, history: tuple[Round, ...]) -> None:
        """Write the epoch down, and its state beside the next epoch's training."""
        record = self._epoch_record(plan)
        self.position = replace(
            self.position,
            next_epoch=plan.epoch + 1,
            history=history,
            lrs=(*self.position.lrs, *self._epoch.lrs),
            losses=(*self.position.losses, record.train_loss),
            begun=Begun(),
        )
        self.recorder.epoch(record, self.steps.before(plan.epoch + 1))
        self.diary.write(plan.epoch, self._pools)
        done = tuple(self.steps(epoch) for epoch in range(1, plan.epoch + 1))
        schedule = FoundSchedule(done, self.position.lrs, plan.decay)
        write_json(self.paths.schedule, schedule.to_json())
        if plan.epoch % self.job.checkpoint.every_epochs == 0 or plan.epoch == self.job.epochs:
            self._save(state, plan.epoch, accuracy=record.test_accuracy)
        self.terminal.epoch(record, self.job.epochs)
        # From where this record's time ends: no second between two epochs is lost.
        self._epoch = EpochInHand(self._epoch.started_s + record.seconds)

    def restarts(self) -> dict[str, int]:
        """How often a process of each pool was started again."""
        return {pool.name: pool.restarts() for pool in self._pools}

    def wait_for_commit(self) -> None:
        """Until the commit under way is on disk. Raises CommitError when it could not be."""
        if self._pending_commit is not None:
            pending, self._pending_commit = self._pending_commit, None
            pending.result()

    def close(self) -> None:
        """End what is ours here; a commit under way is finished first."""
        self._commits.shutdown(wait=True)
        self.recorder.close()

    # How they do it.

    def _ready_workers(self) -> Pool:
        if not self._workers_ready:
            self.workers.wait_until_ready(self.job.limits.start_s)
            self.startup.mark("workers_ready_s")
            self._workers_ready = True
        return self.workers

    def _resumed_state(self, commit: Commit) -> StateRef:
        state, position = read_checkpoint(self.paths.checkpoints / commit.folder)
        self.position = at = Position.from_plain(position)
        self._epoch = EpochInHand.after(at.begun)
        self.recorder.forget_after(at.rounds_written, at.next_epoch - 1)
        self.diary.go_on(at.next_epoch, f"resumed after {commit.reached}")
        return self.vault.put(commit.folder, state)

    def _on_wait(self, pool: str, progress: Progress | None) -> None:
        """About twice a second while a pool works."""
        if "first_step_s" not in self.startup.marks_s:
            self._mark_first_step()
        if progress is not None and pool == self.workers.name:
            done, epoch = len(self._epoch.lrs) + max(progress.done, 0), self.position.next_epoch
            self.terminal.advance(epoch - 1 + done / self.steps(epoch))

    def _mark_first_step(self) -> None:
        if ray.wait([self._first_step], timeout=0)[0]:
            self.startup.mark("first_step_s")

    def _begin(self, plan: Plan, phase: str) -> None:
        self.terminal.phase(phase, plan.epoch, self.job.epochs)
        self.terminal.advance(plan.epoch - 1)

    def _add_samples(self, search: int = 0, main: int = 0) -> None:
        at = self.position
        searched, trained = at.search_samples + search, at.main_samples + main
        self.position = replace(at, search_samples=searched, main_samples=trained)

    def _tell_when_fewer(self, plan: Plan, workers: int) -> None:
        before, self._workers_at_work = self._workers_at_work, workers
        if workers != before:
            what = "fewer" if workers < before else "more"
            at_work = f"on {workers} of {self.workers.size} workers"
            text = f"epoch {plan.epoch}: {at_work}; the global batch is the same, in other parts"
            self.diary.note(what, plan.epoch, text)

    def _finish_round(self, loaded: Sequence[str | None]) -> None:
        if self._epoch.round_record is None:
            return
        parts = dict(self._epoch.parts.seconds)
        record = {**self._epoch.round_record, "loaded_sha256": list(loaded), "parts_s": parts}
        self._write_round(record)

    def _write_round(self, record: dict[str, Any]) -> None:
        self.recorder.round(record, self.steps.before(record["epoch"]))

    def _refuse_when_diverged(self, plan: Plan, totals: TrainTotals, lrs: Sequence[float]) -> None:
        if is_finite(totals.loss):
            return
        latest = self.checkpoints.latest
        kept = f"the last commit is after {latest.reached}" if latest else "there is no commit yet"
        raise DivergedError(
            f"epoch {plan.epoch}: the training loss is {totals.loss} at learning rates "
            f"{min(lrs, default=0):.4g} to {max(lrs, default=0):.4g}; {kept} in "
            f"{self.paths.shown}. Lower learning_rate.initial or add a warm-up "
            "(learning_rate.warmup)."
        )

    def _epoch_record(self, plan: Plan) -> EpochRecord:
        train, test = self._epoch.train, self._epoch.test
        assert train is not None
        seconds = monotonic_s() - self._epoch.started_s
        noise = None if train.norms is None else NoiseScale.of(train.norms)
        return EpochRecord(
            epoch=plan.epoch,
            lr=self._epoch.lrs[-1],
            lr_first=self._epoch.lrs[0],
            # A pre-training as long as an epoch leaves main train nothing to measure.
            train_loss=train.loss if train.samples else math.nan,
            train_accuracy=train.accuracy if train.samples else math.nan,
            test_loss=test.loss if test else None,
            test_accuracy=test.accuracy if test else None,
            test_top5=test.top5 if test else None,
            test_samples=test.samples if test else 0,
            workers=self._workers_at_work,
            samples=train.samples,
            samples_per_s=train.samples / train.seconds if train.seconds else 0.0,
            skipped=train.skipped,
            seconds=seconds,
            parts_s=dict(self._epoch.parts.seconds),
            noise_scale=None if noise is None else noise.to_record(),
            staleness=self._epoch.staleness,
        )

    def _save(
        self, state: StateRef, epoch: int, *, rounds: int = 0, accuracy: float | None = None
    ) -> None:
        self.wait_for_commit()
        view, position = self.vault.view(state), self.position

        def save() -> Commit:
            with self.diary.doing("commit"):
                self.paths.sync_records()  # they are never behind the commit
                commit = self.checkpoints.save(
                    epoch, view, position.to_plain(), test_accuracy=accuracy, rounds=rounds
                )
                self.paths.publish()
            return commit

        self._pending_commit = self._commits.submit(save)
