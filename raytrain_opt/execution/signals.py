"""SIGTERM, as clusters send it before they take a machine away, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from raytrain_opt.clock import monotonic_s

# `timeout`, Slurm and terminals send a signal to a process and to its group, which holds it too.
_SAME_SIGNAL_S = 1.0


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived: end as after Ctrl-C and finish the checkpoint that is being written."""


class StopRequest:
    """The first signal that asks for the end: raised where it arrives, unless it is deferred."""

    def __init__(self) -> None:
        self.error: KeyboardInterrupt | None = None
        self._limit_s: float | None = None

    def make(self, error: KeyboardInterrupt) -> None:
        """Raise the error, at once or after the limit of `deferred`."""
        self.error = error
        if self._limit_s is None:
            raise error
        signal.setitimer(signal.ITIMER_REAL, self._limit_s)

    @contextmanager
    def deferred(self, limit_s: float) -> Iterator[None]:
        """Raise what arrives in the block, which looks at `error`, at its end or the limit."""
        self._limit_s = limit_s
        try:
            yield
        finally:
            self._limit_s = None
            if self.error is not None:
                signal.setitimer(signal.ITIMER_REAL, 0)
        if self.error is not None:
            raise self.error

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Let the error leave the block as it was made, where Ray raises one of its own."""
        try:
            yield
        except KeyboardInterrupt:
            if self.error is not None:
                raise self.error from None
            raise


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Raise Terminated at SIGTERM and KeyboardInterrupt at Ctrl-C, in the main thread.

    A signal more than a second after the first one ends the process at once, whatever it waits
    for. Python delivers signals to the main thread only: in another thread this changes nothing.
    """
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    first_s: list[float] = []

    def handle(number: int, _: object) -> None:
        if number == signal.SIGALRM and stop.error is not None:
            raise stop.error
        if not first_s:
            first_s.append(monotonic_s())
            stop.make(Terminated() if number == signal.SIGTERM else KeyboardInterrupt())
        elif monotonic_s() - first_s[0] > _SAME_SIGNAL_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)
    previous = {number: signal.getsignal(number) for number in numbers}
    if previous[signal.SIGINT] is signal.SIG_IGN:  # a shell's background job: Ctrl-C is not for it
        del previous[signal.SIGINT]
    for number in previous:
        signal.signal(number, handle)
    try:
        with stop.raised():
            yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
