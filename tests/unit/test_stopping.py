"""SIGTERM in the driver."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from raytrain_opt.stopping import Terminated, stops_on_sigterm


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.01)


def test_the_first_signal_stops_and_more_do_not_disturb_the_end() -> None:
    before = signal.getsignal(signal.SIGTERM)
    cleaned_up = []

    def work() -> None:
        try:
            terminate()
        finally:
            terminate()
            cleaned_up.append(True)

    with pytest.raises(Terminated), stops_on_sigterm():
        work()
    assert cleaned_up
    assert signal.getsignal(signal.SIGTERM) == before


def test_it_is_a_kind_of_ctrl_c() -> None:
    """So what cleans up after that does so after this."""
    with pytest.raises(KeyboardInterrupt), stops_on_sigterm():
        terminate()


def test_in_another_thread_nothing_changes() -> None:
    handlers = []

    def work() -> None:
        with stops_on_sigterm():
            handlers.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGTERM)]
