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


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Raise Terminated at SIGTERM and KeyboardInterrupt at Ctrl-C, in the main thread.

    A signal more than a second after the first one ends the process at once, whatever it waits
    for. Python delivers signals to the main thread only: in another thread this changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    first_s: list[float] = []

    def handle(number: int, _: object) -> None:
        if not first_s:
            first_s.append(monotonic_s())
            raise Terminated if number == signal.SIGTERM else KeyboardInterrupt
        if monotonic_s() - first_s[0] > _SAME_SIGNAL_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    if previous[signal.SIGINT] is signal.SIG_IGN:  # a shell's background job: Ctrl-C is not for it
        del previous[signal.SIGINT]
    for number in previous:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
