"""The life of a resident process, with a mailbox that is a list of commands."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import ray

from raytrain_opt.errors import PoolError
from raytrain_opt.pools.commands import (
    Close,
    Command,
    Evaluate,
    Failure,
    Message,
    OnStep,
    Progress,
    Regroup,
    Resident,
    SendInitialState,
    StateLost,
    StateRef,
)
from raytrain_opt.pools.resident import CommandLoop

ROOT = Path(__file__).parents[3]
EVALUATE = Evaluate(StateRef("1", None))


@dataclass
class FakeMailbox:
    """Gives these commands, then asks to close."""

    commands: deque[Command]
    replies: list[Any] = field(default_factory=list)
    reports: list[Progress] = field(default_factory=list)
    sent: int = 0
    joined: int = 0
    number: int = 0
    current: int = 0  # number of the command before this one

    on_send: Callable[[], object] = lambda: None

    def join(self, residents: list[Resident], absent: object) -> tuple[int, int, Command]:
        self.joined += len(residents)
        return self.current, *self._next()

    def reply(self, number: int, replies: list[Message]) -> tuple[int, Command]:
        self._take(replies)
        assert {reply.number for reply in replies} == {self.number}
        return self._next()

    def send(self, messages: list[Message]) -> None:
        reports = [message for message in messages if isinstance(message.value, Progress)]
        self.reports += [message.value for message in reports]
        self.sent += 1
        self._take([message for message in messages if message not in reports])
        self.on_send()

    def _take(self, replies: list[Message]) -> None:
        self.replies += [pickle.loads(reply.value) for reply in replies]

    def _next(self) -> tuple[int, Command]:
        self.number += 1
        return self.number, self.commands.popleft() if self.commands else Close()


class Dead(FakeMailbox):
    """A mailbox whose process dies while a command is executed."""

    def send(self, messages: list[Any]) -> None:
        raise ray.exceptions.ActorDiedError


class Unavailable(FakeMailbox):
    """A mailbox that cannot be reached for a while, and not even Ray's retries help."""

    def send(self, messages: list[Any]) -> None:
        super().send(messages)
        raise ray.exceptions.ActorUnavailableError("cut", None)


@pytest.fixture(autouse=True)
def short_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raytrain_opt.pools.resident._PROGRESS_INTERVAL_S", 0.01)


class Echo:
    """Replies with the command's name, after what `act` does."""

    def __init__(self, act: Callable[[Command, OnStep], Any] = lambda _c, _s: None) -> None:
        self.act = act

    def handle(self, command: Command, on_step: OnStep) -> Any:
        self.act(command, on_step)
        return command.name

    def close(self) -> None: ...


def run(echo: Echo, *commands: Command, mailbox: FakeMailbox | None = None) -> FakeMailbox:
    mailbox = mailbox or FakeMailbox(deque(commands))
    resident = Resident("worker", 0, "node", 1, "log")
    CommandLoop(mailbox, resident).run(echo)  # type: ignore[arg-type]
    return mailbox


def test_a_resident_joins_replies_to_each_command_and_leaves() -> None:
    mailbox = run(Echo(), SendInitialState(), EVALUATE)
    assert mailbox.joined == 1
    assert mailbox.replies == ["send_initial_state", "evaluate"]


def test_a_worker_leaves_to_join_anew_and_who_joins_for_that_confirms_it() -> None:
    assert run(Echo(), SendInitialState(), Regroup(), EVALUATE).replies == ["send_initial_state"]
    joins_during_it = FakeMailbox(deque([Regroup(), EVALUATE]), current=1)
    assert run(Echo(), mailbox=joins_during_it).replies == [None, "evaluate"]
    joins_before_it = FakeMailbox(deque([Regroup(), EVALUATE]))
    assert run(Echo(), mailbox=joins_before_it).replies == []


def test_progress_is_reported_while_a_command_lasts_also_of_one_that_hangs() -> None:
    """What is reported last is how far it came."""
    mailbox = FakeMailbox(deque([EVALUATE]))

    def act(_: Command, on_step: OnStep) -> None:
        while not mailbox.sent:
            time.sleep(0.001)
        for done in range(4):
            on_step(done, 5)
        while Progress(3, 5) not in mailbox.reports:
            time.sleep(0.001)

    run(Echo(act), mailbox=mailbox)


def test_a_short_command_costs_no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raytrain_opt.pools.resident._PROGRESS_INTERVAL_S", 60.0)
    assert run(Echo(lambda _, on_step: on_step(1, 5)), *[EVALUATE] * 3).sent == 0


@pytest.mark.parametrize(
    ("error", "kind"), [(ValueError("planted"), RuntimeError), (PoolError("x"), PoolError)]
)
def test_an_exception_is_a_reply_and_the_resident_continues(
    error: Exception, kind: type[Exception]
) -> None:
    def act(command: Command, _: OnStep) -> None:
        if command is EVALUATE:
            raise error

    failure, after = run(Echo(act), EVALUATE, SendInitialState()).replies
    assert isinstance(failure, Failure)
    assert type(failure.error) is kind
    assert "act" in failure.traceback
    assert after == "send_initial_state"


