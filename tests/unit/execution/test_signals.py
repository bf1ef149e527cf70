"""How the driver reacts to SIGTERM."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from raytrain_opt.execution.signals import Terminated, stop_on_sigterm


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.01)


def test_the_first_signal_stops_and_later_ones_are_ignored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    cleaned_up = []

    def work() -> None:
        try:
            terminate()
        finally:
            terminate()
            cleaned_up.append(True)

    with pytest.raises(Terminated), stop_on_sigterm():
        work()
    assert cleaned_up
    assert signal.getsignal(signal.SIGTERM) == before


def test_it_is_handled_like_ctrl_c() -> None:
    """Code that cleans up after Ctrl-C also cleans up after SIGTERM."""
    with pytest.raises(KeyboardInterrupt), stop_on_sigterm():
        terminate()


def test_in_another_thread_nothing_changes() -> None:
    handlers = []

    def work() -> None:
        with stop_on_sigterm():
            handlers.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGTERM)]
