"""The mailbox with thousands of residents: its CPU per command, and the latency of a command.

    python -m benchmarks.scale [--commands 60] [--real 2 8 32 64] [--simulated 256 1024 4096]
        [--search-workers 1 2]

Real: residents are Ray actors that reply at once and compute nothing, with the loop of a worker's
process; driver's side, mailbox and relays are those of a run. `latency_s`: from posting a command
until all replies are here (median). `mailbox_cpu_s`: CPU of the mailbox's process per command, all
that Ray does in it included. `latency_64_over_2`: the largest over the smallest number of
residents. All of them share this machine's cores, so its CPU limits the latency: `machine_cpu_s`
is what a command costs per resident, in all processes together.

Simulated: the real classes `Mailbox` and `Relay`, each in a thread of its own, and messages of a
real main training, which are pickled for each call as Ray does. `code_cpu_s`: CPU of the mailbox's
thread per command. `calls`: calls that it receives per command. A call of a Ray actor costs it
more: `ray_call_cpu_s`, measured with the real mailbox. So `cpu_s` is `code_cpu_s` + `calls` x
`ray_call_cpu_s`. `latency_s`: the sum of this over the levels (the busiest relay of each), as if
each actor had a core of its own; network and residents are left out. `core_while_training`: the
mailbox's share of a core when every resident reports its progress once a second. All threads
share one interpreter, which stretches a command over seconds, so relays wait for their callers as
long as it takes, and the garbage of other threads is not collected in the mailbox's.

`mailbox_cpu_s_at_4096` is `cpu_s` of the largest simulation. `search_time_ratio`: by number of
workers (search_time.py). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import os
import statistics
import threading
import time
from collections import Counter
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import psutil
import ray
from ray import cloudpickle

from benchmarks import search_time
from benchmarks.common import machine
from raytrain_opt.clock import monotonic_s
from raytrain_opt.cluster.connection import ray_session
from raytrain_opt.execution.start import start_launcher, start_mailbox
from raytrain_opt.pools import relay
from raytrain_opt.pools.commands import (
    WORKER_POOL,
    Close,
    Command,
    CommandTime,
    MainTrain,
    MainTrainReply,
    OnStep,
    Progress,
    Reply,
    Report,
    Resident,
    StateRef,
)
from raytrain_opt.pools.mailbox import Exchange, Mailbox
from raytrain_opt.pools.mailbox_client import ResidentMailbox
from raytrain_opt.pools.ray_pool import RayPool
from raytrain_opt.pools.relay import Relay, Upstream, relay_levels
from raytrain_opt.pools.resident import CommandLoop, describe_this_process
from raytrain_opt.pools.state_store import RayStateStore
from raytrain_opt.recording.recorder import versions
from raytrain_opt.results import Steps, TrainTotals

T = TypeVar("T")

# A main training of this many steps, and a reply to it, as in a run.
STEPS = 500
COMMAND = MainTrain(StateRef("1.500", None), 1, Steps(0, (0.1,) * STEPS))
TIMINGS_S = dict.fromkeys(("load_s", "data_wait_s", "compute_s", "average_s", "hand_over_s"), 0.25)
PARALLEL: dict[str, object] = {
    "backend": "nccl",
    "buckets": 7,
    "bytes": 102_228_128,
    "compression": None,
    "workers": 4096,
    "connect_s": 3.2,
    "first_step_s": 0.8,
}
REPLY = MainTrainReply(
    TrainTotals(STEPS, 16_000, 23_456.7, 0, 61.3, 0.2), "0" * 64, TIMINGS_S, None, PARALLEL
)
TIME = CommandTime(61.5, TIMINGS_S)
START_LIMIT_S = 300.0
TRAINING_S = 6


class Echo:
    """Makes two steps and replies, without any computing."""

    def handle(self, command: Command, on_step: OnStep) -> MainTrainReply:
        """Execute any command."""
        on_step(0, STEPS)
        on_step(1, STEPS)
        return REPLY

    def steps_before_failure(self, _: Command) -> None:
        """Have nothing to hand over."""

    def close(self) -> None:
        """Do nothing."""


class EchoResident:
    """An actor whose only method is the loop of a resident process."""

    def serve(self, mailbox: Any, upstream: Upstream, index: int) -> None:
        """Execute commands until the pool is closed."""
        resident = describe_this_process(WORKER_POOL, index)
        client = ResidentMailbox(mailbox, upstream, resident)
        CommandLoop(client, resident, 5.0, 0.0).run(Echo())


def cpu_s(process: psutil.Process) -> float:
    """Return the CPU seconds of a process so far."""
    times = process.cpu_times()
    return times.user + times.system


def measure_real(residents: int, commands: int) -> dict[str, float]:
    """Execute commands in a pool of real processes."""
    mailbox, launcher = (
        start_mailbox(None),
        start_launcher(local=True, start_s=60, import_all=False),
    )
    relays = ray.get(launcher.start_relays.remote(mailbox, residents))
    process = psutil.Process(ray.get(mailbox.__ray_call__.remote(lambda _: os.getpid())))
    echo: Any = ray.remote(EchoResident).options(num_cpus=0)
    actors = [echo.remote() for _ in range(residents)]
    ends = [
        actor.serve.remote(mailbox, relays[index % len(relays)], index)
        for index, actor in enumerate(actors)
    ]
    pool = RayPool(
        WORKER_POOL, residents, lambda: ends[0], mailbox, RayStateStore(), START_LIMIT_S
    )
    pool.start()
    pool.wait_until_ready(START_LIMIT_S)
    for _ in range(5):
        pool.command(COMMAND)
    before_s, machine_s, latencies_s = cpu_s(process), machine_cpu_s(), []
    for _ in range(commands):
        start_s = monotonic_s()
        pool.command(COMMAND)
        latencies_s.append(monotonic_s() - start_s)
    result = {
        "residents": residents,
        "relays": sum(relay_levels(residents)),
        "latency_s": statistics.median(latencies_s),
        "latency_min_s": min(latencies_s),
        "latency_max_s": max(latencies_s),
        "mailbox_cpu_s": (cpu_s(process) - before_s) / commands,
        "machine_cpu_s": (machine_cpu_s() - machine_s) / commands / residents,
    }
    if residents <= 2:
        result["ray_call_cpu_s"] = measure_ray_call(mailbox, process)
    pool.request_close()
    ray.wait(ends, num_returns=residents, timeout=10)
    for actor in (*actors, launcher, mailbox):
        ray.kill(actor)
    return result


def machine_cpu_s() -> float:
    """Return the CPU seconds of this process and of all that it has started."""
    own = psutil.Process()
    total_s = 0.0
    for process in (own, *own.children(recursive=True)):
        try:
            total_s += cpu_s(process)
        except psutil.NoSuchProcess:
            continue
    return total_s


def measure_ray_call(mailbox: Any, process: psutil.Process, calls: int = 2000) -> float:
    """Return the mailbox's CPU seconds for a call that does nothing."""
    before_s = cpu_s(process)
    for _ in range(calls // 20):
        ray.get([mailbox.is_closed.remote(WORKER_POOL) for _ in range(20)])
    return (cpu_s(process) - before_s) / calls


@dataclass
class Handle:
    """An event loop in a thread of its own; its own handle, with what Ray would pickle."""

    actor: Exchange | None = None  # None: calls others only
    calls: Counter[str] = field(default_factory=Counter)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self.run(_cancel_others())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def __getattr__(self, name: str) -> _Method:
        return self.method(name)

    def method(self, name: str) -> _Method:
        """Return a method of the actor, to call it from another thread."""
        return _Method(self, name)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread of this actor."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def cpu_s(self) -> float:
        """Return the CPU seconds of the thread so far."""

        async def read() -> float:
            return time.thread_time()

        return self.run(read())


async def _cancel_others() -> None:
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await asyncio.sleep(0)


@dataclass(frozen=True)
class _Method:
    handle: Handle
    name: str

    async def remote(self, *arguments: Any) -> Any:
        """Call the method from another actor's thread."""
        pickled: bytes = cloudpickle.dumps(arguments)  # type: ignore[no-untyped-call]
        call: Future[bytes] = asyncio.run_coroutine_threadsafe(
            self._execute(pickled), self.handle.loop
        )
        result: bytes = await asyncio.wrap_future(call)
        return cloudpickle.loads(result)

    async def _execute(self, pickled: bytes) -> bytes:
        self.handle.calls[self.name] += 1
        method = getattr(self.handle.actor, self.name)
        result: bytes = cloudpickle.dumps(  # type: ignore[no-untyped-call]
            await method(*cloudpickle.loads(pickled))
        )
        return result


class Simulation:
    """A mailbox with its relays, and residents that are coroutines in one thread."""

    def __init__(self, residents: int) -> None:
        self.count = residents
        self.levels = [[Handle(Mailbox())]]
        for count in relay_levels(residents):
            above = self.levels[-1]
            self.levels.append([Handle(Relay(above[i % len(above)])) for i in range(count)])
        self.mailbox, self._clients = self.levels[0][0], Handle()
        self._reply = cloudpickle.dumps(REPLY)  # type: ignore[no-untyped-call]
        self._number = 0
        self._clients.run(self._start())

    async def _start(self) -> None:
        await asyncio.gather(*(self.mailbox.join.remote(r) for r in self._residents()))
        self._lives = [asyncio.create_task(self._live(r)) for r in self._residents()]

    def _residents(self) -> list[Resident]:
        log = "worker-" + "f" * 56 + "-*-12345.err in Ray's session logs"
        return [Resident(WORKER_POOL, i, "a" * 56, 10_000 + i, log) for i in range(self.count)]

    def _relay_of(self, resident: Resident) -> Handle:
        return self.levels[-1][resident.index % len(self.levels[-1])]

    async def _live(self, resident: Resident) -> None:
        number, reply = 0, None
        while True:
            exchange = self._relay_of(resident).method("exchange")
            number, command = await exchange.remote(WORKER_POOL, number, reply)
            if isinstance(command, Close):
                return
            reply = Reply(resident.sender, number, self._reply, time=TIME)

    async def _command(self) -> None:
        self._number += 1
        await self.mailbox.post.remote(WORKER_POOL, self._number, COMMAND)
        replies = await self.mailbox.collect.remote(WORKER_POOL, self._number, range(self.count))
        assert len(replies) == self.count

    async def _train(self, seconds: int) -> None:
        """Let every resident report once per second, spread over it."""
        for done in range(1, seconds + 1):
            second_ends_s = monotonic_s() + 1
            for i, resident in enumerate(self._residents()):
                report = Report(resident.sender, self._number, Progress(done, STEPS))
                self._sent = asyncio.create_task(self._relay_of(resident).report.remote(report))
                if i % 64 == 63:
                    rest_s = max(0.0, second_ends_s - monotonic_s())
                    await asyncio.sleep(rest_s * 64 / (self.count - i + 64))
            await asyncio.sleep(max(0.0, second_ends_s - monotonic_s()))

    def usage(self) -> list[list[tuple[float, int]]]:
        """Return CPU seconds and received calls of each actor so far, by level."""
        return [[(a.cpu_s(), a.calls.total()) for a in level] for level in self.levels]

    def measure(
        self, commands: int, ray_call_cpu_s: float, training_s: int = TRAINING_S
    ) -> dict[str, float]:
        """Execute commands, then train for some seconds."""
        self._clients.run(self._command())
        before = self.usage()
        for _ in range(commands):
            self._clients.run(self._command())
        after = self.usage()
        # Of each level the busiest actor: CPU of its own code, and calls, per command.
        busiest = [
            max(
                ((end[0] - start[0]) / commands, (end[1] - start[1]) / commands)
                for start, end in zip(*level, strict=True)
            )
            for level in zip(before, after, strict=True)
        ]
        code_cpu_s, calls = busiest[0]
        before = self.usage()
        self._clients.run(self._train(training_s))
        [start], [end] = before[0], self.usage()[0]
        training_cpu_s = end[0] - start[0] + (end[1] - start[1]) * ray_call_cpu_s
        self._clients.run(self.mailbox.post.remote(WORKER_POOL, self._number + 1, Close()))
        self._clients.run(self._end())
        return {
            "residents": self.count,
            "relays": sum(map(len, self.levels[1:])),
            "code_cpu_s": code_cpu_s,
            "calls": calls,
            "cpu_s": code_cpu_s + calls * ray_call_cpu_s,
            "latency_s": sum(code + count * ray_call_cpu_s for code, count in busiest),
            "core_while_training": training_cpu_s / training_s,
        }

    async def _end(self) -> None:
        await asyncio.gather(*self._lives)

    def close(self) -> None:
        """End all threads."""
        for handle in (self._clients, *itertools.chain(*self.levels)):
            handle.close()


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--commands", type=int, default=60)
    parser.add_argument("--real", type=int, nargs="+", default=[2, 8, 32, 64])
    parser.add_argument("--simulated", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--search-workers", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    search = search_time.compare(arguments.search_workers, 3, "workers")
    with ray_session(None, verbose=False):
        real = [_shown(measure_real(n, arguments.commands)) for n in sorted(arguments.real)]
    ray_call_cpu_s = real[0].get("ray_call_cpu_s", 0.0)
    relay._REPLIES_WAIT_S = START_LIMIT_S
    gc.disable()
    simulated = [
        _shown(Simulation(n).measure(5, ray_call_cpu_s)) for n in sorted(arguments.simulated)
    ]
    print(
        json.dumps(
            {
                "benchmark": "scale",
                "mailbox_cpu_s_at_4096": simulated[-1]["cpu_s"],
                "core_while_training_at_4096": simulated[-1]["core_while_training"],
                "latency_64_over_2": real[-1]["latency_s"] / real[0]["latency_s"],
                "search_time_ratio": search["search_time_ratio"],
                "ray_call_cpu_s": ray_call_cpu_s,
                "real": real,
                "simulated": simulated,
                "machine": machine(),
                "versions": versions(),
            }
        )
    )


def _shown(figures: dict[str, float]) -> dict[str, float]:
    """Print figures as soon as they are there."""
    print(json.dumps({name: round(value, 6) for name, value in figures.items()}), flush=True)
    return figures


if __name__ == "__main__":
    main()
