"""A batch size leaves enough updates, and what is said of it is what the probes support."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest

from raytrain_opt.config.batch_size import (
    EpochTimeMinimizeSearch,
    GpuUsageMaximizeSearch,
    ThroughputKneeSearch,
)
from raytrain_opt.config.updates import RampStep
from raytrain_opt.optim.epoch_steps import Length
from raytrain_opt.results import Probe
from raytrain_opt.search.batch_size import published, throughput_knee
from raytrain_opt.search.batch_size.strategy import SizeBounds, Updates, largest_size
from raytrain_opt.search.factory import build_strategy
from tests.support.simulated_machine import Curve, Machine

RAMP = (RampStep(epoch=10, factor=2), RampStep(epoch=20, factor=4))


@pytest.mark.parametrize(
    ("arguments", "settings", "largest"),
    [
        # The job of 132 updates has fewer than 500: its own size is the largest.
        ({"own": 64, "train_size": 1438, "length": Length(6)}, {}, 64),
        # Updates of an epoch bound the size, or those of the training.
        ({"own": 64, "train_size": 1438, "length": Length(100)}, {}, 71),
        ({"own": 64, "train_size": 50_000, "length": Length(6)}, {}, 50_000 // 84),
        ({"own": 64, "train_size": 50_000, "length": Length(seconds=3600.0)}, {}, 2500),
        # Of all workers together, and with the ramp's factors.
        ({"own": 8, "train_size": 50_000, "length": Length(90), "workers": 4}, {}, 625),
        (
            {"own": 8, "train_size": 50_000, "length": Length(90), "workers": 4, "ramp": RAMP},
            {},
            156,
        ),
        ({"own": 64, "train_size": 50_000, "length": Length(90), "ramp": RAMP[:1]}, {}, 1250),
        # A job with 15 updates in an epoch keeps its size, though a few samples more left 15 too.
        ({"own": 90, "train_size": 1438, "length": Length(100)}, {}, 90),
        # The job says otherwise.
        ({"own": 64, "train_size": 1438, "length": Length(6)}, {"max_batch_size": 32}, 32),
        ({"own": 64, "train_size": 1438, "length": Length(6)}, {"max_batch_size": 4096}, 64),
        (
            {"own": 64, "train_size": 1438, "length": Length(6)},
            {"min_updates_per_epoch": 5, "min_updates": 30},
            1438 // 5,
        ),
        # The rate grows at most 8-fold, unless the job names the largest size.
        (
            {"own": 64, "train_size": 50_000, "length": Length(seconds=3600.0), "rule": "linear"},
            {},
            512,
        ),
        (
            {"own": 64, "train_size": 500_000, "length": Length(seconds=3600.0), "rule": "sqrt"},
            {},
            4096,
        ),
        (
            {"own": 64, "train_size": 50_000, "length": Length(seconds=3600.0), "rule": "linear"},
            {"max_batch_size": 1024},
            1024,
        ),
        # A size that cannot train is no reason for few updates.
        ({"own": 4096, "train_size": 1438, "length": Length(100)}, {}, 71),
        ({"own": 4096, "train_size": 10, "length": Length(1)}, {}, 1),
    ],
)
def test_enough_updates_are_left_and_the_rate_stays_within_its_rule(
    arguments: dict[str, Any], settings: dict[str, Any], largest: int
) -> None:
    for kind, name in (
        (ThroughputKneeSearch, "throughput_knee"),
        (GpuUsageMaximizeSearch, "gpu_usage_maximize"),
        (EpochTimeMinimizeSearch, "epoch_time_minimize"),
    ):
        section = kind(strategy=name, **settings)
        assert largest_size(section, **arguments) == largest


def test_updates_are_counted_as_a_training_takes_them() -> None:
    assert str(Updates.count(1438, 64, Length(6))) == "22 an epoch, 132 in all"
    assert str(Updates.count(1438, 64, Length(seconds=3600.0))) == "22 an epoch"
    assert str(Updates.count(1438, 2000, Length(6))) == "0 an epoch, 0 in all"
    # 9 epochs of 22, 10 of 11 and 6 of 5
    assert Updates.count(1438, 64, Length(25), RAMP) == Updates(5, 9 * 22 + 10 * 11 + 6 * 5)


@pytest.mark.parametrize("name", ["throughput_knee", "epoch_time_minimize"])
@pytest.mark.parametrize(("own", "allowed"), [(8, 100), (64, 100), (150, 150)])
def test_a_training_with_a_time_limit_takes_enough_steps(
    name: Any, own: int, allowed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes 1 ms per sample, so that 100 samples take the limit."""
    section: Any = ThroughputKneeSearch(strategy="throughput_knee", tolerance=0.001)
    if name == "epoch_time_minimize":
        section = EpochTimeMinimizeSearch(strategy=name)
        monkeypatch.setattr(published.EpochTimeMinimize, "threshold", 1e-6)
    # Larger batches are a little faster per sample.
    curve = Curve(half=1.0, peak_samples_per_s=1010.0)
    bounds = SizeBounds(4096, 50_000, own, max_step_s=0.1)
    machine = Machine(curve, bounds)
    choice = machine.search(build_strategy(section, bounds))
    assert own < choice.batch_size <= allowed or choice.batch_size <= own
    assert choice.batch_size >= 0.8 * allowed
    slow = replace(bounds, max_step_s=1e-6, always_allowed=8)  # the first size is too slow already
    assert Machine(curve, slow).search(build_strategy(section, slow)).batch_size == 8


@pytest.mark.parametrize("ratio", [1.0, 1.2, 2.0])
def test_a_confidence_is_no_higher_than_its_probes_support(
    ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest size is the best in the model, whatever it measured."""
    rates = {32: 4000.0, 128: 9000.0, 512: 13_000.0, 1408: 14_674.0}
    history = [Probe(size, "ok", rate, 0.005 * rate) for size, rate in rates.items()]
    history.append(Probe(1408, "ok", 14_674.0 / ratio, 50.0))
    monkeypatch.setattr(throughput_knee, "_MAX_PROBES", len(history))
    section = ThroughputKneeSearch(strategy="throughput_knee")
    reason = build_strategy(section, SizeBounds(1408, 1408)).propose(history).reason
    match = re.search(r"95 % confidence at least ([\d.]+) %", reason)
    assert match is not None
    assert float(match[1]) <= 100 / math.sqrt(ratio)
    assert float(match[1]) > 50 / ratio
