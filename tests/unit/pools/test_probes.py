"""The search without Ray: what happens after which answer of a process, or its death."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from raytrain_opt.config.load import parse_job
from raytrain_opt.errors import PoolError, ResidentError, ResourcesError
from raytrain_opt.pools import probes
from raytrain_opt.pools.commands import Failure
from raytrain_opt.pools.probes import ProbeConfig, ProbeRecord, ProbeReply, run_probes
from raytrain_opt.results import Probe
from raytrain_opt.search.batch_size.strategy import SizeBounds
from raytrain_opt.train.learner_config import LearnerConfig

# The answer of a process to a size; an exception is its death.
Answer = Callable[[int], ProbeReply | Exception]


def speed(size: int, status: Any = "ok") -> ProbeReply:
    rate = 1000 * size / (size + 20)
    return ProbeReply(Probe(size, status, rate, rate * 0.005, 20, 1.0), 1)


def fits(largest: int) -> Answer:
    return lambda size: speed(size, "ok" if size <= largest else "out_of_memory")


def setup(**search: Any) -> ProbeConfig:
    job = parse_job(
        {
            "model": "small_cnn",
            "data": "digits",
            "epochs": 1,
            "global_batch_size": 8,
            "batch_size_search": {"strategy": "throughput_knee", **search},
            "max_restarts": 2,
        }
    )
    section = job.batch_size_search
    assert section is not None
    return ProbeConfig(
        learner=LearnerConfig.from_job(job),
        max_restarts=job.max_restarts,
        section=section,
        limits=SizeBounds(512, 512),
        use_gpu=False,
        threads=1,
        resources={"CPU": 1},
        shared=[None],
        trace=False,
    )


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


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer, Answer], FakeProcess]:
    """Let the next search have a process that answers so to probes and to checks."""

    def put(probe: Answer, check: Answer) -> FakeProcess:
        process = FakeProcess(probe, check)
        monkeypatch.setattr(probes, "ProbeProcess", lambda _: process)
        return process

    return put


def died() -> Exception:
    return ray.exceptions.ActorUnavailableError("killed", None)


def run(**search: Any) -> tuple[probes.ProbeSearchResult, list[ProbeRecord]]:
    records: list[ProbeRecord] = []
    return run_probes(setup(**search), records.append), records


def test_every_probe_is_reported_once_and_the_check_comes_last(answers: Any) -> None:
    answers(fits(100), fits(100))
    result, records = run()
    assert records == list(result.records)
    assert [record.check for record in records] == [False] * (len(records) - 1) + [True]
    assert records[-1].probe.batch_size == result.choice.batch_size <= 100


def test_a_process_probes_until_it_runs_out_of_memory_and_a_fresh_one_checks(answers: Any) -> None:
    process = answers(fits(100), fits(100))
    _, (*records, check) = run()
    assert {record.probe.status for record in records} == {"ok", "out_of_memory"}
    for record, following in pairwise(records):
        assert (record.pid == following.pid) == (record.probe.status == "ok")
    assert check.pid not in {record.pid for record in records}
    assert not process.alive


def test_a_choice_that_does_not_pass_its_check_is_replaced(answers: Any) -> None:
    answers(fits(500), fits(40))
    result, records = run()
    assert result.choice.batch_size <= 40
    checks = [record.probe.batch_size for record in records if record.check]
    assert len(checks) > 1
    assert checks[-1] == result.choice.batch_size


def test_a_check_whose_process_dies_counts_as_out_of_memory(answers: Any) -> None:
    answers(fits(500), lambda size: speed(size) if size <= 40 else died())
    result, records = run()
    assert result.choice.batch_size <= 40
    dead = next(record for record in records if record.check)
    assert (dead.probe.status, dead.pid) == ("out_of_memory", None)
    assert "killed" in dead.probe.why


def test_a_process_that_dies_is_tried_again_within_limits(answers: Any) -> None:
    left = [died(), died()]
    answers(lambda size: left.pop() if left else speed(size), fits(500))
    assert run()[0].choice.batch_size > 0
    answers(lambda _: died(), fits(500))
    with pytest.raises(PoolError, match=r"died 3 times .*max_restarts"):
        run()


def test_an_error_of_the_training_ends_the_search(answers: Any) -> None:
    broken = ProbeReply(Failure(RuntimeError("ValueError: planted"), "trace"), 1)
    answers(lambda _: broken, fits(500))
    with pytest.raises(ResidentError, match="planted"):
        run()
    answers(fits(500), lambda _: broken)
    with pytest.raises(ResidentError, match="planted"):
        run()


def test_nothing_fits(answers: Any) -> None:
    answers(fits(0), fits(0))
    with pytest.raises(ResourcesError, match="not even a batch of one"):
        run()


def test_an_error_of_the_strategy_is_raised(answers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def propose(_: Any) -> None:
        raise ZeroDivisionError("a mistake of ours")

    strategy = SimpleNamespace(propose=propose)
    monkeypatch.setattr(probes, "build_strategy", lambda *_: strategy)
    answers(fits(1), fits(1))
    with pytest.raises(ZeroDivisionError, match="a mistake of ours"):
        run()
