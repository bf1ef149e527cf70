"""What one worker does in an asynchronous phase: claim a share, read weights, compute, push.

Three things go on at a time: the gradient of the last share is sent, this one is computed, and the
weights of the next are fetched, as late as will do, so that they are not older than they need be.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

from raytrain_opt.clock import Parts, monotonic_s
from raytrain_opt.data.base import Batch
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.parameter_server import (
    Flat,
    Weights,
    Wire,
    move_into,
    split_parameters,
    to_wire,
    wire_dtype,
)
from raytrain_opt.train.share_clock import Done, Phase
from raytrain_opt.train.state import HostState, model_tensors
from raytrain_opt.train.totals import Report

# Fetching begins so many times as long before the end of a share as it took.
_EARLY = 2.0


class Server(Protocol):
    """The clock and the shards, as one worker sees them."""

    def claim(self) -> int | None:
        """The next share; None when all are claimed."""
        ...

    def begin(self, share: int, version: int) -> int | None:
        """Waits until the share may begin. None: now, on weights of this version; else the version
        that it needs.
        """
        ...

    def pull(self, at_least: int) -> Weights:
        """Of all shards, once they have this version."""
        ...

    def push(self, share: int, gradients: Sequence[Wire]) -> None:
        """To all shards; returns when they have it."""
        ...

    def done(self, share: Done) -> None:
        """Its gradient was pushed."""
        ...

    def wait_for_work(self) -> bool:
        """True when there is something to claim again; False when the phase is over."""
        ...


class AsyncTrainer:
    """The learner's part in asynchronous phases. Its model's weights become views of one buffer
    per shard, and so do the gradients.
    """

    def __init__(self, learner: Learner, shards: int) -> None:
        self.learner = learner
        parts = split_parameters(learner.model, shards)
        self._weights = [Flat(part) for part in parts]
        self._gradients = [Flat(part) for part in parts]
        for part, weights, gradients in zip(parts, self._weights, self._gradients, strict=True):
            move_into(weights, part)
            for parameter, view in zip(part, gradients.views, strict=True):
                parameter.grad = view if parameter.requires_grad else None
        self.dtype = self._weights[0].buffer.dtype
        self._wire = wire_dtype(learner.job.parallel.compression, self.dtype)

    def load(self, state: HostState) -> None:
        """Weights and buffers; the shards have the optimiser."""
        with torch.no_grad():
            self.learner.model.load_state_dict(model_tensors(state))

    def train(self, phase: Phase, server: Server, on_share: Callable[[int], None]) -> Report:
        """Until the phase is over. `on_share` is called before each share with the number of those
        done; it may raise to stop.
        """
        started_s, parts, shares = monotonic_s(), Parts(), 0
        self.learner.begin_shares(phase.epoch, phase.shares)
        # Two sends at a time would only be later each.
        with ThreadPoolExecutor(1, "push") as pushes, _Ahead(server, phase.bound) as ahead:
            pushed: Future[None] | None = None
            while True:
                for share, batch in self._claimed(phase, server, parts):
                    on_share(shares)
                    with parts.measure("gate_s"):
                        weights = _new_enough(share, server, ahead)
                    ahead.begin()
                    done, wires = self.compute(phase, share, batch, weights.parts)
                    ahead.computed()
                    with parts.measure("push_wait_s"):
                        _finish(pushed)
                    pushed = pushes.submit(_push, server, done, wires)
                    shares += 1
                _finish(pushed)
                with parts.measure("end_wait_s"):
                    if not server.wait_for_work():
                        break
        data_wait_s = parts.seconds.pop("data_wait_s", 0.0)
        seconds = monotonic_s() - started_s
        return Report(shares, seconds, data_wait_s, parts.seconds, self.learner.buffers(shares))

    def _claimed(self, phase: Phase, server: Server, parts: Parts) -> Iterator[tuple[int, Batch]]:
        """Shares as they are claimed, with their batches. Loader processes claim ahead."""
        numbers: deque[int] = deque()

        def places() -> Iterator[tuple[int, int]]:
            while (number := server.claim()) is not None:
                numbers.append(number)
                yield phase.place(number)

        batches = self.learner.batches_at(places())
        while True:
            with parts.measure("data_wait_s"):
                batch = next(batches, None)
            if batch is None:
                return
            yield numbers.popleft(), batch

    def compute(
        self, phase: Phase, share: int, batch: Batch, weights: Sequence[Tensor]
    ) -> tuple[Done, list[Wire]]:
        """The gradient of one share on these weights, as it is sent to each shard."""
        for flat, part in zip(self._weights, weights, strict=True):
            flat.buffer.copy_(part)
        for flat in self._gradients:
            flat.buffer.zero_()
        loss_sum, correct = self.learner.add_gradient(batch, phase.place(share))
        done = Done(share, loss_sum, len(batch.y), correct, batch.skipped)
        return done, [to_wire(flat.buffer, self._wire) for flat in self._gradients]


def _new_enough(share: int, server: Server, ahead: _Ahead) -> Weights:
    """Weights on which the share may begin, when it may."""
    weights = ahead.take()
    needed = server.begin(share, weights.version)
    while needed is not None:
        weights = server.pull(needed)
        needed = server.begin(share, weights.version)
    return weights


def _push(server: Server, done: Done, wires: Sequence[Wire]) -> None:
    server.push(done.number, wires)
    server.done(done)


def _finish(pushed: Future[None] | None) -> None:
    if pushed is not None:
        pushed.result()


class _Ahead:
    """Fetches the weights of the next share while this one is computed. With bound 0 there are no
    newer ones before it is done: then they are fetched when they are asked for.
    """

    def __init__(self, server: Server, bound: int | None) -> None:
        self._server, self._fetches_early = server, bound != 0
        self._thread = ThreadPoolExecutor(1, "pull")
        self._fetched: Future[Weights] | None = None
        self._began_s = self._compute_s = self._pull_s = 0.0

    def __enter__(self) -> _Ahead:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def begin(self) -> None:
        """A share is computed from now on."""
        self._began_s = monotonic_s()
        if self._fetches_early:
            self._fetched = self._thread.submit(
                self._fetch, self._compute_s - _EARLY * self._pull_s
            )

    def computed(self) -> None:
        """It is done."""
        self._compute_s = monotonic_s() - self._began_s

    def take(self) -> Weights:
        """The latest that were fetched."""
        fetched, self._fetched = self._fetched, None
        return self._fetch(0.0) if fetched is None else fetched.result()

    def _fetch(self, delay_s: float) -> Weights:
        time.sleep(max(0.0, delay_s))
        started_s = monotonic_s()
        weights = self._server.pull(0)
        self._pull_s = monotonic_s() - started_s
        return weights
