"""The benchmark of gradient buckets: a simulated link is as slow as it should be."""

from __future__ import annotations

from benchmarks.gradient_buckets import LATENCY_S, LINKS, PLANS, Setting, measure

SETTING = Setting("mobilenet_v3_small", repeats=1, steps=1, batch_size=2, image_size=32)
GRADIENT_BYTES = 4 * 2_542_856


def test_a_message_takes_no_less_than_its_link_needs() -> None:
    times = measure(2, SETTING)
    assert set(times) == {(plan, link) for plan in PLANS for link in LINKS}
    # All bytes must have arrived before a step ends; `single` sends none of them earlier. Upper
    # limits would test how busy this machine is.
    for link, gbit_per_s in LINKS.items():
        if gbit_per_s is not None:
            link_s = LATENCY_S + 8 * GRADIENT_BYTES / (gbit_per_s * 1e9)
            assert all(times[plan, link][0] >= link_s for plan in PLANS)
