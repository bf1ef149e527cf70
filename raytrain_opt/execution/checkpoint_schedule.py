"""Schedule checkpoints, in a thread: `train/checkpoint` and `storage.write_atomic` write them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import Future, wait
from threading import Event

from raytrain_opt.clock import monotonic_s
from raytrain_opt.config.schema import CheckpointSection
from raytrain_opt.errors import DivergedError, StorageError, TakenOverError
from raytrain_opt.execution.progress import RunProgress
from raytrain_opt.paths import RunPaths
from raytrain_opt.recording.recorder import EventLog
from raytrain_opt.threads import start_thread
from raytrain_opt.train.checkpoint import Checkpoint, Checkpoints, best_of
from raytrain_opt.train.state import TrainingState

# Between two attempts to copy to remote storage: short after a lost connection, and not so often
# that a storage which asks for less traffic (503) gets more of it.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0


class Interval:
    """What is left of `checkpoint.every`, since the latest checkpoint was begun."""

    def __init__(self, section: CheckpointSection) -> None:
        self.counts_steps = isinstance(section.every, int)
        self._every_s = math.inf if self.counts_steps else section.every
        self._every_steps = section.every if self.counts_steps else math.inf
        self.restart()

    def restart(self) -> None:
        self._began_s, self._steps = monotonic_s(), 0

    def count(self, steps: int) -> None:
        self._steps += steps

    def limit(self, steps: int) -> int:
        """Return `steps`, or the fewer of them after which it is over."""
        return int(min(steps, max(1, self._every_steps - self._steps)))

    @property
    def steps_are_over(self) -> bool:
        return self._steps >= self._every_steps

    def ends_within(self, seconds: float) -> bool:
        """Return whether the time is over then; at most half of it counts as such seconds."""
        ahead_s = min(seconds, self._every_s / 2)
        return monotonic_s() - self._began_s >= self._every_s - ahead_s


class CheckpointSchedule:
    """Saves one checkpoint at a time beside the training; `limit_s`: of calls and repetitions."""

    def __init__(
        self, checkpoints: Checkpoints, paths: RunPaths, event_log: EventLog, limit_s: float
    ) -> None:
        self._checkpoints, self._paths, self._event_log = checkpoints, paths, event_log
        self._limit_s = limit_s
        self._pending: Future[None] | None = None
        self._writing_s = 0.0  # of the last one
        self._epoch = 0
        self._notes: list[str] = []  # on the remote storage, for the user
        self._closing = Event()
        latest = checkpoints.latest
        self._saved_folder = latest.folder if latest else None
        self.interval = Interval(checkpoints.section)

    @property
    def is_due(self) -> bool:
        """Whether `checkpoint.every` is over, or is when a checkpoint begun now will be written.

        A time is not before the last one is written.
        """
        is_idle = self._pending is None or self._pending.done()
        ends = self.interval.ends_within(self._writing_s)
        return self.interval.steps_are_over or (is_idle and ends)

    @property
    def latest(self) -> Checkpoint | None:
        return self._checkpoints.latest

    @property
    def best(self) -> Checkpoint | None:
        """The first checkpoint on disk with the best metric."""
        return best_of(self._checkpoints.saved)

    def save(
        self,
        state: TrainingState,
        progress: RunProgress,
        score: float | None = None,
        candidates: Mapping[int, TrainingState] | None = None,
    ) -> None:
        """Begin to save the run as far as it has come, with states of a round in progress.

        Waits for the save before; raises StorageError if that one failed, DivergedError if its
        state was not finite. `state` must not change until the save is complete. Does nothing if
        the run has come no further: a complete checkpoint must not be written once more.
        """
        self.wait()
        self.interval.restart()
        if (point := progress.reached).folder == self._saved_folder:
            return
        self._saved_folder = point.folder
        self._epoch = epoch = point.epoch

        def write() -> None:
            began_s = monotonic_s()
            if (tensor := state.first_not_finite()) is not None:
                raise DivergedError(
                    f"after epoch {epoch}: {tensor} is not finite, so this state was not saved. "
                    "Lower learning_rate.initial or add a warm-up (learning_rate.warmup)."
                )
            # The records must never be behind the checkpoint: a resume truncates, not adds.
            self._paths.sync_records()
            self._checkpoints.save(point, state, progress.to_json(), score, candidates)
            self.publish()
            self._writing_s = monotonic_s() - began_s

        self._pending = start_thread(write)

    def publish(self) -> None:
        """Copy the run to remote storage, repeatedly until `close`. Raises StorageError."""
        refusal = None
        deadline_s, pause_s, attempts = monotonic_s() + self._limit_s, _FIRST_PAUSE_S, 1
        while True:
            try:
                self._paths.publish()
            except TakenOverError:
                raise
            except StorageError as error:
                if monotonic_s() + pause_s > deadline_s or self._closing.wait(pause_s):
                    raise
                refusal = f"the storage refused {attempts} copies before one succeeded: {error}"
                pause_s, attempts = min(2 * pause_s, _LONGEST_PAUSE_S), attempts + 1
            else:
                self._notes += [refusal] if refusal else []
                return

    def wait(self) -> None:
        """Wait for the last `save`. Raises what it raised, or StorageError after the limit."""
        if (pending := self._pending) is None:
            return
        # Once for repeated copies, and once for the last of them. A signal leaves it to `close`.
        is_done = wait([pending], 2 * self._limit_s).done
        self._pending = None
        if not is_done:
            raise StorageError(
                f"{self._paths.shown}: a checkpoint was not written within "
                f"{2 * self._limit_s:g} s (timeouts.no_progress_s: {self._limit_s:g}); does the "
                "storage answer?"
            )
        pending.result(timeout=0)
        notes, self._notes = self._notes, []
        for note in notes:
            self._event_log.log("storage", self._epoch, note)

    def close(self) -> None:
        """Let a `save` in progress finish, without repeating refused copies."""
        self._closing.set()
        if self._pending is not None:
            wait([self._pending], self._limit_s)
