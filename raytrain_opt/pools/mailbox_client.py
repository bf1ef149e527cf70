"""Calls to the mailbox actor: what residents ask it, and answers with a limit for the driver."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import ray

from raytrain_opt.clock import monotonic_s
from raytrain_opt.cluster.connection import raise_if_ray_ended
from raytrain_opt.errors import PoolError
from raytrain_opt.pools.commands import Command, Instruction, Reply, Report, Resident, Sender

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
    """The view of a resident, or of the first of a group. Raises RayError when it has died."""

    def __init__(self, actor: Any, pool: str) -> None:
        self._actor, self._pool = actor, pool

    def join(self, residents: list[Resident], absent: Sequence[int]) -> tuple[int, int, Command]:
        """Register residents as ready; wait for a command and return it with its number.

        Comes first: the number of the command that was the current one before.
        """
        current, is_over = ray.get(self._actor.join.remote(residents, absent))
        return current, *self.reply(current if is_over else 0, [])

    def reply(self, number: int, replies: list[Reply]) -> tuple[int, Command]:
        """Send the replies to a command; wait for the next one and return it with its number."""
        next_command = ray.get(self._actor.exchange.remote(self._pool, number, replies))
        return cast("tuple[int, Command]", next_command)

    def send(self, messages: Sequence[Reply | Report]) -> Instruction:
        """Send messages during a command; return what the residents have to do."""
        return cast(Instruction, ray.get(self._actor.receive.remote(messages)))

    def hand_over(self, sender: Sender, number: int, make_part: Callable[[], object]) -> None:
        """Send a reply for a part of a command, if there is one; the driver waits for no other.

        Ray Train, which is about to end this process, waits for it (`launch_workers`).
        """
        answer(self._actor.begin_hand_over.remote(sender, number))
        if part := make_part():
            answer(self._actor.receive.remote([Reply(sender, number, part, failed=True)]))
        else:
            answer(self._actor.cancel_hand_over.remote(sender))


def report_lost(actor: Any, pool: str, index: int) -> None:
    """Tell the mailbox of a death before the restarted process joins; return when it knows."""
    ray.get(actor.lose.remote(pool, index))
