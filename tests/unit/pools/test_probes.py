"""The search without Ray: what happens after which answer of a process, or its death."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray

from raytrain_opt.config.load import parse_job
from raytrain_opt.errors import PoolError, ResidentError, ResourcesError
from raytrain_opt.pools.commands import Failure
from raytrain_opt.pools.probes import ProbeProcess, ProbeReply, run_probes
from raytrain_opt.recording.records import BatchSizeProbeRecord
from raytrain_opt.results import Probe
from raytrain_opt.search.batch_size.factory import build_strategy
from raytrain_opt.search.batch_size.strategy import BatchSizeChoice, SizeBounds, Strategy

# The answer of a process to a size; an exception is its death.
Answer = Callable[[int], ProbeReply | Exception]


def speed(size: int, status: Any = "ok") -> ProbeReply:
    rate = 1000 * size / (size + 20)
    return ProbeReply(Probe(size, status, rate, rate * 0.005, 20, 1.0), 1)


def fits(largest: int) -> Answer:
    return lambda size: speed(size, "ok" if size <= largest else "out_of_memory")


def strategy(**search: Any) -> Strategy:
    job = parse_job(
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
class FakeProcess:
    """Implements `probes.ProbeProcess`: answers to probes and to checks, and its starts."""

    probe: Answer
    checked: Answer
    starts: int = 0
    alive: bool = False

    def measure(self, batch_size: int, *, check: bool) -> ProbeReply:
        self.starts += not self.alive
        answer = (self.checked if check else self.probe)(batch_size)
        self.alive = not isinstance(answer, Exception)
        if isinstance(answer, Exception):
            raise answer
        return replace(answer, pid=self.starts)

    def end(self) -> None:
        self.alive = False


def died() -> Exception:
    return ray.exceptions.ActorUnavailableError("killed", None)


def run(
    probe: Answer, check: Answer, search: Strategy | None = None
) -> tuple[BatchSizeChoice, list[BatchSizeProbeRecord], FakeProcess]:
    """Search with a process that answers so to probes and to checks."""
    process, records = FakeProcess(probe, check), list[BatchSizeProbeRecord]()
    choice = run_probes(search or strategy(), cast(ProbeProcess, process), 2, records.append)
    return choice, records, process


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
    def half_as_fast(size: int) -> ProbeReply:
        probe = cast(Probe, speed(size).result)
        return ProbeReply(replace(probe, samples_per_s=probe.samples_per_s / 2), 1)

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
    choice, records, _ = run(fits(500), lambda size: speed(size) if size <= 40 else died())
    assert choice.batch_size <= 40
    dead = next(record for record in records if record.check)
    assert (dead.status, dead.pid) == ("out_of_memory", None)
    assert "killed" in dead.error


def test_a_process_that_dies_is_tried_again_within_limits() -> None:
    left = [died(), died()]
    assert run(lambda size: left.pop() if left else speed(size), fits(500))[0].batch_size > 0
    with pytest.raises(PoolError, match=r"died 3 times .*max_restarts"):
        run(lambda _: died(), fits(500))


def test_an_error_of_the_training_ends_the_search() -> None:
    broken = ProbeReply(Failure(RuntimeError("ValueError: planted"), "trace"), 1)
    with pytest.raises(ResidentError, match="planted"):
        run(lambda _: broken, fits(500))
    with pytest.raises(ResidentError, match="planted"):
        run(fits(500), lambda _: broken)


def test_nothing_fits() -> None:
    with pytest.raises(ResourcesError, match="not even a batch of one"):
        run(fits(0), fits(0))


def test_an_error_of_the_strategy_is_raised() -> None:
    def propose(_: Any) -> Any:
        raise ZeroDivisionError("a mistake of ours")

    with pytest.raises(ZeroDivisionError, match="a mistake of ours"):
        run(fits(1), fits(1), SimpleNamespace(propose=propose, weighs_checks=True))
