"""The life of a resident process, with a mailbox that is a list of commands."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
import ray

from raytrain_opt.errors import PoolError, RaytrainOptError
from raytrain_opt.pools.commands import (
    Close,
    Command,
    Evaluate,
    Failure,
    Instruction,
    MainTrain,
    OnStep,
    Progress,
    Regroup,
    Reply,
    Report,
    Resident,
    SendInitialState,
    StateLost,
    StateRef,
    to_failure,
)
from raytrain_opt.pools.mailbox import Mailbox
from raytrain_opt.pools.resident import CommandLoop, peer_failure_grace_s
from raytrain_opt.results import Steps

T = TypeVar("T")

ROOT = Path(__file__).parents[3]
EVALUATE = Evaluate(StateRef("1", None))


@dataclass
class FakeMailbox:
    """Gives these commands, then asks to close."""

    commands: deque[Command]
    replies: list[Any] = field(default_factory=list)
    reports: list[Progress | None] = field(default_factory=list)
    joined: int = 0
    number: int = 0
    current: int = 0  # number of the command before this one

    def join(self) -> tuple[int, int, Command]:
        self.joined += 1
        return self.current, *self._next()

    def reply(self, number: int, value: Any, usage: Any) -> tuple[int, Command]:
        assert number == self.number
        self.replies.append(value)
        return self._next()

    def hand_over(self, number: int, make_part: Callable[[], object]) -> None:
        assert number == self.number
        if part := make_part():
            self.replies.append(part)

    def _next(self) -> tuple[int, Command]:
        self.number += 1
        return self.number, self.commands.popleft() if self.commands else Close()

    def report(
        self, number: int, progress: Progress | None, can_stop_before: int | None
    ) -> Instruction:
        assert number == self.number
        self.reports.append(progress)
        return Instruction()


class Closed(FakeMailbox):
    """A mailbox whose pool is closed while a command is executed."""

    def report(self, *_: object) -> Instruction:
        return Instruction(closed=True)


class Dead(FakeMailbox):
    """A mailbox whose process dies while a command is executed."""

    def report(self, *_: object) -> Instruction:
        raise ray.exceptions.ActorDiedError


class Unavailable(FakeMailbox):
    """A mailbox that cannot be reached for a while, and not even Ray's retries help."""

    def report(
        self, number: int, progress: Progress | None, can_stop_before: int | None
    ) -> Instruction:
        super().report(number, progress, can_stop_before)
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

    def steps_before_failure(self, command: Command) -> Callable[[], object] | None:
        return (lambda: f"part of {command.name}") if isinstance(command, MainTrain) else None

    def close(self) -> None: ...


def run(
    echo: Echo,
    *commands: Command,
    mailbox: FakeMailbox | None = None,
) -> FakeMailbox:
    mailbox = mailbox or FakeMailbox(deque(commands))
    resident = Resident("worker", 0, "node", 1, "log")
    CommandLoop(mailbox, resident, 60.0, 0.0).run(echo)  # type: ignore[arg-type]
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

    def wait_for(progress: Progress | None) -> None:
        while progress not in mailbox.reports:
            time.sleep(0.001)

    def act(_: Command, on_step: OnStep) -> None:
        wait_for(None)
        for done in range(4):
            on_step(done, 5)
        wait_for(Progress(3, 5))

    run(Echo(act), mailbox=mailbox)


def test_a_short_command_costs_no_report_but_of_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("raytrain_opt.pools.resident._PROGRESS_INTERVAL_S", 60.0)
    mailbox = FakeMailbox(deque([EVALUATE] * 3))

    def act(_: Command, on_step: OnStep) -> None:
        on_step(0, 5)
        on_step(1, 5)
        while not mailbox.reports:
            time.sleep(0.001)

    assert run(Echo(act), mailbox=mailbox).reports == [Progress(1, 5)]


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


@pytest.mark.parametrize("kind", [Closed, Dead])
def test_a_resident_leaves_in_the_middle_of_a_command_when_the_pool_is_closed(
    kind: type[FakeMailbox],
) -> None:
    """Or when the mailbox has died."""

    def act(_: Command, on_step: OnStep) -> None:
        for done in range(10**9):
            on_step(done, 10**9)

    assert run(Echo(act), mailbox=kind(deque([EVALUATE]))).replies == []


def test_a_mailbox_that_cannot_be_reached_has_not_died() -> None:
    mailbox = Unavailable(deque([EVALUATE]))

    def act(_: Command, on_step: OnStep) -> None:
        while len(mailbox.reports) < 2:
            time.sleep(0.001)
        on_step(0, 1)

    assert run(Echo(act), mailbox=mailbox).replies == ["evaluate"]


