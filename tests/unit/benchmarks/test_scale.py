"""The simulation of the scale benchmark: what it counts."""

from __future__ import annotations

import pytest

from benchmarks.scale import Simulation


@pytest.mark.parametrize(
    # Two calls of the driver per command; of each caller one for the command, one with replies.
    ("residents", "relays", "calls"),
    [(8, 0, 2 + 8), (40, 2, 2 + 2 * 2)],
)
def test_calls_of_the_mailbox_are_counted_and_cost_what_ray_takes(
    residents: int, relays: int, calls: int
) -> None:
    simulation = Simulation(residents)
    figures = simulation.measure(2, ray_call_cpu_s=1.0, training_s=1)
    simulation.close()
    assert (figures["relays"], figures["calls"]) == (relays, calls)
    assert calls < figures["cpu_s"] < calls + 0.5
    assert figures["latency_s"] >= figures["cpu_s"]
    # Without relays, each report is a call; with them, each relay makes one every two seconds.
    assert (figures["core_while_training"] >= residents) == (relays == 0)
