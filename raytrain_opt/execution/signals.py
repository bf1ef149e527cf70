"""How a run ends early: SIGTERM, SIGHUP (a closed terminal), Ctrl-C, errors, code that hangs."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType

from raytrain_opt.clock import monotonic_s
from raytrain_opt.errors import DivergedError, RaytrainOptError, RecordError, TakenOverError
from raytrain_opt.user_code import LOADER_SIGNAL, Stalled, exits_as_errors

# 128 + the number of the signal, as in a shell.
EXIT_INTERRUPTED, EXIT_TERMINATED = 130, 143
_STOPPING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
# `timeout`, Slurm and terminals send a signal to a process and to its group, which holds it too.
_SAME_SIGNAL_S = 1.0
# For a loader process that hangs to say where, before this process only says that it waits.
_LOADER_S = 2.0
# A resume would repeat what diverged, and is refused without its records or beside another one.
_NOT_RESUMED = (DivergedError, TakenOverError, RecordError)


# A fork has signals of its own.
os.register_at_fork(after_in_child=partial(signal.set_wakeup_fd, -1))


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived: end as after Ctrl-C and finish the checkpoint that is being written."""


class StopRequest:
    """The first signal that asks for the end: raised where it arrives, unless it is deferred.

    `advice`: says what of the run is saved and how to resume it; None if there is nothing to say.
    `finished`: the result is written, so no signal interrupts the rest or changes exit code 0.
    `saves`: a node will be taken away, so a checkpoint is due.
    """

    def __init__(self) -> None:
        self.saves = False
        self.error: KeyboardInterrupt | None = None
        self.advice: Callable[[], str] | None = None
        self.finished = False
        self._limit_s: float | None = None
        self._progress_s = monotonic_s()
        self._is_stalled = False

    def make(self, error: KeyboardInterrupt) -> None:
        """Raise the error, at once or after the limit of `deferred`."""
        self.error = error
        if self._limit_s is None:
            raise error
        signal.setitimer(signal.ITIMER_REAL, self._limit_s)

    @contextmanager
    def deferred(self, limit_s: float) -> Iterator[None]:
        """Raise what arrives in the block, which looks at `error`, at its end or the limit.

        An error after the signal has the same cause: other processes may have got the signal, too.
        """
        self._limit_s = limit_s
        try:
            yield
        except Exception as error:
            if self.error is None:
                raise
            raise self.error from error
        finally:
            self._limit_s = None
            if self.error is not None:
                signal.setitimer(signal.ITIMER_REAL, 0)
        if self.error is not None:
            raise self.error

    @contextmanager
    def ended_within(self, limit_s: float) -> Iterator[None]:
        """End this process if the block has not ended `limit_s` seconds after a signal.

        For code in C++ that may wait: Python's handlers run in the main thread after it only.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        ended = threading.Event()
        watch = threading.Thread(target=self._end, args=(reader, ended, limit_s), daemon=True)
        watch.start()
        try:
            yield
        finally:
            ended.set()
            signal.set_wakeup_fd(previous)
            os.write(writer, b"\0")
            watch.join()
            os.close(reader)
            os.close(writer)

    def _end(self, reader: int, ended: threading.Event, limit_s: float) -> None:
        """Read numbers of signals from the pipe, 0 at the end of the block."""
        error = self.error
        while error is None:
            [number] = os.read(reader, 1)
            if not number:
                return
            if number in _STOPPING:
                error = _to_error(number)
        if not ended.wait(limit_s):
            print(f"Ray did not answer for {limit_s:g} s", file=sys.stderr, flush=True)
            with suppress(RaytrainOptError):
                print(self.describe(error), file=sys.stderr, flush=True)
            os._exit(0 if self.finished else exit_code(error))

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Let the error leave the block as it was made, where Ray raises one of its own."""
        try:
            yield
        except KeyboardInterrupt as error:
            if self.error is not None and not isinstance(error, Stalled):
                raise self.error from None
            raise

    def describe(self, error: KeyboardInterrupt) -> str:
        """Return which signal ended the run, and what of it is saved."""
        cause = "terminated" if isinstance(error, Terminated) else "interrupted"
        return f"{cause}; {self.advice() if self.advice else 'no training had begun'}"

    def progress(self, more_s: float = 0.0) -> None:
        """Begin the limit of `limit_silence` anew; `more_s`: of a wait with a limit of its own."""
        self._progress_s = monotonic_s() + more_s

    @contextmanager
    def limit_silence(self, limit_s: float, stop_s: float) -> Iterator[None]:
        """Raise Stalled in the main thread after `limit_s` seconds without a call of `progress`.

        A loader process that is reading is interrupted first. Ends this process if neither has
        led out of the code that hangs within `stop_s` seconds. Another thread has no limit.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self.progress()
        ended = threading.Event()
        threading.Thread(target=self._watch, args=(ended, limit_s, stop_s), daemon=True).start()
        try:
            yield
        finally:
            ended.set()

    def _watch(self, ended: threading.Event, limit_s: float, stop_s: float) -> None:
        main = threading.main_thread().ident or 0
        while not ended.wait(min(1.0, limit_s / 4)):
            since_s = self._progress_s
            if monotonic_s() - since_s < limit_s:
                continue
            for process in multiprocessing.active_children():
                with suppress(ProcessLookupError, TypeError):
                    os.kill(process.pid, LOADER_SIGNAL)  # type: ignore[arg-type]
            if ended.wait(_LOADER_S) or self._progress_s > since_s:
                continue
            self._is_stalled = True
            signal.pthread_kill(main, signal.SIGALRM)
            if ended.wait(stop_s) or self._progress_s > since_s:
                continue
            error = Stalled(sys._current_frames()[main], since_s)
            advice = self.advice() if self.advice else ""
            print(f"error: {error}\n{advice}", file=sys.stderr, flush=True)
            os._exit(1)

    def raise_overdue(self, frame: FrameType | None) -> None:
        """Raise, when the time is over, what `deferred` or `limit_silence` limits."""
        if self.error is not None:
            raise self.error
        if self._is_stalled:
            self._is_stalled = False
            raise Stalled(frame, self._progress_s)


def _to_error(number: int) -> KeyboardInterrupt:
    return KeyboardInterrupt() if number == signal.SIGINT else Terminated()


def exit_code(error: KeyboardInterrupt) -> int:
    return EXIT_TERMINATED if isinstance(error, Terminated) else EXIT_INTERRUPTED


@contextmanager
def stop_on_signals(note: Callable[[str], None] = lambda _: None) -> Iterator[StopRequest]:
    """Raise Terminated at SIGTERM and SIGHUP, KeyboardInterrupt at Ctrl-C, in the main thread.

    What ends the block early says how to continue: an error in its message, a signal by `note`.
    """
    stop = StopRequest()
    try:
        with exits_as_errors(), _handlers(stop), stop.raised():
            yield stop
    except KeyboardInterrupt as error:
        note(stop.describe(error))
        raise
    except Exception as error:
        if stop.advice is not None and not isinstance(error, _NOT_RESUMED):
            if isinstance(error, RaytrainOptError):
                error.message += f"\n{stop.advice()}"
            else:
                error.add_note(stop.advice())
        raise


@contextmanager
def _handlers(stop: StopRequest) -> Iterator[None]:
    """Pass signals on to `stop`; the second one, more than a second later, ends the process."""
    if threading.current_thread() is not threading.main_thread():  # which gets no signals
        yield
        return
    first_s: list[float] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGALRM:
            stop.raise_overdue(frame)
        elif not first_s:
            first_s.append(monotonic_s())
            if not stop.finished:
                stop.make(_to_error(number))
        elif monotonic_s() - first_s[0] > _SAME_SIGNAL_S:
            os._exit(0 if stop.finished else exit_code(_to_error(number)))

    handlers = {number: signal.getsignal(number) for number in (*_STOPPING, signal.SIGALRM)}
    # A shell's background job ignores Ctrl-C, and `nohup` the end of its terminal.
    previous = {n: handler for n, handler in handlers.items() if handler is not signal.SIG_IGN}
    for number in previous:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
