"""Simulated machines with a known cost curve, to test batch-size strategies."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from raytrain_opt.results import Probe
from raytrain_opt.search.batch_size.strategy import (
    BatchSizeChoice,
    ProbeRequest,
    SizeBounds,
    Strategy,
)


@dataclass(frozen=True)
class Curve:
    """True cost of a step: c and k b seconds, added (overlap 1) or overlapping (larger).

    `half` is c / k. Work comes in tiles of `tile` samples; the input pipeline gives at most
    `cap` times the asymptotic samples/s; beyond `cache` samples every octave costs `decline`;
    from `jump` samples on everything is `jump_gain` times as fast.
    """

    half: float
    overlap: float = 1.0
    tile: int = 1
    cap: float = math.inf
    cache: float = math.inf
    decline: float = 0.0
    jump: float = math.inf
    jump_gain: float = 1.0
    peak_samples_per_s: float = 1000.0

    def samples_per_s(self, size: int) -> float:
        work = self.tile * math.ceil(size / self.tile)
        step = math.pow(self.half**self.overlap + work**self.overlap, 1 / self.overlap)
        slower = 1 + self.decline * math.log2(max(1.0, size / self.cache))
        gain = self.jump_gain if size >= self.jump else 1.0
        return self.peak_samples_per_s * min(size / step * gain, self.cap) / slower


@dataclass
class Machine:
    """Returns noisy measurements with their standard error, and records them."""

    curve: Curve
    bounds: SizeBounds
    memory: int = 1_000_000
    noise: float = 0.0
    seed: int = 0
    utilization_pct: Callable[[int], float] = lambda size: math.nan
    history: list[Probe] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)

    @property
    def largest(self) -> int:
        """The largest size that is allowed and fits."""
        return min(self.bounds.largest, self.memory)

    def measure(self, size: int) -> Probe:
        assert 1 <= size <= self.bounds.largest
        if size > self.memory:
            return Probe(size, "out_of_memory")
        rate = self.curve.samples_per_s(size)
        noisy = rate * (1 + self.noise * self._random.standard_normal())
        used = self.utilization_pct(size)
        return Probe(size, "ok", float(noisy), rate * self.noise, utilization_pct=used)

    def search(self, strategy: Strategy, max_probes: int = 300) -> BatchSizeChoice:
        """Measure until the strategy chooses, which must be a measured size that fits."""
        for _ in range(max_probes):
            step = strategy.propose(self.history)
            if isinstance(step, BatchSizeChoice):
                assert step.batch_size in self.sizes
                assert step.batch_size <= self.memory
                return step
            assert isinstance(step, ProbeRequest)
            self.history.append(self.measure(step.batch_size))
        raise AssertionError(f"no choice after {max_probes} probes: {self.sizes}")

    @property
    def sizes(self) -> list[int]:
        """The measured sizes, in order."""
        return [m.batch_size for m in self.history]

    @property
    def best(self) -> float:
        """Samples/s of the fastest size that fits."""
        return max(self.curve.samples_per_s(size) for size in range(1, self.largest + 1))

    def regret(self, choice: BatchSizeChoice) -> float:
        """Return the fraction of the best samples/s that the choice loses."""
        return 1 - self.curve.samples_per_s(choice.batch_size) / self.best

    def knee(self, tolerance: float) -> int:
        """Return the smallest size that loses at most `tolerance`."""
        required = (1 - tolerance) * self.best
        sizes = range(1, self.largest + 1)
        return next(size for size in sizes if self.curve.samples_per_s(size) >= required)

    def fresh(self) -> Machine:
        """Return the same machine without measurements."""
        return replace(self, history=[])


def random_machine(seed: int) -> Machine:
    """Draw a machine: overheads from none to dominant, tiles, caps, memory limits and noise."""
    random = np.random.default_rng(seed)

    def log_uniform(low: float, high: float) -> float:
        return float(math.exp(random.uniform(math.log(low), math.log(high))))

    def sometimes(probability: float, value: float, otherwise: float) -> float:
        return value if random.random() < probability else otherwise

    curve = Curve(
        half=log_uniform(0.05, 5000),
        overlap=float(random.choice([1.0, 1.0, 2.0, 8.0])),
        tile=int(random.choice([1, 1, 8, 32])),
        cap=sometimes(0.3, random.uniform(0.3, 0.95), math.inf),
        cache=log_uniform(64, 2048),
        decline=sometimes(0.3, random.uniform(0.0, 0.05), 0.0),
        peak_samples_per_s=log_uniform(10, 100_000),
    )
    half_full = log_uniform(1, 200)
    return Machine(
        curve,
        SizeBounds(largest=round(log_uniform(16, 4096)), epoch_samples=50_000),
        memory=round(sometimes(0.5, log_uniform(4, 8192), 1_000_000)),
        noise=float(random.uniform(0.005, 0.02)),
        seed=seed,
        utilization_pct=lambda size: 100 * size / (size + half_full / 50),
    )
