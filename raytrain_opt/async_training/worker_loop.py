"""What one worker does in an asynchronous phase: claim a micro-batch, read weights, compute, push.

Three things overlap: the gradient of the last micro-batch is sent, this one is computed, and the
weights of the next are fetched, as late as possible, so that they are as new as possible.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from threading import Event
from typing import Protocol

import torch
from torch import Tensor

from raytrain_opt.async_training.scheduler import EpochPhase, MicroBatchDone
from raytrain_opt.async_training.weight_shard import (
    Weights,
    WireArray,
    flatten,
    shard_parameters,
    to_wire,
    wire_dtype,
)
from raytrain_opt.clock import Stopwatch, monotonic_s
from raytrain_opt.data.base import Batch
from raytrain_opt.results import AsyncWorkerMetrics
from raytrain_opt.train.batch_norm import collect_buffers
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.state import TrainingState, model_tensors

# Fetching begins twice the time it took last before the end of a micro-batch: late enough for new
# weights, early enough when the network is slower this time.
_PREFETCH_FACTOR = 2.0


class ParameterServer(Protocol):
    """The coordinator and the shards, as one worker sees them."""

    def claim(self) -> int | None:
        """Return the next micro-batch; None when all are claimed."""

    def begin(self, number: int, version: int) -> bool:
        """Wait until the micro-batch may begin; return False if it needs newer weights."""

    def pull(self) -> Weights:
        """Return the weights of all shards."""

    def push(self, number: int, version: int, gradients: Sequence[WireArray]) -> int:
        """Update all shards by a gradient of weights of this version; return its staleness."""

    def done(self, result: MicroBatchDone) -> None:
        """Report a micro-batch whose gradient was pushed."""

    def wait_for_work(self) -> bool:
        """Wait; return True when there is something to claim again, False when all is done."""


class AsyncTrainer:
    """A learner's part in asynchronous phases; weights and gradients are views of flat buffers."""

    def __init__(self, learner: Learner, shards: int) -> None:
        self.learner = learner
        buffers = [flatten(part) for part in shard_parameters(learner.model, shards)]
        self._weights = [weights for weights, _ in buffers]
        self._gradients = [gradients for _, gradients in buffers]
        self.dtype = self._weights[0].dtype
        self._wire_dtype = wire_dtype(learner.config.parallel.compression, self.dtype)

    def load(self, state: TrainingState) -> None:
        """Load weights and buffers; the shards have the optimizer."""
        with torch.no_grad():
            self.learner.model.load_state_dict(model_tensors(state))

    def train(
        self,
        phase: EpochPhase,
        server: ParameterServer,
        on_micro_batch: Callable[[int, int], object],
    ) -> AsyncWorkerMetrics:
        """Compute micro-batches until the phase is over.

        `on_micro_batch` gets, before each one, how many this worker has done, and will have done.
        """
        started_s, stopwatch, count = monotonic_s(), Stopwatch(), 0
        self.learner.begin_micro_batches(phase.epoch, phase.micro_batches, phase.steps.held_out)
        pushed: Future[None] = Future()
        pushed.set_result(None)
        with (
            # One thread: two sends at a time would only delay each other.
            ThreadPoolExecutor(1, "push") as pushes,
            ThreadPoolExecutor(1, "pull") as pulls,
        ):
            prefetcher = WeightPrefetcher(server, pulls)
            while True:
                for number, batch in self._claim_batches(phase, server, stopwatch):
                    begun = min(number, phase.size)  # by all workers
                    on_micro_batch(count, count * phase.size // begun if count else phase.size)
                    with stopwatch.measure("gate_s"):
                        weights = prefetcher.take()
                        while not server.begin(number, weights.version):
                            weights = server.pull()
                    prefetcher.begin()
                    result, wires = self.compute(phase, number, batch, weights.parts)
                    prefetcher.end()
                    with stopwatch.measure("push_wait_s"):
                        pushed.result()
                    pushed = pushes.submit(_push, server, result, weights.version, wires)
                    count += 1
                pushed.result()
                with stopwatch.measure("end_wait_s"):
                    if not server.wait_for_work():
                        break
        stopwatch.add("compute_s", monotonic_s() - started_s)
        return AsyncWorkerMetrics(stopwatch.timings_s, collect_buffers(self.learner.model, count))

    def _claim_batches(
        self, phase: EpochPhase, server: ParameterServer, stopwatch: Stopwatch
    ) -> Iterator[tuple[int, Batch]]:
        """Claim micro-batches and read their samples. Loader processes claim ahead."""
        numbers: deque[int] = deque()

        def claim_indices() -> Iterator[tuple[int, int]]:
            while (number := server.claim()) is not None:
                numbers.append(number)
                yield phase.index_of(number)

        batches = self.learner.micro_batches_at(claim_indices())
        while True:
            with stopwatch.measure("data_wait_s"):
                batch = next(batches, None)
            if batch is None:
                return
            yield numbers.popleft(), batch

    def compute(
        self, phase: EpochPhase, number: int, batch: Batch, weights: Sequence[Tensor]
    ) -> tuple[MicroBatchDone, list[WireArray]]:
        """Compute the gradient of one micro-batch on these weights, as sent to each shard."""
        for flat, part in zip(self._weights, weights, strict=True):
            flat.copy_(part)
        for flat in self._gradients:
            flat.zero_()
        loss_sum = self.learner.add_gradient(batch, phase.index_of(number))
        result = MicroBatchDone(number, loss_sum, batch.size, batch.skipped)
        return result, [to_wire(flat, self._wire_dtype) for flat in self._gradients]


def _push(
    server: ParameterServer, result: MicroBatchDone, version: int, wires: Sequence[WireArray]
) -> None:
    staleness = server.push(result.number, version, wires)
    server.done(replace(result, staleness=staleness))


class WeightPrefetcher:
    """Fetches the weights of the next micro-batch while the current one is computed.

    It expects this one to take as long as the last one, and fetches at its end if it is shorter.
    """

    def __init__(self, server: ParameterServer, thread: ThreadPoolExecutor) -> None:
        self._server, self._thread = server, thread
        self._fetched: Future[Weights] | None = None
        self._computed = Event()
        self._start_s = self._compute_s = self._pull_s = 0.0

    def begin(self) -> None:
        self._start_s = monotonic_s()
        delay_s = self._compute_s - _PREFETCH_FACTOR * self._pull_s
        self._computed.clear()
        self._fetched = self._thread.submit(self._fetch, delay_s)

    def end(self) -> None:
        self._computed.set()
        self._compute_s = monotonic_s() - self._start_s

    def take(self) -> Weights:
        """Return the weights that were fetched last, or fetch them."""
        fetched, self._fetched = self._fetched, None
        return self._fetch(0.0) if fetched is None else fetched.result()

    def _fetch(self, delay_s: float) -> Weights:
        self._computed.wait(delay_s)
        start_s = monotonic_s()
        weights = self._server.pull()
        self._pull_s = monotonic_s() - start_s
        return weights
