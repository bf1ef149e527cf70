"""A recorder that writes nothing."""

from __future__ import annotations

from typing import Any

from raytrain_opt.recording.recorder import Recorder


class NullRecorder(Recorder):
    """Takes every record and writes none: for trainings without a run directory."""

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

    def result(self, *_: Any, **__: Any) -> None:
        """Write nothing."""

    def timeline_end_s(self) -> float:
        """Return 0: the timeline is empty."""
        return 0.0

    def truncate_after(self, *_: Any, **__: Any) -> None:
        """Remove nothing."""

    def close(self) -> None:
        """Close nothing."""
