"""The driver's end: start both pools, post commands, collect replies, keep states alive."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import ray

from raytrain_opt.clock import monotonic_s
from raytrain_opt.errors import MemberError, PoolError, RaytrainOptError
from raytrain_opt.pools.commands import (
    WORKER_POOL,
    Close,
    Command,
    Evaluate,
    Failure,
    MainTrain,
    Member,
    Missing,
    Pretrain,
    Progress,
    StateLost,
    StateRef,
    TakeState,
    state_in,
)
from raytrain_opt.pools.session import gone_nodes, placement_groups, remove_placement_groups
from raytrain_opt.telemetry.timeline import Event, Span
from raytrain_opt.train.state import HostState

_POLL_S = 0.5
# Seconds after which what the host started knows that it is gone.
_LAST_START_S = 2.0

_NODES_GONE = (
    "Nodes have left the cluster, and the others may have no room for all workers: "
    "workers.min_count lets a training go on with fewer"
)

# Called about twice a second while waiting; gets the progress of the pool at work.
OnWait = Callable[[str, Progress | None], None]


class Vault:
    """Views of the states in use, in the driver.

    An object dies with the process that put it into the store, but its memory stays as long
    as someone reads it: with a view, a lost state can be put there again.
    """

    def __init__(self) -> None:
        self._views: dict[str, HostState] = {}
        self._held_id = ""

    def take(self, state: StateRef) -> None:
        """Keep a state that has come back, until another one is held. Raises Ray's ObjectLostError
        when it is gone already, with its maker.
        """
        self._views[state.id] = self.view(state)

    def hold(self, state: StateRef) -> None:
        """Keep this state and the one that was held before it; forget all others."""
        if state.id == self._held_id:
            return
        self.take(state)
        kept = (self._held_id, state.id)
        self._views = {name: view for name, view in self._views.items() if name in kept}
        self._held_id = state.id

    def view(self, state: StateRef) -> HostState:
        """Read only, and shared with every process of this node."""
        if state.id in self._views:
            return self._views[state.id]
        return cast(HostState, ray.get(state.ref))

    def put(self, state_id: str, state: HostState) -> StateRef:
        """A state that the driver made, into the store; held from now on."""
        self._views[state_id] = state
        made = StateRef(state_id, ray.put(state))
        self.hold(made)
        return made

    def renewed(self, command: Command) -> Command:
        """The same command with its state put into the store again, owned by the driver."""
        match command:
            case Pretrain() | MainTrain() | Evaluate():
                return replace(command, state=self._renew(command.state))
            case TakeState():
                renewed = replace(command.round, state=self._renew(command.round.state))
                return replace(command, round=renewed)
        return command

    def _renew(self, state: StateRef) -> StateRef:
        return replace(state, ref=ray.put(self.view(state)))


@dataclass
class Pool:
    """One resident pool. `run` starts it and returns a reference to its end."""

    name: str
    size: int
    run: Callable[[], Any]
    mailbox: Any  # handle of the Mailbox actor
    vault: Vault
    limit_s: float
    can_lose_members: bool = False
    on_wait: OnWait = lambda _pool, _progress: None
    _ended: Any = None
    _ready: bool = False

    def start(self) -> None:
        """Begin starting the members; returns at once. Once is enough: more do nothing."""
        if self._ended is None:
            self._ended = self.run()

    def wait_until_ready(self, limit_s: float) -> list[Member]:
        """All members, when they have joined. Raises PoolError saying who is missing."""
        ref = self.mailbox.members.remote(self.name, self.size)
        began_s = monotonic_s()
        if not self._wait(ref, lambda: monotonic_s() - began_s > limit_s):
            joined = {member.index for member in self._ask("joined")}
            missing = self._names(sorted(set(range(self.size)) - joined))
            waited_s = monotonic_s() - began_s
            raise PoolError(
                f"{missing} did not start within {waited_s:.0f} s (limits.start_s: {limit_s:g})"
            )
        self._ready = True
        return cast("list[Member]", _answer(ref))

    def alive(self) -> tuple[int, ...]:
        """The members that are there or will be again."""
        lost = set(self._ask("lost"))
        return tuple(index for index in range(self.size) if index not in lost)

    def command(self, command: Command, expected: Sequence[int] | None = None) -> dict[int, Any]:
        """Post it, and return the replies of the expected members (default: all), without those
        that are lost.

        Raises MemberError when one of them raised, PoolError when the pool ended or nothing was
        heard from it for too long.
        """
        members = range(self.size) if expected is None else expected
        for _ in range(self.size + 2):
            replies = self._post_and_collect(command, members)
            for index, reply in replies.items():
                if isinstance(reply, Failure):
                    raise self._member_error(index, reply)
            if self._arrived(replies):
                return {index: replies[index] for index in members if index in replies}
            command = self.vault.renewed(command)
        raise PoolError(f"{self.name} pool: the state of {type(command).__name__} is lost")

    def _post_and_collect(self, command: Command, expected: Sequence[int]) -> dict[int, Any]:
        number = self._ask("post", command)
        ref = self.mailbox.collect.remote(self.name, number, expected)
        while not self._wait(ref, lambda: self._ask("silence_s") > self.limit_s):
            late: list[Missing] = self._ask("missing", expected)
            if not self.can_lose_members or len(late) == len(self.alive()):
                raise PoolError(self._silence(command, late))
            for each in late:  # the others go on without
                self._ask("lose", each.index)
        return cast("dict[int, Any]", _answer(ref))

    def _arrived(self, replies: Mapping[int, Any]) -> bool:
        """Whether all that was asked for is here: a state can be lost on its way to a member, or
        from the one that made it to the driver.
        """
        if any(isinstance(reply, StateLost) for reply in replies.values()):
            return False
        try:
            for state in filter(None, map(state_in, replies.values())):
                self.vault.take(state)
        except ray.exceptions.ObjectLostError:
            return False
        return True

    def _wait(self, ref: Any, is_overdue: Callable[[], bool]) -> bool:
        """Until there is an answer (True), or it has lasted too long (False)."""
        while not ray.wait([ref], timeout=_POLL_S)[0]:
            self.raise_if_ended()
            if is_overdue():
                return False
            self.on_wait(self.name, self._ask("progress"))
        return True

    def _ask(self, what: str, *arguments: Any) -> Any:
        """One question to the mailbox about this pool."""
        return _answer(getattr(self.mailbox, what).remote(self.name, *arguments))

    def _silence(self, command: Command, late: Sequence[Missing]) -> str:
        said = "; ".join(map(self._told, late))
        nodes = gone_nodes()
        gone = any(m.node_id in nodes for m in self._ask("joined"))
        hint = ". " + _NODES_GONE if gone and self.name == WORKER_POOL else ""
        return (
            f"no progress of {type(command).__name__} for {self._ask('silence_s'):.0f} s "
            f"(limits.stall_s: {self.limit_s:g}). Without an answer, the one furthest behind "
            f"first: {said}{hint}"
        )

    def _told(self, missing: Missing) -> str:
        at = missing.progress
        where = "no step" if at is None else f"{at.done} of {at.total} steps"
        return f"{self._names([missing.index])}: {where}, silent for {missing.silent_s:.0f} s"

    def raise_if_ended(self) -> None:
        """Raises PoolError when the pool is no longer there."""
        if self._ended is None or not ray.wait([self._ended], timeout=0)[0]:
            return
        try:
            ray.get(self._ended)
            cause = None
        except Exception as error:  # noqa: BLE001 - whatever ended it is the cause we report
            cause = error
        why = f": {type(cause).__name__}: {cause}" if cause else ""
        raise PoolError(
            f"the {self.name} pool ended before the training did{why}. Processes of it may have "
            "been killed (out of memory?); Ray's session logs tell more; limits.max_restarts "
            "sets how often they are started again."
        ) from cause

    def _member_error(self, index: int, reply: Failure) -> Exception:
        who = f"{self.name} {index}"
        if isinstance(reply.error, RaytrainOptError):
            reply.error.add_note(f"raised in {who}:\n{reply.traceback}")
            return reply.error
        return MemberError(f"{who}: {reply.error}", who, reply.traceback)

    def _names(self, missing: list[int]) -> str:
        known = {m.index: m for m in self._ask("joined")}
        gone = gone_nodes()

        def name(index: int) -> str:
            member = known.get(index)
            if member is None:
                return f"{self.name} {index}"
            address = gone.get(member.node_id)
            node = f"; its node {address} is gone" if address else ""
            return f"{member.name} (pid {member.pid}, {member.log}{node})"

        return ", ".join(map(name, missing))

    def take_log(self) -> tuple[list[Span], list[Event]]:
        """What the members did and met since the last call, on this process's clock."""
        now_s, spans, events = self._ask("take_log")
        ahead_s = monotonic_s() - now_s
        return (
            [replace(span, at_s=span.at_s + ahead_s) for span in spans],
            [replace(event, at_s=event.at_s + ahead_s) for event in events],
        )

    def restarts(self) -> int:
        """How often a member was started again."""
        return cast(int, self._ask("restarts"))

    def tell_to_close(self) -> None:
        """Ask the members to leave; does not wait."""
        self.mailbox.post.remote(self.name, Close())

    @property
    def has_ended(self) -> bool:
        """Whether nothing of it is left, or it was never started."""
        return self._ended is None or bool(ray.wait([self._ended], timeout=0)[0])

    def wait_for_end(self, limit_s: float) -> None:
        """Until the pool has ended, but not longer than this, and only if it ever was ready."""
        if self._ready and self._ended is not None:
            ray.wait([self._ended], timeout=limit_s)


