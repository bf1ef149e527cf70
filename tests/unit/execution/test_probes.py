"""The search without Ray: what happens after which answer of a process, or its death."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from raytrain_opt.config.schema import Job
from raytrain_opt.errors import PoolError, ResidentError, ResourcesError
from raytrain_opt.execution.batch_size import run_probes
from raytrain_opt.recording.records import BatchSizeProbeRecord
from raytrain_opt.results import Probe
from raytrain_opt.search.batch_size.strategy import BatchSizeChoice, SizeBounds, Strategy
from raytrain_opt.search.factory import build_strategy

# The answer of a process to a size; None is its death.
Answer = Callable[[int], Probe | None]


def speed(size: int, status: Any = "ok") -> Probe:
    rate = 1000 * size / (size + 20)
    return Probe(size, status, rate, rate * 0.005, 20, 1.0)


def fits(largest: int) -> Answer:
    return lambda size: speed(size, "ok" if size <= largest else "out_of_memory")


def strategy(**search: Any) -> Strategy:
    job = Job.model_validate(
        {
            "model": "small_cnn",
            "data": "digits",
            "epochs": 1,
            "global_batch_size": 8,
            "batch_size_search": {"strategy": "throughput_knee", **search},
        }
    )
    assert job.batch_size_search is not None
    return build_strategy(job.batch_size_search, SizeBounds(512, 512))


@dataclass
class FakeProber:
    """Answers to probes and to checks, and its processes; as `ray_pool.ProbingSlot`."""

    probe: Answer
    checked: Answer
    starts: int = 0
    alive: bool = False

    def measure(self, batch_size: int, *, check: bool) -> Probe:
        self.starts += not self.alive
        probe = (self.checked if check else self.probe)(batch_size)
        self.alive = probe is not None
        if probe is None:
            return Probe(batch_size, "died", why="killed")
        return replace(probe, pid=self.starts)

    def end(self) -> None:
        self.alive = False


def run(
    probe: Answer, check: Answer, search: Strategy | None = None
) -> tuple[BatchSizeChoice, list[BatchSizeProbeRecord], FakeProber]:
    """Search with a process that answers so to probes and to checks."""
    prober, records = FakeProber(probe, check), list[BatchSizeProbeRecord]()
    choice = run_probes(search or strategy(), prober, 2, records.append)  # type: ignore[arg-type]
    return choice, records, prober


def test_every_probe_is_reported_once_and_the_check_comes_last() -> None:
    choice, records, _ = run(fits(100), fits(100))
    assert [record.probe for record in records] == list(range(1, len(records) + 1))
    assert [record.check for record in records] == [False] * (len(records) - 1) + [True]
    assert records[-1].batch_size == choice.batch_size <= 100


def test_a_process_probes_until_it_runs_out_of_memory_and_a_fresh_one_checks() -> None:
    _, (*records, check), process = run(fits(100), fits(100))
    assert {record.status for record in records} == {"ok", "out_of_memory"}
    for record, following in pairwise(records):
        assert (record.pid == following.pid) == (record.status == "ok")
    assert check.pid not in {record.pid for record in records}
    assert not process.alive


def test_a_choice_that_does_not_pass_its_check_is_replaced() -> None:
    choice, records, _ = run(fits(500), fits(40))
    assert choice.batch_size <= 40
    checks = [record.batch_size for record in records if record.check]
    assert len(checks) > 1
    assert checks[-1] == choice.batch_size


def test_a_check_that_is_much_slower_counts_in_choice_and_confidence() -> None:
    def half_as_fast(size: int) -> Probe:
        probe = speed(size)
        return replace(probe, samples_per_s=probe.samples_per_s / 2)

    choice, records, _ = run(fits(500), half_as_fast)
    checks = [record for record in records if record.check]
    assert checks[-1].batch_size == choice.batch_size
    assert [record.probe for record in records] == list(range(1, len(records) + 1))
    confidence = re.search(r"at least ([\d.]+) %", choice.reason)
    assert confidence is not None
    assert float(confidence[1]) < 90


def test_the_published_strategies_do_not_take_a_check_for_a_loop() -> None:
    search = strategy(strategy="epoch_time_minimize", max_loops=12)
    choice, records, _ = run(fits(500), fits(500), search)
    assert [record.check for record in records] == [False] * (len(records) - 1) + [True]
    assert records[-2].batch_size == choice.batch_size


def test_a_check_whose_process_dies_counts_as_out_of_memory() -> None:
    choice, records, _ = run(fits(500), lambda size: speed(size) if size <= 40 else None)
    assert choice.batch_size <= 40
    dead = next(record for record in records if record.check)
    assert (dead.status, dead.pid) == ("out_of_memory", None)
    assert "killed" in dead.error


def test_a_process_that_dies_is_tried_again_within_limits() -> None:
    deaths = [1, 2]
    assert run(lambda s: None if deaths and deaths.pop() else speed(s), fits(500))[0].batch_size
    with pytest.raises(PoolError, match=r"died 3 times .*max_restarts: 2\): killed"):
        run(lambda _: None, fits(500))


def test_an_error_of_the_training_ends_the_search() -> None:
    def fail(_: int) -> Probe:
        raise ResidentError("slot 0: planted")

    for answers in ((fail, fits(500)), (fits(500), fail)):
        with pytest.raises(ResidentError, match="planted"):
            run(*answers)


def test_nothing_fits() -> None:
    with pytest.raises(ResourcesError, match="not even a batch of one"):
        run(fits(0), fits(0))


def test_an_error_of_the_strategy_is_raised() -> None:
    def propose(_: Any) -> Any:
        raise ZeroDivisionError("a mistake of ours")

    with pytest.raises(ZeroDivisionError, match="a mistake of ours"):
        run(fits(1), fits(1), SimpleNamespace(propose=propose, weighs_checks=True))
