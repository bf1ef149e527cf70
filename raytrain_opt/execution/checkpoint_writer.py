"""Write checkpoints during the training, in a thread."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from raytrain_opt.execution.progress import RunProgress
from raytrain_opt.paths import RunPaths
from raytrain_opt.recording.event_log import EventLog
from raytrain_opt.train.checkpoint import Checkpoint, Checkpoints
from raytrain_opt.train.state import TrainingState


class CheckpointWriter:
    """Saves one checkpoint at a time; the training continues meanwhile."""

    def __init__(self, checkpoints: Checkpoints, paths: RunPaths, event_log: EventLog) -> None:
        self._checkpoints, self._paths, self._event_log = checkpoints, paths, event_log
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    @property
    def latest(self) -> Checkpoint | None:
        """The last checkpoint on disk."""
        return self._checkpoints.latest

    def save(
        self,
        epoch: int,
        state: TrainingState,
        progress: RunProgress,
        *,
        rounds: int = 0,
        test_accuracy: float | None = None,
    ) -> None:
        """Begin to save the run after `epoch` full epochs and `rounds` rounds of the next one.

        Waits for the save before; raises StorageError if that one failed. `state` must not change
        until the save is complete.
        """
        self.wait()

        def write() -> None:
            with self._event_log.span("checkpoint"):
                # The records must never be behind the checkpoint: a resume truncates, not adds.
                self._paths.sync_records()
                self._checkpoints.save(
                    epoch, state, progress.to_json(), test_accuracy=test_accuracy, rounds=rounds
                )
                self._paths.publish()

        self._pending = self._thread.submit(write)

    def wait(self) -> None:
        """Wait until the last `save` is complete. Raises StorageError if it failed."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def close(self) -> None:
        """Let a `save` in progress finish, then end the thread."""
        self._thread.shutdown(wait=True)
