"""The moves that `driver.train` is made of, on Ray or in one process."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

from raytrain_opt.clock import monotonic_s
from raytrain_opt.data.base import DataFingerprint
from raytrain_opt.errors import DivergedError
from raytrain_opt.execution.callbacks import Callbacks
from raytrain_opt.execution.checkpoint_schedule import CheckpointSchedule
from raytrain_opt.execution.length import Pace, TrainingLength, measure_pace
from raytrain_opt.execution.progress import EpochMetrics, PartialEpoch, RunProgress, epoch_record
from raytrain_opt.execution.resolve import Resolved
from raytrain_opt.execution.resume import job_fields
from raytrain_opt.execution.workspace import Workspace
from raytrain_opt.pools.commands import MainTrain, Progress, StateRef
from raytrain_opt.pools.interface import Pool, Pools, TrainingOutcome, fetch_initial_state
from raytrain_opt.pools.rounds import CandidateTraining
from raytrain_opt.recording.recorder import EventLog, Recorder, write_record
from raytrain_opt.recording.records import (
    EpochRecord,
    PredictionsRecord,
    RoundRecord,
    ScheduleRecord,
    best_epoch,
)
from raytrain_opt.results import EvalTotals, Split
from raytrain_opt.search.policy import (
    CandidateResult,
    Decision,
    EpochLosses,
    History,
    StartAgain,
    TrainEpoch,
    TryCandidates,
    is_finite,
)
from raytrain_opt.train.checkpoint import Checkpoint, read_checkpoint
from raytrain_opt.train.pretrained import start_from_pretrained
from raytrain_opt.train.state import TrainingState


class TrainingRun:
    """Everything alive of one run; implements `driver.Run`."""

    def __init__(
        self,
        resolved: Resolved,
        pools: Pools,
        workspace: Workspace,
        recorder: Recorder,
        checkpoints: CheckpointSchedule,
        event_log: EventLog,
        callbacks: Callbacks,
    ) -> None:
        self.job, self.policy, self.steps = resolved.job, resolved.policy, resolved.steps
        self.info, self.optimizers = resolved.info, resolved.learner.optimizers
        self.pools, self.paths, self.stop = pools, workspace.paths, workspace.stop
        self.terminal, self.startup = workspace.terminal, workspace.startup
        self.recorder, self.checkpoints = recorder, checkpoints
        self.event_log, self.callbacks = event_log, callbacks
        self.length = TrainingLength(resolved, self.event_log)
        self._epoch = EpochMetrics()
        self._lrs: list[float] = []  # of the finished epochs, which schedule.jsonl holds
        self._announced = self.checkpoints.latest
        self._workers_ready = False
        self._initial: TrainingState | None = None  # while the training may start again
        self._in_round = False  # candidates are trained
        self._at_work = pools.workers.size  # in the latest epoch
        self._candidates = CandidateTraining(
            pools.slots or pools.workers, together=pools.slots is None
        )
        for pool in pools.all:
            pool.on_wait = self._on_wait
        self.progress = RunProgress(data=DataFingerprint.of(self.info), job=job_fields(self.job))

    @property
    def history(self) -> History:
        """Decisions and losses so far; after `initial_state`, also of a resumed run's past."""
        return self.progress.history

    @property
    def epochs_left(self) -> Iterator[int]:
        return self.length.epochs_left()

    @property
    def lrs(self) -> tuple[float, ...]:
        """The rate of each step so far, including the current epoch."""
        return (*self._lrs, *self._epoch.steps.lrs)

    # The moves, in the order in which the algorithm makes them: see `driver.Run`.

    def initial_state(self) -> StateRef:
        # All processes start from one state: equal seeds need not give equal weights in each.
        if (slots := self.pools.slots) is not None:
            self.terminal.phase(f"starting {slots.size} slots")
            slots.wait_until_ready(self.job.timeouts.start_s)
            self.startup.mark("slots_ready_s")
            self.pools.workers.start()
        latest = self.checkpoints.latest
        state = None if latest is None else self._resume_from(latest)
        if state is None or self._may_start_again:
            initial = self._fetch_initial_state()
            self._initial = self.pools.states.get(initial) if self._may_start_again else None
            state = state or initial
        self.pools.states.keep(state)
        return state

    def estimate_length(self, state: StateRef, history: History) -> History:
        if self._epoch.train is not None:  # resumed within it: it keeps its length
            return history
        history = self.length.estimate(history, partial(self._measure_pace, state))
        self.progress = replace(self.progress, history=history)
        return history

    def pretrain(self, state: StateRef, action: TryCandidates) -> list[CandidateResult]:
        """Train and score every candidate: on the slots in waves, or on all workers together."""
        self._candidate_pool()
        self._show_phase(action.epoch, f"pre-train {len(action.candidates)} candidates")
        self._in_round = True
        with self._measure("pretrain"), self.stop.deferred(self.job.timeouts.stop_s):
            while (before := self._epoch.begin_round(action)).left and self.stop.error is None:
                until = self.checkpoints.interval.limit(action.pretrain_steps)
                after = self._candidates.train(state, before, until=until, is_due=self._must_save)
                self._epoch.round = after
                self.pools.states.keep(state, *after.states.values())
                self.checkpoints.interval.count(after.steps_since(before))
                if self.stop.error is not None or (after.left and self._must_save()):
                    self._epoch.round = self._candidates.with_best(state, after)
                    self._save_partial(state)
        results = list(self._epoch.begin_round(action).results)
        if lost := self._candidates.describe_lost(action, results):
            self.event_log.log("lost", action.epoch, lost)
        self.progress = self.progress.add_samples(search=sum(r.samples for r in results))
        self._epoch.results = results
        return results

    def state_after(self, state: StateRef, action: TryCandidates, decision: Decision) -> StateRef:
        winner = decision.winner
        done, self._epoch.round = self._epoch.begin_round(action), None
        if winner is None or not action.keeps_winner:
            self._write_round(action, decision)
            self.terminal.note(f"epoch {action.epoch}: {decision.reason}")
            return state
        with self._measure("take_state"):
            kept = self._candidates.fetch_state(state, done, winner)
            self.pools.states.keep(kept)
        # Search cost: samples beyond those that remain in the weights, as the winner's steps do.
        self.progress = self.progress.add_samples(search=-winner.samples, kept=winner.samples)
        self._epoch.steps = winner.candidate.steps(action)
        self._write_round(action, decision)
        return kept

    def start_again(self, action: StartAgain) -> StateRef:
        assert self._initial is not None
        self.event_log.log("collapsed", action.epoch, f"epoch {action.epoch}: {action.reason}")
        kept = self.progress.kept_samples
        self.progress = self.progress.add_samples(search=kept, kept=-kept)
        return self.pools.states.put(f"initial, epoch {action.epoch}", self._initial)

    def checkpoint_search(self, state: StateRef, history: History) -> None:
        self.progress = replace(self.progress, history=history)
        self._save_partial(state)

    def train_epoch(self, state: StateRef, action: TrainEpoch) -> tuple[StateRef, EpochLosses]:
        """Train the rest of the epoch; the loss is NaN if pre-training was as long as it."""
        self._wait_for_workers()
        self._in_round = False
        self._show_phase(action.epoch, "main train")
        if action.epoch == 1 and not self.history.decisions and action.reason:
            self.terminal.note(f"epoch 1: {action.reason}")
        if self._epoch.train is None and action.overfitting:
            text = f"epoch {action.epoch}: {action.overfitting}"
            self.event_log.log("overfitting", action.epoch, text)
        with self.stop.deferred(self.job.timeouts.stop_s):
            state = self._train_steps_left(state, action)
        if self._starts_again_after(action.epoch) and self._is_ruined(state):
            self._epoch.is_ruined = True
            return state, EpochLosses(math.nan)
        return state, self._losses(state, action)

    def _train_steps_left(self, state: StateRef, action: TrainEpoch) -> StateRef:
        left = action.steps.after(self._epoch.train.steps if self._epoch.train else 0)
        while True:
            self.pools.workers.grow()
            until = self.checkpoints.interval.limit(len(left.lrs))
            command = MainTrain(state, action.epoch, left, until)
            with self._measure("main_train"):
                outcome = self.pools.main_training.train(command, is_due=self._must_save)
            self._add_main_training(command, outcome)
            state, left = outcome.state, left.after(outcome.totals.steps)
            if self._must_save():
                self._save_step(state)
            if not left.lrs or self.stop.error is not None:
                return state

    def _must_save(self) -> bool:
        return self.stop.error is not None or self.stop.saves or self.checkpoints.is_due

    def _losses(self, state: StateRef, action: TrainEpoch) -> EpochLosses:
        """Score the validation split where the policy asks for it or a plateau follows it."""
        follows_metric = self.job.learning_rate.follows_metric
        if not (follows_metric or action.scores):
            return EpochLosses(self._epoch.train_loss)
        scored = self.score(state, "validation")
        if follows_metric:
            return EpochLosses(-scored.metric.score(scored.means[scored.metric.name]))
        self._raise_if_diverged(action.epoch, "validation", scored.loss, scored.failure)
        return EpochLosses(self._epoch.train_loss, scored.loss)

    def score(self, state: StateRef, split: Split) -> EvalTotals:
        """Evaluate a split; a signal meanwhile saves the state."""
        try:
            with self._measure("evaluate"):
                return self.pools.main_training.evaluate(state, split)
        except KeyboardInterrupt:
            self._save_step(state)
            raise

    def log_unreadable(self, name: str, epoch: int, count: int) -> None:
        """Log how many samples of a set its metrics lack."""
        text = f"unreadable samples that metrics of the {name} set lack: {count}"
        self.event_log.log("unreadable", epoch, text)

    def _add_main_training(self, command: MainTrain, outcome: TrainingOutcome) -> None:
        self.startup.mark("first_step_s")  # where no worker has reported a step
        self._log_workers(command.epoch, outcome.workers)
        self.pools.states.keep(outcome.state)
        self._epoch.add(command, outcome)
        self.checkpoints.interval.count(outcome.totals.steps)
        self.progress = self.progress.add_samples(kept=outcome.totals.samples)
        totals = outcome.totals
        if not self._starts_again_after(command.epoch):
            self._raise_if_diverged(command.epoch, "training", totals.loss, totals.failure)
        elif totals.failure:
            text = f"epoch {command.epoch}: a training that is not finite raised {totals.failure}"
            self.event_log.log("diverged", command.epoch, text)

    def _log_workers(self, epoch: int, workers: int) -> None:
        before, self._at_work = self._at_work, workers
        if workers != before:
            kind = "fewer" if workers < before else "more"
            running = f"running on {workers} of {self.pools.workers.size} workers"
            text = f"epoch {epoch}: {running}; global batch size unchanged"
            self.event_log.log(kind, epoch, text)

    def _save_step(self, state: StateRef) -> None:
        """Begin to save the state between two steps of an epoch, unless the training is ruined."""
        self.checkpoints.interval.restart()
        self.stop.saves = False
        starts_again = self._starts_again_after(self.progress.next_epoch)
        if self._epoch.steps.lrs and not (starts_again and self._is_ruined(state)):
            self._save_partial(state)

    def _save_partial(self, state: StateRef) -> None:
        self.stop.saves = False
        self.progress = replace(self.progress, partial_epoch=self._epoch.partial())
        self._save(state)

    def evaluate(self, state: StateRef, epoch: int) -> None:
        """Measure the test metrics. Raises DivergedError if the loss is not finite."""
        skips = epoch % self.job.evaluate.every_epochs and not self.length.is_last(epoch)
        if skips or self._epoch.is_ruined:
            return
        self.terminal.phase(f"epoch {epoch}/{self.length.epochs or '?'}  evaluate")
        self._epoch.test = test = self.score(state, "test")
        self._raise_if_diverged(epoch, "test", test.loss, test.failure)
        if test.skipped > max((before.test_skipped for before in self.length.records), default=0):
            self.log_unreadable("test", epoch, test.skipped)
        if test.predictions is not None:
            record = PredictionsRecord(
                epoch=epoch, class_names=self.info.class_labels, **vars(test.predictions)
            )
            write_record(self.paths.local, record, indent=None)

    def checkpoint_epoch(self, state: StateRef, history: History) -> None:
        # A signal that arrives in here, perhaps in a callback, must not lose the epoch.
        with self.stop.deferred(self.job.timeouts.stop_s):
            epoch = self.progress.next_epoch
            optimizer = self.optimizers[self._epoch.steps.optimizer]
            name, workers = str(optimizer.name), self._at_work
            epochs, end_s = self.length.epochs, self.event_log.elapsed_s()
            record = epoch_record(epoch, epochs, self._epoch, workers, name, self.lrs, end_s)
            self.progress = replace(
                self.progress, next_epoch=epoch + 1, history=history, partial_epoch=PartialEpoch()
            )
            if not self._may_start_again:
                self._initial = None
            self.recorder.epoch(record, len(self.lrs))
            self.event_log.write(epoch, [e for pool in self.pools.all for e in pool.new_events()])
            restarts = epoch in history.restarts
            self.recorder.add(self._epoch.schedule(epoch, optimizer, restarts=restarts))
            self._lrs += self._epoch.steps.lrs
            is_ruined = self._epoch.is_ruined
            # The next epoch starts where this record's time ends, so that no time is lost.
            self._epoch = EpochMetrics(started_s=self._epoch.started_s + record.duration_s)
            ends = self.length.after_epoch(record)
            self.terminal.epoch(record)
            self.callbacks.call("on_epoch", record)
            is_best = self.info.final_size and best_epoch(self.length.records) is record
            is_due = epoch % self.job.checkpoint.every_epochs == 0 or ends
            if not is_ruined and (is_due or is_best or self.stop.error is not None):
                self._save(state, record.score)

    def close(self) -> None:
        self.checkpoints.close()
        self.recorder.close()

    # Details of the moves.

    def _measure(self, phase: str) -> AbstractContextManager[None]:
        return self.event_log.measure(self.progress.next_epoch, phase, self._epoch.stopwatch)

    @property
    def _may_start_again(self) -> bool:
        """Whether the next epoch or a later one may begin from the initial weights."""
        return self.progress.next_epoch <= self.policy.last_restart

    def _starts_again_after(self, epoch: int) -> bool:
        """Return whether the training starts again if this epoch ruins it."""
        if epoch >= self.policy.last_restart:
            return False
        ruined = self.history.after_epoch(EpochLosses(math.nan))
        return isinstance(self.policy.next(epoch + 1, ruined), StartAgain)

    def _is_ruined(self, state: StateRef) -> bool:
        """Return whether the loss is not finite, or the weights, which a last step may ruin."""
        state_of = self.pools.states.get
        return not is_finite(self._epoch.train_loss) or bool(state_of(state).first_not_finite())

    def _fetch_initial_state(self) -> StateRef:
        """Return the state of a pool that has not trained, with the pretrained weights."""
        state = fetch_initial_state(self._candidate_pool())
        if self.job.model.weights is None:
            return state
        initial = self.pools.states.get(state)
        start, note = start_from_pretrained(initial, self.job.model, self.info)
        self.terminal.note(note)
        return self.pools.states.put("pretrained", start)

    def _candidate_pool(self) -> Pool:
        return self.pools.slots or self._wait_for_workers()

    def _wait_for_workers(self) -> Pool:
        if not self._workers_ready:
            workers = self.pools.workers
            self.terminal.phase(f"starting {workers.size} workers")
            workers.wait_until_ready(self.job.timeouts.start_s)
            self.startup.mark("workers_ready_s")
            self._workers_ready = True
        return self.pools.workers

    def _measure_pace(self, state: StateRef, optimizer: int, limit_s: float) -> Pace:
        self._wait_for_workers()
        self._show_phase(self.progress.next_epoch, "measure speed")
        training, steps = self.pools.main_training, self.steps.first
        pace, steps = measure_pace(training, state, optimizer, steps, limit_s)
        self.progress = self.progress.add_samples(search=steps * self.job.global_batch_size)
        return pace

    def _resume_from(self, checkpoint: Checkpoint) -> StateRef:
        folder = self.paths.checkpoints / checkpoint.folder
        state, progress, candidates = read_checkpoint(folder)
        self.progress = replace(RunProgress.from_json(progress), job=job_fields(self.job))
        partial, epoch = self.progress.partial_epoch, self.progress.next_epoch
        self._epoch = EpochMetrics(**vars(partial), started_s=monotonic_s() - partial.duration_s)
        self.recorder.truncate_after(len(self.history.decisions), epoch - 1)
        self._lrs = [lr for e in self.recorder.read(ScheduleRecord) for lr in e.steps.lrs]
        text = f"resumed after {checkpoint.text}"
        self.event_log.resume_clock(epoch, text, partial.duration_s)
        self.length.resume(self.recorder.read(EpochRecord), self.history)
        if self._epoch.round is not None:
            put = self.pools.states.put
            refs = {i: put(f"candidate {i}, resumed", one) for i, one in candidates.items()}
            self._epoch.round = replace(self._epoch.round, states=refs)
        return self.pools.states.put(checkpoint.folder, state)

    def _on_wait(self, pool: str, progress: Progress | None) -> None:
        self.stop.progress()
        if progress is not None and progress.done > 0:
            self.startup.mark("first_step_s")
        if progress is not None and pool == self.pools.workers.name and not self._in_round:
            epoch = self.progress.next_epoch
            kept = len(self._epoch.steps.lrs) / self.steps(epoch)
            done = kept + (1 - kept) * max(progress.done, 0) / max(progress.total, 1)
            self.terminal.advance(self.length.fraction(epoch - 1 + done))

    def _show_phase(self, epoch: int, phase: str) -> None:
        self.stop.progress()
        self.terminal.phase(f"epoch {epoch}/{self.length.epochs or '?'}  {phase}")
        self.terminal.advance(self.length.fraction(epoch - 1))

    def _write_round(self, action: TryCandidates, decision: Decision) -> None:
        names, timings_s = [str(o.name) for o in self.optimizers], self._epoch.stopwatch.timings_s
        record = RoundRecord.from_decision(
            action, self._epoch.results, decision, names, self.pools.search_on, timings_s
        )
        self.recorder.add(record)
        self.callbacks.call("on_round", record)

    def _raise_if_diverged(self, epoch: int, split: str, loss: float, failure: str) -> None:
        if is_finite(loss):
            return
        self.wait_for_checkpoint()  # the message names the latest one
        lrs, latest = self._epoch.steps.lrs, self.checkpoints.latest
        advice = "Lower learning_rate.initial or add a warm-up (learning_rate.warmup)."
        if self.job.learning_rate.searches_first:
            advice = "Give a lower rate: learning_rate.policy: schedule, with initial and warmup."
        kept = f"the last checkpoint is after {latest.text}" if latest else "no checkpoint yet"
        raise DivergedError(
            f"epoch {epoch}: the {split} loss is {loss} at learning rates "
            f"{min(lrs, default=0):.4g} to {max(lrs, default=0):.4g}"
            f"{failure and f', and the network raised {failure}'}; {kept} in "
            f"{self.paths.shown}. {advice} NaN in the data has the same effect."
        )

    def _save(self, state: StateRef, score: float | None = None) -> None:
        tensors = self.pools.states.get(state)
        with self._measure("checkpoint_wait"):
            self.wait_for_checkpoint()
            states = {} if self._epoch.round is None else self._epoch.round.states
            candidates = {index: self.pools.states.get(ref) for index, ref in states.items()}
            self.checkpoints.save(tensors, self.progress, score, candidates)
            if self.checkpoints.interval.counts_steps:  # none is made before it is complete
                self.wait_for_checkpoint()

    def wait_for_checkpoint(self) -> None:
        """Wait until the last checkpoint is complete, and tell the callbacks."""
        self.stop.progress(2 * self.job.timeouts.no_progress_s)
        self.checkpoints.wait()
        self.stop.progress()
        before, self._announced = self._announced, self.checkpoints.latest
        if self._announced is not None and self._announced != before:
            folder = self.paths.checkpoints / self._announced.folder
            self.callbacks.call("on_checkpoint", str(folder))
