"""GpuUsageMaximize and EpochTimeMinimize against the published listings, errata and tables."""

from __future__ import annotations

import math
from typing import Any

import pytest

from raytrain_opt.config.batch_size import EpochTimeMinimizeSearch, GpuUsageMaximizeSearch
from raytrain_opt.errors import ResourcesError
from raytrain_opt.results import Probe
from raytrain_opt.search.batch_size.strategy import BatchSizeChoice, SizeBounds, Strategy
from raytrain_opt.search.factory import build_strategy
from tests.support.samples import Samples
from tests.support.simulated_machine import Curve, Machine, random_machine

WIDE = SizeBounds(largest=100_000, epoch_samples=50_000)
FLAT, FREE = Curve(half=0.0), Curve(half=1e9)
# The sizes that follow from the paper's tables: 96 at loop 10, 196 at loop 20.
SIZES = [32, 34, 37, 41, 46, 52, 59, 67, 76, 86, 96, *range(106, 197, 10)]
TARGET = 99.0


def gpu_usage(bounds: SizeBounds = WIDE, **section: Any) -> Strategy:
    values = {"strategy": "gpu_usage_maximize", **section}
    return build_strategy(GpuUsageMaximizeSearch.model_validate(values), bounds)


def epoch_time(bounds: SizeBounds = WIDE, **section: Any) -> Strategy:
    values = {"strategy": "epoch_time_minimize", **section}
    return build_strategy(EpochTimeMinimizeSearch.model_validate(values), bounds)


def rates(*samples_per_s: float) -> list[Probe]:
    """Probes at the published sizes."""
    return [
        Probe(size, "ok", rate, 0.0, utilization_pct=50.0)
        for size, rate in zip(SIZES, samples_per_s, strict=False)
    ]


def crossing(size: int, **machine: Any) -> Machine:
    """A machine whose utilization reaches the target at `size`."""
    return Machine(FLAT, WIDE, utilization_pct=lambda s: min(100.0, TARGET * s / size), **machine)


class TestEpochTimeMinimize:
    @pytest.mark.parametrize(("start", "at_loop_10"), [(32, 96), (8, 72)])
    def test_sizes_are_those_of_the_papers_tables(self, start: int, at_loop_10: int) -> None:
        machine = Machine(FLAT, WIDE)
        assert machine.search(epoch_time(initial=start)).batch_size == at_loop_10
        assert len(machine.sizes) == 11
        assert start != 32 or machine.sizes == SIZES[:11]

    def test_an_epoch_that_gets_faster_is_searched_on(self) -> None:
        machine = Machine(Curve(half=100.0), WIDE)
        choice = machine.search(epoch_time())
        assert machine.sizes == SIZES[:21]
        assert choice.batch_size == 196

    @pytest.mark.parametrize(("gain", "stops"), [(0.049, True), (0.051, False)])
    def test_the_threshold_is_a_fraction_of_the_first_epoch(
        self, gain: float, stops: bool
    ) -> None:
        # Epoch times 1 at loop 0, 0.5 at loop 5, 0.5 - gain at loop 10.
        history = rates(1.0, *[2.0] * 9, 1 / (0.5 - gain))
        assert isinstance(epoch_time().propose(history), BatchSizeChoice) is stops

    def test_the_size_at_convergence_is_chosen_though_another_was_faster(self) -> None:
        history = rates(1.0, 1.0, 9.0, *[1.0] * 8)
        choice = epoch_time().propose(history)
        assert isinstance(choice, BatchSizeChoice)
        assert choice.batch_size == 96

    def test_test_every_comes_from_the_job(self) -> None:
        machine = Machine(FLAT, WIDE)
        machine.search(epoch_time(test_every=2))
        assert len(machine.history) - 1 == 4

    def test_max_loops_ends_the_search(self) -> None:
        machine = Machine(FREE, WIDE)
        choice = machine.search(epoch_time(max_loops=7))
        assert machine.sizes == SIZES[:7]
        assert choice.batch_size == SIZES[6]
        assert "max_loops" in choice.reason


