"""The life of a resident process: join, execute commands, leave. Free of torch.

Workers that form a process group have one voice: the first rank takes a command from the mailbox
and broadcasts it in the group, and gathers the replies of all ranks. Two things go other ways: the
progress of the ranks, which a hung collective must not stop, and an exception that other ranks may
not have.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import ray
from ray import cloudpickle

from raytrain_opt.errors import is_lost_connection
from raytrain_opt.pools.commands import (
    Close,
    Command,
    Failure,
    Message,
    OnStep,
    Progress,
    Regroup,
    Resident,
    StateLost,
    state_in,
    to_failure,
)
from raytrain_opt.pools.programs import ResidentConfig
from raytrain_opt.user_code import exits_as_errors

# Often enough for a progress bar and for the driver's limit of silence. A command that takes less
# costs one call only.
_PROGRESS_INTERVAL_S = 1.0

T = TypeVar("T")


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

    def reply(self, number: int, replies: list[Message]) -> tuple[int, Command]:
        """Send the replies to a command; wait for the next one and return it with its number."""
        next_command = ray.get(self._actor.exchange.remote(self._pool, number, replies))
        return cast("tuple[int, Command]", next_command)

    def send(self, messages: Sequence[Message]) -> None:
        ray.get(self._actor.receive.remote(messages))


class Handler(Protocol):
    """What a resident does with commands."""

    def handle(self, command: Command, on_step: OnStep) -> Any:
        """Execute the command and return the reply. Call `on_step(done, total)` before a step."""

    def close(self) -> None:
        """Release what outlives a function call, such as loader processes."""


class Group:
    """Residents that execute each command together; the first rank talks to the mailbox.

    This one is a resident alone, `process_group.CommandGroup` the workers of a process group.
    """

    rank, size = 0, 1
    peer_failure_grace_s = 0.0  # before an error that a peer's death may have caused counts

    def broadcast(self, value: T | None) -> T:
        """Return the value of the first rank."""
        return cast(T, value)

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, on the first rank; on the others nothing."""
        return [value]

    def all(self, flag: bool) -> bool:
        return flag

    def share(self, values: Sequence[int]) -> list[Sequence[int]]:
        """Let the first rank know values; return the latest of all ranks there, without waiting.

        Another thread may call this. The first call of all ranks precedes all other calls.
        """
        return [values]


def serve(
    config: ResidentConfig,
    pool: str,
    index: int,
    make_handler: Callable[[], Handler],
    group: Group | None = None,
    absent: Sequence[int] = (),
) -> None:
    """Build a handler and execute commands with it (see `CommandLoop`) until the pool closes."""
    with exits_as_errors():
        handler = make_handler()
    context, pid = ray.get_runtime_context(), os.getpid()
    log = f"worker-{context.get_worker_id()}-*-{pid}.err in Ray's session logs"
    loop = CommandLoop(
        ResidentMailbox(config.mailbox, pool),
        Resident(pool, index, context.get_node_id(), pid, log),
        group or Group(),
        absent,
    )
    try:
        loop.run(handler)
    finally:
        handler.close()


@dataclass
class CommandLoop:
    """A resident's loop over commands. In a group, the first rank takes them for all."""

    mailbox: ResidentMailbox
    resident: Resident
    group: Group = field(default_factory=Group)
    absent: Sequence[int] = ()  # ranks that the group does without
    _left: threading.Event = field(default_factory=threading.Event)
    _residents: list[Resident] = field(default_factory=list)  # those that this one speaks for
    # The command that is executed, by number, and its progress.
    _work: tuple[int, Progress | None] | None = None

    def run(self, handler: Handler) -> None:
        self.group.share((0,))
        threading.Thread(target=self._report, daemon=True, name="report-progress").start()
        try:
            self._run(handler)
        finally:
            self._left.set()

    def _run(self, handler: Handler) -> None:
        self._residents = self._gather(self.resident)
        join = partial(self.mailbox.join, self._residents, self.absent)
        first, number, command = self._from_first(join)
        while not isinstance(command, Close):
            if isinstance(command, Regroup) and number != first:
                return
            # Kept until the next command: the first rank needs it for a state that it refers to.
            reply = self._execute(handler, number, command)
            replies = self._gather(reply)
            number, command = self._from_first(partial(self.mailbox.reply, number, replies))

    def _gather(self, value: T) -> list[T]:
        with self._peer_failures_are_late():
            return self.group.gather(value)

    def _from_first(self, ask: Callable[[], T]) -> T:
        """Return what the first rank learns when it asks the mailbox."""
        answer = ask() if self.group.rank == 0 else None
        with self._peer_failures_are_late():
            return self.group.broadcast(answer)

    @contextmanager
    def _peer_failures_are_late(self) -> Iterator[None]:
        """Give Ray Train time to find the cause of a broken group: the death of another rank."""
        try:
            yield
        except RuntimeError:
            time.sleep(self.group.peer_failure_grace_s)
            raise

    def _execute(self, handler: Handler, number: int, command: Command) -> Message:
        self._work = number, None
        try:
            joined = isinstance(command, Regroup)
            with exits_as_errors():
                value = None if joined else handler.handle(command, self._on_step(number))
        except ray.exceptions.ObjectLostError as error:
            value = StateLost(str(error))
        except Exception as error:  # noqa: BLE001
            value = self._fail(error, number)
        self._work = None
        return self._reply(number, value)

    def _reply(self, number: int, value: Any) -> Message:
        failed = isinstance(value, Failure | StateLost)
        if state_in(value) is None:
            value = cloudpickle.dumps(value)  # type: ignore[no-untyped-call]
        return Message(self.resident, number, value, failed)

    def _fail(self, error: Exception, number: int) -> Failure:
        """Return an exception as a reply; raise it if a peer died.

        It is a reply, not a restart, because the same command would fail again. Other ranks of a
        group may wait for this one in a collective, so it calls the mailbox itself.
        """
        if isinstance(error, RuntimeError):  # what collectives raise
            time.sleep(self.group.peer_failure_grace_s)
            if is_lost_connection(error):
                raise error  # nobody died: let Ray start the process group anew
        failure = to_failure(error)
        if self.group.size > 1:
            self.mailbox.send([self._reply(number, failure)])
        return failure

    def _on_step(self, number: int) -> OnStep:
        def on_step(done: int, total: int) -> None:
            self._work = number, Progress(done, total)

        return on_step

    def _report(self) -> None:
        """Report progress, also of a hung command."""
        while not self._left.wait(_PROGRESS_INTERVAL_S):
            if (work := self._work) is not None:
                self._exchange_reports(*work)

    def _exchange_reports(self, number: int, progress: Progress | None) -> None:
        """Let the driver know the progress of all ranks. Ends the process if the run has ended."""
        values = (number,) if progress is None else (number, progress.done, progress.total)
        try:
            shared = self.group.share(values)
            if self.group.rank == 0:  # also without any step: to learn whether the mailbox lives
                reports = [
                    Message(resident, number, Progress(*steps))
                    for resident, (number, *steps) in zip(self._residents, shared, strict=True)
                    if steps
                ]
                self.mailbox.send(reports)
        except (RuntimeError, ray.exceptions.ActorUnavailableError):
            pass  # the mailbox cannot be reached now, or the first rank has died, as this one will
        except ray.exceptions.ActorDiedError:
            os._exit(1)
