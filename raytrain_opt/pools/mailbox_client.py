"""Calls to the mailbox actor: what residents ask it, and answers with a limit for the driver."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, cast

import ray
from ray import cloudpickle

from raytrain_opt.clock import monotonic_s
from raytrain_opt.cluster.connection import raise_if_ray_ended
from raytrain_opt.errors import PoolError
from raytrain_opt.pools.commands import (
    Command,
    CommandTime,
    Failure,
    Instruction,
    Progress,
    Reply,
    Report,
    Resident,
    StateLost,
    StateRef,
    state_in,
)
from raytrain_opt.pools.node_socket import connect, unpack
from raytrain_opt.pools.relay import Upstream

_MAILBOX = "the mailbox, the process through which driver, workers and slots talk,"
# What the mailbox answers at once takes milliseconds; minutes on a node that swaps.
_ANSWER_S = 300.0
_LOOK_S = 1.0  # whether Ray itself is alive


def answer(ref: Any, name: str = _MAILBOX, limit_s: float = _ANSWER_S) -> Any:
    """Wait for an answer of an actor, or several. Raises PoolError when it has died or is hung."""
    deadline_s = monotonic_s() + limit_s
    while True:
        try:
            return ray.get(ref, timeout=min(_LOOK_S, limit_s))
        except ray.exceptions.GetTimeoutError as error:
            raise_if_ray_ended()
            if monotonic_s() < deadline_s:
                continue
            raise PoolError(
                f"{name} did not answer within {limit_s:g} s (its node is overloaded or hung?)"
            ) from error
        except ray.exceptions.RayActorError as error:
            raise_if_ray_ended()
            text = f"{name} has died (killed, or its node went down?): {error}"
            raise PoolError(text) from error


class ResidentMailbox:
    """A resident's view, through a relay or not. Raises RayError when the mailbox has died."""

    def __init__(self, actor: Any, upstream: Upstream, resident: Resident) -> None:
        self._actor, self._upstream, self._resident = actor, upstream, resident
        self._connection: Connection | None = None

    def join(self) -> tuple[int, int, Command]:
        """Register as ready; wait for a command and return it with its number.

        Comes first: the number of the command that was the current one before.
        """
        current, is_over = ray.get(self._actor.join.remote(self._resident))
        # A relay that was called once listens.
        return current, *self._exchange(current if is_over else 0, None)

    def reply(self, number: int, value: Any, time: CommandTime) -> tuple[int, Command]:
        """Send the reply to a command; wait for the next one and return it with its number."""
        failed = isinstance(value, Failure | StateLost)
        if state_in(value) is None:
            value = cloudpickle.dumps(value)  # type: ignore[no-untyped-call]
        reply = Reply(self._resident.sender, number, value, failed, time)
        if isinstance(value, bytes) and (answer := self._exchange_on_node(number, reply)):
            return answer
        return self._exchange(number, reply)

    def hand_over(self, number: int, make_part: Callable[[], object]) -> None:
        """Send a reply for a part of a command, if there is one; the driver waits for no other.

        Ray Train, which is about to end this process, waits for it (`launch_workers`).
        """
        sender = self._resident.sender
        answer(self._actor.begin_hand_over.remote(sender, number))
        if part := make_part():
            reply = Reply(sender, number, part, failed=True)
            answer(self._upstream.actor.receive.remote([reply]))
        else:
            answer(self._actor.cancel_hand_over.remote(sender))

    def _exchange(self, after: int, reply: Reply | None) -> tuple[int, Command]:
        actor = self._upstream.actor
        next_command = ray.get(actor.exchange.remote(self._resident.pool, after, reply))
        return cast("tuple[int, Command]", next_command)

    def _exchange_on_node(self, after: int, reply: Reply) -> tuple[int, Command] | None:
        """Do the same over a socket; return None where no relay listens or has died meanwhile."""
        if not self._upstream.socket_name:
            return None
        try:
            self._connection = self._connection or connect(self._upstream.socket_name)
            self._connection.send_bytes(pickle.dumps((self._resident.pool, after, reply)))
            return unpack(self._connection.recv_bytes(), self._fetch_ref)
        except (OSError, EOFError):
            self._connection = None
            return None

    def _fetch_ref(self, state_id: str) -> Any:
        """Return a reference that Ray counts. Raises ObjectLostError after a newer command."""
        state = ray.get(self._upstream.actor.state.remote(self._resident.pool, state_id))
        if state is None:
            raise ray.exceptions.ObjectLostError(state_id, None, "")
        return cast(StateRef, state).ref

    def report(
        self, number: int, progress: Progress | None, can_stop_before: int | None = None
    ) -> Instruction:
        """Send the progress in a command; return what this resident has to do."""
        report = Report(self._resident.sender, number, progress, can_stop_before)
        return cast(Instruction, ray.get(self._upstream.actor.report.remote(report)))


def report_lost(actor: Any, pool: str, index: int) -> None:
    """Tell the mailbox of a death before the restarted process joins; return when it knows."""
    ray.get(actor.lose.remote(pool, index))