def test_a_lost_state_is_a_reply() -> None:
    def act(*_: object) -> None:
        raise ray.exceptions.ObjectLostError("id", b"", "")

    [reply] = run(Echo(act), EVALUATE).replies
    assert isinstance(reply, StateLost)


def test_a_resident_whose_mailbox_has_died_ends_its_process_in_the_middle_of_a_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    codes: list[int] = []
    monkeypatch.setattr("os._exit", codes.append)

    def act(_: Command, on_step: OnStep) -> None:
        while not codes:
            on_step(0, 1)
            time.sleep(0.001)

    run(Echo(act), mailbox=Dead(deque([EVALUATE])))
    assert set(codes) == {1}


def test_a_mailbox_that_cannot_be_reached_has_not_died() -> None:
    mailbox = Unavailable(deque([EVALUATE]))

    def act(_: Command, on_step: OnStep) -> None:
        while mailbox.sent < 2:
            time.sleep(0.001)
        on_step(0, 1)

    assert run(Echo(act), mailbox=mailbox).replies == ["evaluate"]


def test_a_lost_connection_between_workers_ends_the_process_not_the_run() -> None:
    """Ray then starts the group anew, and the command is repeated; other errors are replies."""
    text = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:545] Read error [127.0.0.1]:1"

    def act(_c: Command, _s: OnStep) -> None:
        raise RuntimeError(text)

    mailbox = FakeMailbox(deque([EVALUATE]))
    with pytest.raises(RuntimeError, match="Read error"):
        run(Echo(act), mailbox=mailbox)
    assert mailbox.replies == []
    text = "shapes cannot be multiplied"
    [failure] = run(Echo(act), EVALUATE).replies
    assert "shapes cannot be multiplied" in str(failure.error)


def test_a_resident_without_a_network_needs_no_torch() -> None:
    modules = ("resident", "programs", "train_and_tune")
    imports = ", ".join(f"raytrain_opt.pools.{module}" for module in modules)
    code = f"import sys, {imports}, tests.support.echo; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0


class ThreadGroup:
    """A group whose ranks are threads; implements `resident.Group`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.all_reduce = threading.Barrier(size, timeout=20)
        self.values: list[Any] = [None] * size
        self.shared: list[Sequence[int]] = [(0,)] * size

    def member(self, rank: int) -> GroupMember:
        return GroupMember(self, rank, self.size)


@dataclass
class GroupMember:
    group: ThreadGroup
    rank: int
    size: int
    peer_failure_grace_s: float = 0.0

    def broadcast(self, value: Any) -> Any:
        return self._exchange(value)[0]

    def gather(self, value: Any) -> list[Any]:
        values = self._exchange(value)
        return [] if self.rank else values

    def all(self, flag: bool) -> bool:
        return all(self._exchange(flag))

    def share(self, values: Sequence[int]) -> list[Sequence[int]]:
        self.group.shared[self.rank] = values
        return [] if self.rank else self.group.shared

    def _exchange(self, value: Any) -> list[Any]:
        self.group.values[self.rank] = value
        self.group.all_reduce.wait()
        values = list(self.group.values)
        self.group.all_reduce.wait()
        return values


def live(group: ThreadGroup, make_echo: Callable[[int], Echo], mailboxes: list[Any]) -> None:
    """Let each rank, a thread, execute commands until the pool is closed."""

    def run_rank(rank: int) -> None:
        resident = Resident("worker", rank, "node", rank, "log")
        member = group.member(rank)
        loop = CommandLoop(mailboxes[rank], resident, member)
        loop.run(make_echo(rank))

    with ThreadPoolExecutor(group.size) as pool:
        for rank in pool.map(run_rank, range(group.size)):
            assert rank is None


def test_the_first_rank_takes_commands_and_sends_the_replies_of_all() -> None:
    mailbox, others = FakeMailbox(deque([SendInitialState(), EVALUATE])), FakeMailbox(deque())
    live(ThreadGroup(3), lambda _: Echo(), [mailbox, others, others])
    assert mailbox.joined == 3
    assert mailbox.replies == ["send_initial_state"] * 3 + ["evaluate"] * 3
    assert (others.joined, others.replies, others.reports) == (0, [], [])


def test_the_progress_of_all_ranks_is_known_while_they_work() -> None:
    """Also in an evaluation, where one may be far behind."""
    mailbox, others = FakeMailbox(deque([EVALUATE])), FakeMailbox(deque())

    def make_echo(rank: int) -> Echo:
        def act(_: Command, on_step: OnStep) -> None:
            on_step(rank, 9)
            while not {Progress(0, 9), Progress(1, 9)} <= set(mailbox.reports):
                time.sleep(0.001)

        return Echo(act)

    live(ThreadGroup(2), make_echo, [mailbox, others])
    assert others.reports == []


def test_a_rank_whose_exception_the_others_do_not_have_reports_it_itself() -> None:
    """They wait for it in a collective."""
    group, mailbox, others = ThreadGroup(2), FakeMailbox(deque([EVALUATE])), FakeMailbox(deque())
    reported = threading.Event()
    others.on_send = reported.set

    def make_echo(rank: int) -> Echo:
        def act(*_: object) -> None:
            if rank:
                raise ValueError("planted")
            assert reported.wait(20)

        return Echo(act)

    live(group, make_echo, [mailbox, others])
    [failure] = others.replies
    assert "planted" in str(failure.error)
