"""The benchmark's simulated clock and network, and its trainings."""

from __future__ import annotations

import pytest

from benchmarks.async_simulation import Network, NoNetwork, Simulation
from benchmarks.async_straggler import efficiency
from benchmarks.async_training import SECONDS, final_accuracies
from raytrain_opt.async_training.scheduler import EpochPhase, MicroBatchDone


def shares_per_s(bound: int | None, seconds: tuple[float, ...]) -> float:
    phase = EpochPhase("1.0", 1, 0, (0.1,) * 60, len(seconds), bound)
    run = Simulation(
        phase, seconds, NoNetwork(), lambda _, share: MicroBatchDone(share, 0, 1, 0, 0)
    )
    return phase.size / run.run()


def test_without_a_network_speed_is_that_of_the_workers() -> None:
    assert shares_per_s(None, (1.0,) * 4) == pytest.approx(4.0, rel=0.02)
    assert shares_per_s(None, SECONDS) == pytest.approx(3.25, rel=0.05)
    assert shares_per_s(0, SECONDS) == pytest.approx(1.0, rel=0.02)


def test_a_link_carries_no_more_than_it_can() -> None:
    link = Network(2, 1, weight_bytes=100.0, gradient_bytes=100.0, bytes_per_s=50.0)
    assert link.pull(0, 0, 1.0) == 1.0  # the shard is on its node
    assert link.pull(1, 0, 1.0) == 3.0
    assert link.pull(3, 0, 1.5) == 3.0  # its node has this version
    assert link.pull(1, 1, 1.0) == 5.0
    assert link.push(1, 0.0) == pytest.approx(2.0, rel=1e-6)
    assert link.push(1, 0.0) == pytest.approx(4.0, rel=1e-6)


def test_a_slow_network_makes_many_workers_less_efficient() -> None:
    slow, fast = efficiency(16, 10, 1.0), efficiency(16, 100, 1.0)
    assert 0 < slow < fast < 1
    assert efficiency(1, 10, 1.0) > 0.99


def test_trainings_with_and_without_staleness() -> None:
    sync, free = final_accuracies(None, [0, None], epochs=2, samples=0, side=0)
    assert (sync["staleness_mean"], sync["staleness_max"]) == (0.0, 0)
    assert free["staleness_mean"] > 0.5
    assert free["simulated_seconds"] < sync["simulated_seconds"] / 2
    for training in (sync, free):
        assert training["test_accuracy"] > 0.2
