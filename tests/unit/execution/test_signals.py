"""How the driver reacts to SIGTERM and Ctrl-C."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from raytrain_opt.execution.signals import StopRequest, Terminated, stop_on_signals


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.01)


def test_the_first_signal_stops_and_the_same_one_again_changes_nothing() -> None:
    """`timeout` sends it to the process and to its group: what cleans up must not be cut off."""
    before = signal.getsignal(signal.SIGTERM)
    cleaned_up = []

    def work() -> None:
        try:
            terminate()
        finally:
            terminate()
            cleaned_up.append(True)

    with pytest.raises(Terminated), stop_on_signals():
        work()
    assert cleaned_up
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_deferred_signal_ends_the_block_where_it_looks() -> None:
    steps = []

    def work(stop: StopRequest) -> None:
        with stop.deferred(60.0):
            while stop.error is None:
                steps.append(1)
                terminate()
            steps.append(2)
        steps.append(3)

    with pytest.raises(Terminated), stop_on_signals() as stop:
        work(stop)
    assert steps == [1, 2]
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_an_error_after_a_deferred_signal_has_the_same_cause() -> None:
    """The other processes of the group have got the signal, too, and died of it."""

    def fail(before: Callable[[], None]) -> None:
        with stop_on_signals() as stop, stop.deferred(60.0):
            before()
            raise ValueError("planted")

    with pytest.raises(Terminated):
        fail(terminate)
    with pytest.raises(ValueError, match="planted"):
        fail(lambda: None)


def test_a_block_that_does_not_look_is_interrupted_after_the_limit() -> None:
    began_s = time.monotonic()

    def work(stop: StopRequest) -> None:
        with stop.deferred(0.05):
            terminate()
            time.sleep(60)

    with pytest.raises(Terminated), stop_on_signals() as stop:
        work(stop)
    assert time.monotonic() - began_s < 60


def test_an_interrupt_that_takes_the_place_of_its_error_does_not_hide_it() -> None:
    """Ray's calls raise a KeyboardInterrupt of their own when a handler raises in them."""

    def call_of_ray() -> None:
        try:
            terminate()
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None

    with pytest.raises(Terminated), stop_on_signals():
        call_of_ray()


HANGING = """
import signal, sys, time
from raytrain_opt.execution import signals
signal.signal(signal.SIGINT, signal.default_int_handler)  # these tests may be a background job
signals._SAME_SIGNAL_S = 0.0
with signals.stop_on_signals():
    try:
        print("ready", flush=True)
        time.sleep(60)
    except KeyboardInterrupt as stop:
        print(type(stop).__name__, flush=True)
        time.sleep(60)
"""


@pytest.mark.parametrize(
    ("first", "name"), [(signal.SIGTERM, "Terminated"), (signal.SIGINT, "KeyboardInterrupt")]
)
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_leaves_at_once(
    first: signal.Signals, name: str, second: signal.Signals
) -> None:
    command = [sys.executable, "-c", HANGING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(first)
        assert process.stdout.readline() == f"{name}\n"
        process.send_signal(second)
        assert process.wait(30) == (130 if second == signal.SIGINT else 143)


def test_ctrl_c_stays_ignored_where_it_was() -> None:
    """A shell's background job ignores it."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stop_on_signals():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("hangs", ["at the start", "at the end"])
def test_a_signal_ends_code_that_python_cannot_interrupt(
    hangs: str, number: signal.Signals, code: int
) -> None:
    text = f"""
import ctypes, signal, time
from raytrain_opt.execution.signals import stop_on_signals
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
def hang():
    mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    print("ready", flush=True)
    while True:
        libc.pthread_mutex_lock(mutex)
with stop_on_signals() as stop:
    stop.advice = lambda: "resume with: X"
    with stop.deferred(60), stop.ended_within(0.2):
        {hangs == "at the start"} and hang()
    try:
        signal.raise_signal({number:d})
    finally:
        with stop.ended_within(0.2):
            hang()
"""
    command = [sys.executable, "-c", text]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            if hangs == "at the start":
                process.send_signal(number)
            assert process.wait(30) == code
            assert process.stdout.read().endswith("resume with: X\n")
        finally:
            process.kill()


def test_a_block_that_ends_in_time_ends_as_before() -> None:
    def run() -> None:
        with stop_on_signals() as stop, stop.deferred(60), stop.ended_within(60):
            signal.raise_signal(signal.SIGALRM)
            signal.raise_signal(signal.SIGTERM)

    def end_a_fork() -> None:
        with stop_on_signals() as stop, stop.ended_within(0.1):
            context = multiprocessing.get_context("fork")
            began = context.Event()
            fork = context.Process(target=lambda: [began.set(), time.sleep(60)])
            fork.start()
            assert began.wait(10)
            fork.terminate()
            fork.join()
            time.sleep(0.5)  # nobody has sent this process a signal

    with pytest.raises(Terminated):
        run()
    end_a_fork()
    assert signal.set_wakeup_fd(-1) == -1


HANGS = {
    "sleep": "time.sleep(60)",
    "catches errors": "[caught() for _ in iter(int, 1)]",
    "wait": "threading.Event().wait()",
}


@pytest.mark.parametrize("code", HANGS.values(), ids=HANGS)
def test_code_that_hangs_is_ended_with_its_place(code: str) -> None:
    text = f"""
import threading, time
from raytrain_opt.execution.signals import stop_on_signals
from raytrain_opt.errors import UserCodeError
def caught():
    try: time.sleep(0.1)
    except Exception: pass
def forward():
    {code}
try:
    with stop_on_signals() as stop, stop.limit_silence(0.5, 5.0):
        stop.advice = lambda: "resume with: X"
        forward()
except UserCodeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert "hangs: no progress for" in done.stdout, done.stderr
    assert done.stdout.endswith("more than timeouts.no_progress_s\nresume with: X\n")


def test_a_finished_run_is_not_interrupted() -> None:
    with stop_on_signals() as stop:
        stop.finished = True
        terminate()
    assert stop.error is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_what_a_signal_ends_says_how_to_continue(number: signal.Signals) -> None:
    notes: list[str] = []

    def work() -> None:
        with stop_on_signals(notes.append) as stop:
            stop.advice = lambda: "resume with: X"
            os.kill(os.getpid(), number)
            time.sleep(1)

    before = signal.signal(number, signal.SIG_DFL)  # a background job ignores some
    try:
        with pytest.raises(KeyboardInterrupt):
            work()
    finally:
        signal.signal(number, before)
    cause = "interrupted" if number == signal.SIGINT else "terminated"
    assert notes == [f"{cause}; resume with: X"]
