"""The life of a resident process, worker or slot: join, obey commands, leave."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import ray

from raytrain_opt.clock import monotonic_s
from raytrain_opt.errors import RaytrainOptError
from raytrain_opt.pools.commands import (
    Close,
    Command,
    Failure,
    Member,
    Progress,
    StateLost,
    StateRef,
)
from raytrain_opt.pools.faults import Faults, Injection
from raytrain_opt.telemetry.usage import UsageMeter
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.state import HostState

_PROGRESS_EVERY_S = 1.0

# A worker whose peer died fails in its next collective, with an error that nothing tells from
# one of the user's. Ray Train ends the whole group as soon as it knows; who lives on was not hit.
# Of a process of this node it knows within seconds, of another node after half a minute.
_PEER_GRACE_S, _NODE_GRACE_S = 15.0, 60.0


# Called before each step with the steps done and their number; raises to stop.
OnStep = Callable[[int, int], None]


class Stopped(Exception):  # noqa: N818 - not an error: the driver asked to leave
    """The pool was closed while a command was running."""


class Handler(Protocol):
    """What a member does with a command."""

    def handle(self, command: Command, on_step: OnStep) -> Any:
        """Do it and return the reply. `on_step(done, total)` is called before each step."""
        ...


@dataclass
class Post:
    """A member's end of the mailbox."""

    mailbox: Any  # handle of the Mailbox actor
    member: Member
    leave_s: float
    faults: Faults = ()
    grace_s: float = 0.0
    meter: UsageMeter = field(default_factory=UsageMeter.of_this_process)

    def serve(self, handler: Handler) -> None:
        """Obey until told to close; a member that has not left `leave_s` later (a hung
        collective, one long step) ends its process.
        """
        left = threading.Event()
        try:
            self._serve(handler, self._watch_for_close(left))
        finally:
            left.set()

    def _serve(self, handler: Handler, closed: threading.Event) -> None:
        pool, index = self.member.pool, self.member.index
        ray.get(self.mailbox.join.remote(self.member))
        injection = Injection.of(self.faults, pool, index, self._is_first)
        done = 0
        while True:
            done, command = ray.get(self.mailbox.next_command.remote(pool, done))
            if isinstance(command, Close):
                return
            self.meter.begin()
            try:
                on_step = injection.watch(command, self._progress_reporter(closed))
                value = handler.handle(command, on_step)
            except Stopped:
                return
            except ray.exceptions.ObjectLostError as error:
                value = StateLost(str(error))
            except Exception as error:  # noqa: BLE001
                # A reply, not a restart: doing the same again would fail again.
                if closed.is_set():  # the others left first, and a collective broke
                    return
                if isinstance(error, RuntimeError):
                    closed.wait(self.grace_s)
                value = failure(error)
            usage = self.meter.end(getattr(value, "parts_s", {}))
            self.mailbox.reply.remote(pool, index, done, value, usage)

    def _is_first(self, fault: int) -> bool:
        return cast(bool, ray.get(self.mailbox.is_first.remote(f"fault {fault}")))

    def _progress_reporter(self, closed: threading.Event) -> OnStep:
        next_report_s = 0.0

        def on_step(done: int, total: int) -> None:
            nonlocal next_report_s
            if closed.is_set():
                raise Stopped
            now_s = monotonic_s()
            if now_s >= next_report_s or done == 1:
                next_report_s = now_s + _PROGRESS_EVERY_S
                self.mailbox.report_progress.remote(
                    self.member.pool, self.member.index, Progress(done, total)
                )

        return on_step

    def _watch_for_close(self, left: threading.Event) -> threading.Event:
        closed = threading.Event()

        def watch() -> None:
            # When the mailbox ended, so did the run: leave as well.
            with suppress(ray.exceptions.RayError):
                ray.get(self.mailbox.closed.remote(self.member.pool))
            closed.set()
            if not left.wait(self.leave_s):
                os._exit(1)

        threading.Thread(target=watch, daemon=True, name="watch-for-close").start()
        return closed


def grace_s(world_size: int, local_world_size: int) -> float:
    """How long a worker waits with an error that a peer's death may have caused."""
    if world_size == 1:
        return 0.0
    return _PEER_GRACE_S if world_size == local_world_size else _NODE_GRACE_S


def fetch(state: StateRef) -> HostState:
    """The state's arrays, shared with the other processes of this node: read only."""
    return cast(HostState, ray.get(state.ref))


def hand_over(learner: Learner, state_id: str) -> StateRef:
    """Put the learner's present state into the object store."""
    return StateRef(state_id, ray.put(learner.state(copy=False)))


def failure(error: Exception) -> Failure:
    """What went wrong, in a form that any process can read."""
    text = "".join(traceback.format_exception(error))
    if isinstance(error, RaytrainOptError):
        return Failure(error, text)
    return Failure(RuntimeError(f"{type(error).__name__}: {error}"), text)


def describe_self(pool: str, index: int, parts_s: dict[str, float]) -> Member:
    """This process, for error messages."""
    context = ray.get_runtime_context()
    log = f"worker-{context.get_worker_id()}-*-{os.getpid()}.err in Ray's session logs"
    return Member(pool, index, context.get_node_id(), os.getpid(), log, parts_s)
