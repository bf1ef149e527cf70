"""The driver's side, with the real mailbox on an event loop, and a fake Ray of futures."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.train import ControllerError, WorkerGroupError
from ray.train.v2._internal.exceptions import UserExceptionWithTraceback

from raytrain_opt.cluster.connection import answer
from raytrain_opt.config.batch_size import ThroughputKneeSearch
from raytrain_opt.config.schema import TimeoutsSection
from raytrain_opt.errors import JobError, PoolError, Problem
from raytrain_opt.pools import ray_pool as module
from raytrain_opt.pools import state_store
from raytrain_opt.pools.commands import (
    Close,
    Command,
    Evaluate,
    MainTrain,
    Message,
    ProbeBatchSize,
    Regroup,
    Resident,
    SendInitialState,
    StateRef,
)
from raytrain_opt.pools.interface import fetch_initial_state
from raytrain_opt.pools.mailbox import Mailbox
from raytrain_opt.pools.ray_pool import ProbingSlot, RayPool, why_ended
from raytrain_opt.pools.resident import ResidentMailbox
from raytrain_opt.pools.state_store import RayStateStore
from raytrain_opt.results import Probe, Steps
from raytrain_opt.train.state import TrainingState


def wrap(error: BaseException) -> UserExceptionWithTraceback:
    """Return an exception of a worker as Ray Train reports it."""
    return UserExceptionWithTraceback(error, "text")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (None, "the worker pool ended .*out of memory"),
        (ray.exceptions.ActorDiedError(), "ActorDiedError: .*out of memory"),
        (RuntimeError("\x1b[36mray::main()\x1b[39m died"), "^worker raised RuntimeError: ray"),
        (
            ray.exceptions.RaySystemError(ModuleNotFoundError("No module named 'lib'"), "text"),
            "No module named 'lib'. It can be imported here, but .* PYTHONPATH",
        ),
        (
            ray.exceptions.RayTaskError(
                "f", "text", WorkerGroupError("text", {1: wrap(SystemExit(3)), 2: OSError()})
            ),
            "^worker 1 raised SystemExit: 3$",
        ),
        (
            WorkerGroupError("text", {0: wrap(JobError([Problem("model.name", "is wrong")]))}),
            "model.name: is wrong",
        ),
        (ControllerError(ray.exceptions.NodeDiedError("gone")), "NodeDiedError.*out of memory"),
    ],
)  # fmt: skip
def test_memory_is_guessed_only_if_no_other_cause_is_known(
    error: Exception | None, expected: str
) -> None:
    found = why_ended("worker", error)
    assert isinstance(found, JobError if expected.startswith("model") else PoolError)
    assert re.search(expected, str(found), re.DOTALL)
    assert ("out of memory" in str(found)) == ("out of memory" in expected)


# The answer of a resident that leaves, or dies.
LEAVES = object()


class FakeMailboxActor:
    """A mailbox that is called like an actor, and residents that answer commands."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.box = Mailbox()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def __getattr__(self, name: str) -> Any:
        return _Method(self.loop, getattr(self.box, name))

    def serve(self, pool: str, index: int, answer: Callable[[Command], Any], pid: int = 7) -> None:
        """Start a resident: `answer` returns its reply, or None while it is silent."""

        async def live() -> None:
            resident = Resident(pool, index, f"node {index}", pid, "its log")
            number, is_over = await self.box.join([resident])
            number, replies = number if is_over else 0, list[Message]()
            while True:
                current = number
                number, command = await self.box.exchange(pool, number, replies)
                if isinstance(command, Regroup) and not current:  # it joins for that
                    replies = [Message(resident, number, None)]
                    continue
                value = answer(command)
                if value is LEAVES:
                    return
                replies = [] if value is None else [Message(resident, number, value)]

        asyncio.run_coroutine_threadsafe(live(), self.loop)

    def close(self) -> None:
        async def cancel() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(cancel(), self.loop).result(5)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5)
        self.loop.close()