class TestGpuUsageMaximize:
    @pytest.mark.parametrize(
        ("at_32_pct", "published_size", "loops", "size"),
        [(73.0, 54, 10, 55), (55.71, 70, 15, 69), (91.0, 46, 10, 46), (63.1, 116, 20, 115)],
    )
    def test_loops_are_those_of_table_3(
        self, at_32_pct: float, published_size: int, loops: int, size: int
    ) -> None:
        """The utilization rises linearly from the published one to the target; simulated."""
        slope = (TARGET - at_32_pct) / (published_size - 32)
        machine = Machine(FLAT, WIDE, utilization_pct=lambda s: at_32_pct + slope * (s - 32))
        choice = machine.search(gpu_usage())
        assert (len(machine.sizes) - 1, choice.batch_size) == (loops, size)

    @pytest.mark.parametrize("start", [1, 8, 32, 100, 200, 300])
    @pytest.mark.parametrize("size", [1, 2, 7, 31, 32, 33, 54, 70, 96, 116, 199, 257, 333])
    def test_stops_within_5_of_the_crossing_point(self, start: int, size: int) -> None:
        machine = crossing(size)
        choice = machine.search(gpu_usage(initial=start))
        assert abs(choice.batch_size - size) <= 5
        loops = len(machine.history) - 1
        assert (loops % 5 == 0 and loops >= 10) or choice.batch_size == 1

    @pytest.mark.parametrize(
        ("crossing_size", "sizes"),
        [
            (10_000, SIZES),  # below the target: grows as the errata say
            (1, [200, 199, 197, 194, 190, 185, 179, 172, 164, 155, 145, 135]),
        ],
    )
    def test_sizes_move_towards_the_target_by_growing_steps(
        self, crossing_size: int, sizes: list[int]
    ) -> None:
        machine = crossing(crossing_size)
        for size in sizes:
            step = gpu_usage(initial=sizes[0]).propose(machine.history)
            assert step.batch_size == size
            machine.history.append(machine.measure(size))

    def test_turning_halves_the_step_and_then_it_grows_again(self) -> None:
        # Below the target to 52 (last step 6), above down to 45, then below again.
        sizes = [32, 34, 37, 41, 46, 52, 49, 45, 50]
        history = [Probe(s, "ok", 1.0, 0.0, utilization_pct=90.0) for s in sizes[:5]]
        history += [Probe(s, "ok", 1.0, 0.0, utilization_pct=100.0) for s in sizes[5:7]]
        history += [Probe(45, "ok", 1.0, 0.0, utilization_pct=90.0)]
        for length, size in enumerate(sizes):
            assert gpu_usage().propose(history[:length]).batch_size == size

    def test_stops_at_1_when_even_that_is_above_the_target(self) -> None:
        machine = Machine(FLAT, WIDE, utilization_pct=lambda size: 100.0)
        assert machine.search(gpu_usage(initial=8)).batch_size == 1
        assert machine.sizes.count(1) == 1

    def test_max_loops_ends_the_search(self) -> None:
        machine = crossing(1000)
        choice = machine.search(gpu_usage(max_loops=12))
        assert machine.sizes == SIZES[:12]
        assert choice.batch_size == 106
        assert "max_loops" in choice.reason

    def test_missing_utilization_is_a_clear_error(self) -> None:
        history = [Probe(32, "ok", 1.0, 0.0, utilization_pct=math.nan)]
        with pytest.raises(ResourcesError, match="batch size 32 took no sample.*utilization"):
            gpu_usage().propose(history)


BOTH = pytest.mark.parametrize("make", [gpu_usage, epoch_time])


@BOTH
class TestMemory:
    def machine(self, bounds: SizeBounds = WIDE, memory: int = 10**6) -> Machine:
        """Larger is always better, and utilization never reaches the target."""
        return Machine(FREE, bounds, memory, utilization_pct=lambda size: 50.0)

    def test_a_size_that_does_not_fit_ends_the_growth(self, make: Any) -> None:
        machine = self.machine(memory=80)
        choice = machine.search(make())
        assert machine.sizes == [*SIZES[:9], 86]
        assert choice.batch_size == 76
        assert "86 does not" in choice.reason

    def test_a_start_that_does_not_fit_is_halved(self, make: Any) -> None:
        machine = self.machine(memory=13)
        choice = machine.search(make())
        assert machine.sizes[:5] == [32, 16, 8, 10, 13]
        assert choice.batch_size == 13

    def test_the_limit_ends_the_growth_once_measured(self, make: Any) -> None:
        bounds = SizeBounds(44, epoch_samples=100)
        machine = self.machine(bounds)
        assert machine.search(make(bounds)).batch_size == 44
        assert machine.sizes == [32, 34, 37, 41, 44]


@BOTH
@pytest.mark.slow
def test_always_ends_with_a_size_that_fits(make: Any, samples: Samples) -> None:
    for seed in samples(250):
        machine = random_machine(seed)
        choice = machine.search(make(machine.bounds))  # which asserts that it fits
        assert len(machine.history) <= 100
        assert choice.reason
