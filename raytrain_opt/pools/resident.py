"""The life of a resident process: join, execute commands, leave. Free of torch."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray

from raytrain_opt.clock import monotonic_s
from raytrain_opt.errors import is_lost_connection
from raytrain_opt.pools.commands import (
    Close,
    Command,
    CommandTime,
    Instruction,
    OnStep,
    Progress,
    Regroup,
    Resident,
    StateLost,
    to_failure,
)
from raytrain_opt.pools.mailbox_client import ResidentMailbox
from raytrain_opt.pools.resident_config import ResidentConfig
from raytrain_opt.user_code import exits_as_errors

# Often enough for a progress bar and for the driver's limit of silence. A command that takes less
# costs one call only.
_PROGRESS_INTERVAL_S = 1.0
# While those who train together agree on the step before which they stop: they wait for it.
_AGREEMENT_INTERVAL_S = 0.1

# A worker whose peer died fails in its next collective, with an error that nothing distinguishes
# from a user's. Ray Train ends the whole group as soon as it knows: of a process on this node
# within seconds, of another node after half a minute. A worker that is still alive after this
# time reports the error as its own.
_PROCESS_FAILURE_GRACE_S, _NODE_FAILURE_GRACE_S = 15.0, 60.0


class PoolClosed(Exception):  # noqa: N818 - not an error: the driver asked to leave
    """The pool was closed while a command was running."""


class Handler(Protocol):
    """What a resident does with commands."""

    def handle(self, command: Command, on_step: OnStep) -> Any:
        """Execute the command and return the reply. Call `on_step(done, total)` before a step."""

    def steps_before_failure(self, command: Command) -> Callable[[], object] | None:
        """Return what makes a reply for the steps done before a peer died; None to repeat all."""

    def close(self) -> None:
        """Release what outlives a function call, such as loader processes."""


def serve(
    config: ResidentConfig,
    pool: str,
    index: int,
    make_handler: Callable[[], Handler],
    *,
    absent: tuple[int, ...] | None = None,
    peer_failure_grace_s: float = 0.0,
) -> None:
    """Build a handler and execute commands with it (see `CommandLoop`) until the pool closes."""
    with exits_as_errors():
        handler = make_handler()
    resident = describe_this_process(pool, index, absent)
    try:
        mailbox = ResidentMailbox(config.mailbox, config.upstream_of(index), resident)
        CommandLoop(mailbox, resident, config.leave_s, peer_failure_grace_s).run(handler)
    finally:
        handler.close()


@dataclass
class CommandLoop:
    """A resident's loop over commands."""

    mailbox: ResidentMailbox
    resident: Resident
    leave_s: float  # to leave when the pool is closed
    peer_failure_grace_s: float  # before an error is reported that a peer's death may have caused
    _closed: threading.Event = field(default_factory=threading.Event)
    _left: threading.Event = field(default_factory=threading.Event)
    _wake_reporter: threading.Event = field(default_factory=threading.Event)
    # The command that is executed, by number, and its progress.
    _work: tuple[int, Progress | None] | None = None
    # Where it can end early, once it shall, and where it does.
    _can_stop_before: int | None = None
    _stop_before: int | None = None
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _has_stepped: bool = False

    def run(self, handler: Handler) -> None:
        """Execute commands until the pool is closed.

        A resident that has not left `leave_s` later (a hung collective, one long step) ends its
        process.
        """
        threading.Thread(target=self._report, daemon=True, name="report-progress").start()
        try:
            self._run(handler)
        finally:
            self._left.set()
            self._wake_reporter.set()

    def _run(self, handler: Handler) -> None:
        first, number, command = self.mailbox.join()
        while not isinstance(command, Close):
            if isinstance(command, Regroup) and number != first:
                return
            with self._changed:
                self._work = number, None
                self._can_stop_before = self._stop_before = None
            start_s = monotonic_s()
            try:
                on_step = self._on_step(number)
                joined = isinstance(command, Regroup)
                with exits_as_errors():
                    reply = None if joined else handler.handle(command, on_step)
            except PoolClosed:
                return
            except ray.exceptions.ObjectLostError as error:
                reply = StateLost(str(error))
            except Exception as error:  # noqa: BLE001
                # A reply, not a restart: the same command would fail again.
                if self._closed.is_set():  # the others left first, and a collective broke
                    return
                if isinstance(error, RuntimeError):  # what collectives raise
                    lost_connection = is_lost_connection(error)
                    if lost_connection and (make := handler.steps_before_failure(command)):
                        self.mailbox.hand_over(number, make)
                    self._closed.wait(self.peer_failure_grace_s)
                    if lost_connection and not self._closed.is_set():
                        raise  # nobody died: let Ray start the process group anew
                reply = to_failure(error)
            time = CommandTime(monotonic_s() - start_s, getattr(reply, "timings_s", {}))
            self._work = None
            number, command = self.mailbox.reply(number, reply, time)

    def _on_step(self, number: int) -> OnStep:
        def on_step(done: int, total: int) -> bool:
            with self._changed:
                while self._is_agreeing and not self._closed.is_set():
                    self._changed.wait(_AGREEMENT_INTERVAL_S)
                if self._closed.is_set():
                    raise PoolClosed
                if self._stop_before is not None and done >= self._stop_before:
                    return True
                self._work = number, Progress(done, total)
            if done == 1 and not self._has_stepped:  # the first step is recorded when it is done
                self._has_stepped = True
                self._wake_reporter.set()
            return False

        return on_step

    def _report(self) -> None:
        """Report progress, also of a hung command, and learn that the pool is closed."""
        while not self._closed.is_set():
            interval_s = _AGREEMENT_INTERVAL_S if self._is_agreeing else _PROGRESS_INTERVAL_S
            self._wake_reporter.wait(interval_s)
            self._wake_reporter.clear()
            if self._left.is_set():
                return
            if (work := self._work) is not None:
                self._follow(self._exchange_report(*work), work[0])
        if not self._left.wait(self.leave_s):
            os._exit(1)

    def _exchange_report(self, number: int, progress: Progress | None) -> Instruction:
        try:
            return self.mailbox.report(number, progress, self._can_stop_before)
        except ray.exceptions.ActorUnavailableError:
            return Instruction(stopping=number if self._can_stop_before is not None else 0)
        except ray.exceptions.ActorDiedError:
            return Instruction(closed=True)  # the mailbox, and so the run: leave as well

    @property
    def _is_agreeing(self) -> bool:
        return self._can_stop_before is not None and self._stop_before is None

    def _follow(self, instruction: Instruction, number: int) -> None:
        """Leave, or settle the step before which the command ends, if it shall end early.

        This process can stop before the next step at the earliest. Others, which take part in the
        same collectives, may have begun that one: the latest of their steps counts.
        """
        with self._changed:
            if instruction.closed:
                self._closed.set()
            if instruction.stopping != number or self._work is None or self._work[0] != number:
                self._can_stop_before = None
            elif self._can_stop_before is None:
                progress = self._work[1]
                self._can_stop_before = 0 if progress is None else progress.done + 1
            else:
                self._stop_before = instruction.stop_before
            self._changed.notify()


def peer_failure_grace_s(world_size: int, local_world_size: int) -> float:
    """Return how long a worker withholds an error that a peer's death may have caused."""
    if world_size == 1:
        return 0.0
    on_one_node = world_size == local_world_size
    return _PROCESS_FAILURE_GRACE_S if on_one_node else _NODE_FAILURE_GRACE_S


def describe_this_process(
    pool: str, index: int, absent: tuple[int, ...] | None = None
) -> Resident:
    """Return the identity of this process, for records and messages."""
    context = ray.get_runtime_context()
    log = f"worker-{context.get_worker_id()}-*-{os.getpid()}.err in Ray's session logs"
    return Resident(pool, index, context.get_node_id(), os.getpid(), log, absent)