class _Method:
    def __init__(self, loop: asyncio.AbstractEventLoop, method: Callable[..., Any]) -> None:
        self._loop, self._method = loop, method

    def remote(self, *arguments: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(self._method(*arguments), self._loop)


class Store(dict[str, Any]):
    """Objects by name; one that is not there is lost."""

    def put(self, value: Any) -> str:
        name = f"object {len(self)}"
        self[name] = value
        return name

    def get(self, ref: Any, timeout: float | None = None) -> Any:
        if isinstance(ref, Future):
            return ref.result(10)
        if ref not in self:
            raise module.ray.exceptions.OwnerDiedError(ref, b"", "")
        return self[ref]


@pytest.fixture
def mailbox() -> Iterator[FakeMailboxActor]:
    actor = FakeMailboxActor()
    yield actor
    actor.close()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    store = Store()

    def wait_for(refs: list[Future[Any]], timeout: float) -> tuple[list[Any], list[Any]]:
        done, others = wait(refs, min(timeout, 0.02))
        return list(done), list(others)

    for name, pretended in (("put", store.put), ("get", store.get), ("wait", wait_for)):
        monkeypatch.setattr(module.ray, name, pretended)
    for user in (module, state_store):
        monkeypatch.setattr(user, "gone_nodes", dict)
    context = SimpleNamespace(get_node_id=lambda: "here")
    monkeypatch.setattr(module.ray, "get_runtime_context", lambda: context)
    return store


def state(number: int) -> TrainingState:
    return TrainingState({}, optimizer_index=number)


def pool_of(mailbox: FakeMailboxActor, name: str, size: int, **changes: Any) -> RayPool:
    return RayPool(name, size, lambda: None, mailbox, RayStateStore(), 0.2, **changes)


def test_a_state_that_is_lost_on_its_way_to_the_driver_is_requested_again(
    mailbox: FakeMailboxActor, store: Store
) -> None:
    """Its maker's node failed after the reply had gone out."""
    start = StateRef("start", store.put(state(0)))  # type: ignore[arg-type]
    commands: list[Command] = []

    def answer(command: Command) -> StateRef:
        commands.append(command)
        ref = "on a node that is gone" if len(commands) == 1 else store.put(state(1))
        return StateRef("1.20", ref)  # type: ignore[arg-type]

    mailbox.serve("worker", 0, answer)
    pool = pool_of(mailbox, "worker", 1)
    pool.states.keep(start)
    [(_, reply)] = pool.command(MainTrain(start, 1, Steps(0, (0.1,)))).items()
    assert pool.states.get(reply) == state(1)
    assert len(commands) == 2
    # From the same state, owned by the driver now.
    assert isinstance(commands[1], MainTrain)
    assert (commands[1].state.id, store[commands[1].state.ref]) == ("start", state(0))  # type: ignore[index]
    assert commands[1].state.ref != start.ref


def test_who_is_restarted_between_two_commands_gets_the_next_one(
    mailbox: FakeMailboxActor, store: Store
) -> None:
    """Repeating the last one would keep it silent about the next, maybe for too long."""
    mailbox.serve("worker", 0, lambda _: "answer")
    pool = pool_of(mailbox, "worker", 1)
    assert pool.command(SendInitialState()) == {0: "answer"}
    identity = Resident("worker", 0, "node 0", 8, "its log")
    restarted = ResidentMailbox(mailbox, "worker")
    with ThreadPoolExecutor() as executor:
        joined = executor.submit(restarted.join, [identity], ())
        while not pool.restarts():
            time.sleep(0.001)
        pool.request_close()
        assert joined.result(5) == (1, 2, Close())


def test_a_silent_resident_is_given_up_if_the_others_can_continue(
    mailbox: FakeMailboxActor, store: Store
) -> None:
    mailbox.serve("slot", 0, lambda _: "answer")
    mailbox.serve("slot", 1, lambda _: None)
    pool = pool_of(mailbox, "slot", 2, can_lose_residents=True)
    assert len(pool.wait_until_ready(5)) == 2
    assert pool.command(SendInitialState()) == {0: "answer"}
    assert pool.alive() == (0,)


def test_any_resident_can_send_the_initial_state(mailbox: FakeMailboxActor, store: Store) -> None:
    """Slot 0 is lost for good, slot 1 when it is asked."""
    initial = StateRef("initial", store.put(state(2)))  # type: ignore[arg-type]
    mailbox.serve("slot", 1, lambda _: None)
    mailbox.serve("slot", 2, lambda command: initial if command.index == 2 else None)  # type: ignore[attr-defined]
    pool = pool_of(mailbox, "slot", 3, can_lose_residents=True)
    mailbox.lose.remote("slot", 0).result()
    pool.wait_until_ready(5)
    assert fetch_initial_state(pool) == initial
    assert pool.alive() == (2,)
    mailbox.lose.remote("slot", 2).result()
    with pytest.raises(PoolError, match="no slot is left to send its initial state"):
        fetch_initial_state(pool)


@pytest.mark.parametrize("can_lose_residents", [True, False])
def test_if_nobody_can_continue_the_error_names_the_silent_residents(
    mailbox: FakeMailboxActor, store: Store, can_lose_residents: bool
) -> None:
    for index in range(2):
        mailbox.serve("slot", index, lambda _: None)
    pool = pool_of(mailbox, "slot", 2, can_lose_residents=can_lose_residents)
    pool.wait_until_ready(5)
    words = (
        r"no progress of send_initial_state for 0 s \(timeouts.no_progress_s: 0.2\).*"
        r"slot 0 .*slot 1 \(pid 7"
    )
    with pytest.raises(PoolError, match=words):
        pool.command(SendInitialState())


def test_a_resident_of_a_lost_node_is_named_with_the_node(
    mailbox: FakeMailboxActor, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "gone_nodes", lambda: {"node 1": "10.0.0.7"})
    for index in range(2):
        mailbox.serve("worker", index, lambda _: None)
    pool = pool_of(mailbox, "worker", 2)
    pool.wait_until_ready(5)
    message = r"worker 0 \(pid 7, its log\).*worker 1 \(pid 7, its log; its node 10.0.0.7 is gone"
    with pytest.raises(PoolError, match=message):
        pool.command(Evaluate(StateRef("x", "x")))  # type: ignore[arg-type]


def test_a_resident_that_does_not_start_is_named(mailbox: FakeMailboxActor, store: Store) -> None:
    mailbox.serve("worker", 0, lambda _: None)
    pool = pool_of(mailbox, "worker", 3)
    with pytest.raises(PoolError, match=r"worker 1, worker 2 did not start .*start_s: 0.2"):
        pool.wait_until_ready(0.2)


def test_a_slot_that_probes_is_another_process_when_it_ended_or_died(
    mailbox: FakeMailboxActor, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is given back before the next one starts."""
    started, gone, ended = list[int](), list[int](), list[Future[Any]]()

    def run() -> Future[Any]:
        started.append(len(started) + 1)
        ended.append(Future())
        mailbox.serve("slot", 0, partial(answer, ended[-1]), pid=started[-1])
        return ended[-1]

    def answer(end: Future[Any], command: Command) -> Any:
        if isinstance(command, Regroup):
            end.set_result(None)
            return LEAVES
        assert isinstance(command, ProbeBatchSize)
        if command.batch_size == 99:  # killed, and given up by Ray Tune
            end.set_exception(ray.exceptions.ActorDiedError())
            mailbox.lose.remote("slot", 0)
            return LEAVES
        return Probe(command.batch_size, "ok")

    pool = RayPool("slot", 1, run, mailbox, RayStateStore(), 5.0, can_lose_residents=True)
    monkeypatch.setattr(module, "wait_for_exit", lambda _, pid: gone.append(pid))
    section = ThroughputKneeSearch(strategy="throughput_knee")
    slot = ProbingSlot(pool, section, TimeoutsSection(start_s=5, stop_s=5))
    assert [slot.measure(size, check=False).pid for size in (4, 8)] == [1, 1]
    slot.end()
    slot.end()
    assert slot.measure(8, check=True).pid == 2
    died = slot.measure(99, check=False)
    assert (died.status, died.pid) == ("died", None)
    assert "ActorDiedError" in died.why
    assert slot.measure(4, check=False) == Probe(4, "ok", pid=3)
    assert (started, gone) == ([1, 2, 3], [1, 2])


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ray.exceptions.GetTimeoutError(), "did not answer within 0.01 s"),
        (ray.exceptions.RayActorError(), "has died"),
    ],
)
def test_a_mailbox_that_hangs_or_dies_is_named(
    monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def get(_: Any, timeout: float) -> None:
        raise error

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(PoolError, match=f"the mailbox, .* {message}"):
        answer(None, limit_s=0.01)