def _answer(ref: Any) -> Any:
    """Raises PoolError when the mailbox is gone."""
    try:
        return ray.get(ref)
    except ray.exceptions.RayActorError as error:
        raise PoolError(
            "the mailbox, the process through which driver, workers and slots talk, has died "
            f"(killed, or its node went down?): {error}"
        ) from error


@contextmanager
def running(*pools: Pool, host: Any, stop_s: float) -> Iterator[None]:
    """The pools live inside this block, once somebody starts them.

    Leaving it tells their members to leave and gives them `stop_s` for it; a pool that is
    still starting gets no time. Then the host is killed, and with it all that it ever
    started; Ray would keep the placement groups until the driver ends, so they are removed.
    """
    before = placement_groups()
    try:
        yield
    finally:
        for pool in pools:
            pool.tell_to_close()
        deadline_s = monotonic_s() + stop_s
        for pool in pools:
            pool.wait_for_end(max(0.0, deadline_s - monotonic_s()))
        have_ended = all(pool.has_ended for pool in pools)
        ray.kill(host)
        ray.kill(pools[0].mailbox)
        remove_placement_groups(placement_groups() - before)
        if not have_ended:  # Ray may have been starting members anew: a last one is on its way
            time.sleep(_LAST_START_S)
            remove_placement_groups(placement_groups() - before)
