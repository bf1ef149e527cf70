"""Unequal workers on a simulated clock, and what a step of each way to train takes there.

A worker computes an equal share of a global batch in one second; everything is relative to that.

sync            each step waits for the slowest worker, and for the all-reduce
without slow    sync without the last worker, which is the slow one; the others' shares grow
backup          a step ends with the gradients of the fastest workers but one, the last is lost
                (Chen et al. 2016, arXiv 1604.00981); a worker that is late begins with the others
balanced        the product's number of micro-batches for 48 samples per worker and the workers'
                speeds, shared in proportion to these
async           each gradient is an update; the product's number of micro-batches, which it chooses
                from the speed of each epoch of `STEPS_PER_EPOCH` steps
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from random import Random

from benchmarks.async_simulation import Network, NoNetwork, Seconds, Simulation
from raytrain_opt.async_training.scheduler import EpochPhase, Granularity, MicroBatchDone
from raytrain_opt.train.micro_batches import choose_split, split_by_speed, usual_splits

WAYS = ("sync", "without slow", "backup", "balanced", "async")
STEPS_PER_EPOCH = 15
_SPEED_STEPS = 405
_SAMPLES_PER_WORKER = 48


@dataclass(frozen=True)
class Environment:
    """Workers of which the last takes `slower` times as long, and what slows all of them.

    `jitter`: each micro-batch takes 1 to 4 times as long, log-normal around 2; without it there
    is a little, 5 %, because exactly equal workers would fetch and push in turns. `message_s`:
    seconds in which a link carries one gradient.
    """

    name: str
    workers: int
    slower: float = 1.0
    jitter: bool = False
    message_s: float = 0.0

    def clock(self, seed: int) -> Seconds:
        """Return the seconds of a worker's next share, from a generator of their own."""
        random = Random(f"{self.name} {seed}")

        def seconds(worker: int) -> float:
            base = self.slower if worker == self.workers - 1 else 1.0
            if self.jitter:
                return base * min(4.0, max(1.0, math.exp(random.gauss(math.log(2), 0.5))))
            return base * random.uniform(0.95, 1.05)

        return seconds

    @property
    def speeds(self) -> list[float]:
        """The mean speeds of the workers."""
        return [1.0] * (self.workers - 1) + [1 / self.slower]

    @property
    def split(self) -> int:
        """Micro-batches per worker that balanced workers share."""
        return choose_split(_SAMPLES_PER_WORKER, self.workers, self.speeds)

    def network(self) -> Network | NoNetwork:
        """Return a node and a shard for each worker."""
        if not self.message_s:
            return NoNetwork()
        return Network(self.workers, self.workers, 1.0, 1.0, 1 / self.message_s)

    def all_reduce_s(self, workers: int) -> float:
        """Return the time of a ring: each link carries 2 (n - 1) / n of the gradients."""
        return 2 * (workers - 1) / workers * self.message_s

    @cache  # noqa: B019 - frozen, and few
    def speed(self, way: str) -> float:
        """Return epochs per time in units of those of equal workers with `sync`."""
        equal = Environment("equal", self.workers)
        return steps_s("sync", equal, 0, _SPEED_STEPS) / steps_s(way, self, 0, _SPEED_STEPS)


ENVIRONMENTS: dict[str, Callable[[int], Environment]] = {
    "one slow worker": lambda n: Environment("one slow worker", n, slower=4.0),
    "jitter": lambda n: Environment("jitter", n, jitter=True),
    "slow network": lambda n: Environment("slow network", n, message_s=0.5),
    "equal": lambda n: Environment("equal", n),
}


def steps_s(way: str, environment: Environment, seed: int, steps: int) -> float:
    """Return the simulated seconds of so many steps."""
    workers, seconds = environment.workers, environment.clock(seed)
    if way == "async":
        granularity = Granularity(usual_splits(_SAMPLES_PER_WORKER))
        return sum(
            _epoch_s(environment, seconds, min(STEPS_PER_EPOCH, steps - first), granularity)
            for first in range(0, steps, STEPS_PER_EPOCH)
        )
    all_reduce_s = environment.all_reduce_s(workers - (way == "without slow"))
    return sum(compute_s(way, environment, seconds) + all_reduce_s for _ in range(steps))


def _epoch_s(
    environment: Environment, seconds: Seconds, steps: int, granularity: Granularity
) -> float:
    """Return the simulated seconds of an asynchronous epoch."""
    workers, split = environment.workers, granularity.split
    simulation = Simulation(
        EpochPhase("1.0", 1, 0, (0.1,) * steps, workers * split, None),
        workers,
        lambda worker: seconds(worker) / split,
        environment.network(),
        lambda _, number: MicroBatchDone(number, 0.0, 0, 0),
    )
    duration_s = simulation.run()
    granularity.measured(steps / duration_s, environment.message_s * split)
    return duration_s


def compute_s(way: str, environment: Environment, seconds: Seconds) -> float:
    """Return the time in which the gradients of a step are computed, with a common update."""
    workers = environment.workers
    match way:
        case "sync":
            return max(seconds(worker) for worker in range(workers))
        case "without slow":
            share = workers / (workers - 1)
            return max(share * seconds(worker) for worker in range(workers - 1))
        case "backup":
            return sorted(seconds(worker) for worker in range(workers))[-2]
        case _:
            split = environment.split
            shares = split_by_speed(split * workers, environment.speeds)
            return max(
                sum(seconds(worker) / split for _ in range(share))
                for worker, share in enumerate(shares)
            )
