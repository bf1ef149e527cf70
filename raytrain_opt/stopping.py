"""SIGTERM, as clusters send it before they take a machine away, and `ray job stop` does."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


class Terminated(KeyboardInterrupt):
    """SIGTERM came: end as after Ctrl-C, finishing the commit under way."""


@contextmanager
def stops_on_sigterm() -> Iterator[None]:
    """Inside, the first SIGTERM raises Terminated in the main thread, and more do nothing.

    Python gives signals to the main thread only: in another one, this changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _raise(*_: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated
