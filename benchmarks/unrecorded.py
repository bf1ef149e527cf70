"""A recorder and a checkpoint writer that write nothing, for trainings without a run directory."""

from __future__ import annotations

from typing import Any

from raytrain_opt.execution.checkpoint_writer import CheckpointWriter
from raytrain_opt.recording.recorder import Recorder


class NullRecorder(Recorder):
    """Takes the records of a training and writes none."""

    def __init__(self) -> None:
        """Open no file."""

    def round(self, *_: Any, **__: Any) -> None:
        """Write nothing."""

    def epoch(self, *_: Any, **__: Any) -> None:
        """Write nothing."""

    def timeline(self, *_: Any, **__: Any) -> None:
        """Write nothing."""

    def event(self, *_: Any, **__: Any) -> None:
        """Write nothing."""

    def schedule(self, *_: Any, **__: Any) -> None:
        """Write nothing."""


class NullCheckpoints(CheckpointWriter):
    """Saves nothing: these trainings are never resumed."""

    def __init__(self) -> None:
        """Start no thread."""

    @property
    def latest(self) -> None:
        """No checkpoint."""

    def save(self, *_: Any, **__: Any) -> None:
        """Save nothing."""

    def wait(self) -> None:
        """Wait for nothing."""
