"""SIGTERM, as clusters send it before they take a machine away, and as `ray job stop` does."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived: end as after Ctrl-C and finish the checkpoint that is being written."""


@contextmanager
def stop_on_sigterm() -> Iterator[None]:
    """Raise Terminated in the main thread at the first SIGTERM; ignore later ones.

    Python delivers signals to the main thread only: in another thread this changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, _raise_terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _raise_terminated(*_: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated
