"""What happens to a run, beside its numbers: who did what when, failures and recoveries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from raytrain_opt.clock import monotonic_s
from raytrain_opt.errors import CommitError, RaytrainOptError
from raytrain_opt.telemetry.records import Recorder
from raytrain_opt.telemetry.terminal import Terminal
from raytrain_opt.telemetry.timeline import Event, Span


class Log(Protocol):
    """A pool, which remembers what its members did and met."""

    def take_log(self) -> tuple[list[Span], list[Event]]:
        """Since the last call, on this process's clock."""
        ...


class Diary:
    """Of one execution that began at `began_s` (monotonic)."""

    def __init__(self, recorder: Recorder, terminal: Terminal, began_s: float) -> None:
        self._recorder, self._terminal = recorder, terminal
        # Of the records' clock. It is moved when an earlier execution is gone on with.
        self._zero_s = began_s
        self._spans: list[Span] = []

    def go_on(self, epoch: int, text: str) -> None:
        """The run was cut: its clock goes on where the timeline ends."""
        self._zero_s -= self._recorder.told_s()
        self.note("resumed", epoch, text)

    def note(self, what: str, epoch: int, text: str) -> None:
        """Tell the user, and write it down."""
        self._terminal.note(text)
        self._recorder.event(epoch, Event(what, text, monotonic_s()), self._zero_s)

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """The driver itself does it, in this block and perhaps in a thread."""
        began_s = monotonic_s()
        yield
        self._spans.append(Span("driver", what, began_s, monotonic_s() - began_s))

    def write(self, epoch: int, logs: Iterable[Log]) -> None:
        """All since the last epoch."""
        spans, self._spans = self._spans, []
        for log in logs:
            done, events = log.take_log()
            spans += done
            for event in events:
                self._recorder.event(epoch, event, self._zero_s)
        self._recorder.timeline(epoch, sorted(spans, key=lambda at: at.at_s), self._zero_s)

    def end(self, epoch: int, error: BaseException) -> None:
        """Why the run ends early."""
        what = "failed" if isinstance(error, Exception) else "interrupted"
        text = str(error) if isinstance(error, RaytrainOptError) else type(error).__name__
        try:
            self._recorder.event(epoch, Event(what, text, monotonic_s()), self._zero_s)
            self._recorder.paths.publish()
        except CommitError as second:
            error.add_note(f"that could not be written down: {second}")