def test_a_lost_connection_between_workers_ends_the_process_not_the_run() -> None:
    """Ray then starts the group anew, and the command is repeated; other errors are replies.

    What a worker has of the command, it sends before.
    """
    text = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:545] Read error [127.0.0.1]:1"

    def act(_c: Command, _s: OnStep) -> None:
        raise RuntimeError(text)

    mailbox = FakeMailbox(deque([EVALUATE]))
    with pytest.raises(RuntimeError, match="Read error"):
        run(Echo(act), mailbox=mailbox)
    assert mailbox.replies == []
    mailbox = FakeMailbox(deque([MainTrain(StateRef("1", None), 1, Steps(0, (0.1,)))]))
    with pytest.raises(RuntimeError, match="Read error"):
        run(Echo(act), mailbox=mailbox)
    assert mailbox.replies == ["part of main_train"]
    text = "shapes cannot be multiplied"
    [failure] = run(Echo(act), EVALUATE).replies
    assert "shapes cannot be multiplied" in str(failure.error)


def test_errors_of_this_package_keep_their_class() -> None:
    error = RaytrainOptError("x")
    assert to_failure(error).error is error
    assert str(to_failure(KeyError("x")).error) == "KeyError: 'x'"


def test_an_error_waits_longer_when_the_peers_are_on_other_nodes() -> None:
    alone, one_node, two_nodes = (
        peer_failure_grace_s(*sizes) for sizes in ((1, 1), (2, 2), (4, 2))
    )
    assert alone == 0 < one_node < two_nodes


def test_a_resident_without_a_network_needs_no_torch() -> None:
    modules = ("resident", "relay", "resident_config", "launch_slots")
    imports = ", ".join(f"raytrain_opt.pools.{module}" for module in modules)
    code = f"import sys, {imports}, tests.support.echo; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0


class MailboxThread:
    """A real mailbox in a thread of its own, which residents in other threads call."""

    def __init__(self) -> None:
        self.box, self._loop = Mailbox(), asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def call(self, method: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(method, self._loop).result(20)


@dataclass
class MailboxOf:
    """The mailbox as one resident calls it."""

    thread: MailboxThread
    resident: Resident

    def join(self) -> tuple[int, int, Command]:
        current, _ = self.thread.call(self.thread.box.join(self.resident))
        return current, *self.thread.call(self.thread.box.next_command("worker", 0))

    def reply(self, number: int, value: Any, _usage: Any) -> tuple[int, Command]:
        reply = Reply(self.resident.sender, number, value)
        return self.thread.call(self.thread.box.exchange("worker", number, reply))

    def report(self, number: int, progress: Progress | None, stop: int | None) -> Instruction:
        report = Report(self.resident.sender, number, progress, stop)
        return self.thread.call(self.thread.box.report(report))


@pytest.mark.parametrize("when_s", [0.0, 0.05, 0.1, 0.2])
def test_workers_that_are_to_stop_early_stop_before_the_same_step(when_s: float) -> None:
    """Each step ends when all have done it, as with an all-reduce: another one would hang."""
    workers, total, thread = 4, 5000, MailboxThread()
    all_reduce, begun = threading.Barrier(workers, timeout=20), threading.Event()

    def act(_: Command, on_step: OnStep) -> int:
        for done in range(total):
            if on_step(done, total):
                return done
            begun.set()
            time.sleep(random.random() / 500)
            all_reduce.wait()
        return total

    class Trainer(Echo):
        def handle(self, command: Command, on_step: OnStep) -> Any:
            return act(command, on_step)

    def work(rank: int) -> None:
        resident = Resident("worker", rank, "node", rank, "log")
        mailbox: Any = MailboxOf(thread, resident)
        CommandLoop(mailbox, resident, 60.0, 0.0).run(Trainer())

    thread.call(thread.box.post("worker", 1, MainTrain(StateRef("1", None), 1, Steps(0, ()))))
    with ThreadPoolExecutor(workers) as pool:
        lives = [pool.submit(work, rank) for rank in range(workers)]
        assert begun.wait(20)
        time.sleep(when_s)
        thread.call(thread.box.stop_early("worker", 1))
        replies = thread.call(thread.box.collect("worker", 1, range(workers)))
        thread.call(thread.box.post("worker", 2, Close()))
        for life in lives:
            life.result(20)
    [last] = set(replies.values())
    assert 0 < last < total
