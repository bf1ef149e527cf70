"""Collect what happens in a run beside its numbers: timeline, failures and recoveries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from raytrain_opt.clock import monotonic_s, utc_now
from raytrain_opt.errors import RaytrainOptError, StorageError, printable
from raytrain_opt.recording.recorder import Recorder
from raytrain_opt.recording.spans import Event, EventRecord, Span, SpanRecord


class EventLog:
    """Timeline and events of one execution, in seconds of the run without its interruptions.

    `note` shows a line to the user.
    """

    def __init__(self, recorder: Recorder, note: Callable[[str], None], began_s: float) -> None:
        self._recorder, self._note = recorder, note
        self._run_start_s = began_s
        self._spans: list[Span] = []

    def resume_clock(self, epoch: int, text: str, partial_s: float) -> None:
        """Continue the clock of an interrupted run where its records end, and log the resume.

        `partial_s`: duration of the part of this epoch that is kept.
        """
        self._run_start_s -= self._recorder.end_s(partial_s)
        self.log("resumed", epoch, text)

    def elapsed_s(self) -> float:
        """Return the seconds of the run until now, of all its executions."""
        return monotonic_s() - self._run_start_s

    def log(self, kind: str, epoch: int, text: str) -> None:
        """Show an event to the user and record it."""
        self._note(text)
        self._record(epoch, Event(kind=kind, text=printable(text), time_s=monotonic_s()))

    @contextmanager
    def span(self, command: str) -> Iterator[None]:
        """Measure what the driver itself does in this block, perhaps in a thread."""
        start_s = monotonic_s()
        yield
        duration_s = monotonic_s() - start_s
        span = Span(process="driver", command=command, start_s=start_s, duration_s=duration_s)
        self._spans.append(span)

    def write(self, epoch: int, logs: Iterable[tuple[list[Span], list[Event]]]) -> None:
        """Record the spans and events of the pools, and what `span` measured, until now."""
        spans, self._spans = self._spans, []
        for new_spans, events in logs:
            spans += new_spans
            for event in events:
                self._record(epoch, event)
        spans.sort(key=lambda span: span.start_s)
        start_s = self._run_start_s
        self._recorder.timeline(
            [
                SpanRecord(**dict(span) | {"epoch": epoch, "start_s": span.start_s - start_s})
                for span in spans
            ]
        )

    def close_with(self, epoch: int, error: BaseException) -> None:
        """Record why the run ends early. `error` gets a note when that fails."""
        kind = "failed" if isinstance(error, Exception) else "interrupted"
        # The message of any other error may hold data of the user.
        text = (
            printable(str(error)) if isinstance(error, RaytrainOptError) else type(error).__name__
        )
        try:
            self._record(epoch, Event(kind=kind, text=text, time_s=monotonic_s()))
            self._recorder.paths.publish()
        except StorageError as storage_error:
            error.add_note(f"this could not be recorded: {storage_error}")

    def _record(self, epoch: int, event: Event) -> None:
        time_s = event.time_s - self._run_start_s
        update = {"epoch": epoch, "time_s": time_s, "utc": utc_now()}
        self._recorder.event(EventRecord(**dict(event) | update))
