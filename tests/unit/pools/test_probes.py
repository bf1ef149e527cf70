"""The search as Ray Tune drives it, without Ray: what happens after which answer of a trial."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from raytrain_opt.config.load import parse_job
from raytrain_opt.errors import PoolError, ResidentError, ResourcesError
from raytrain_opt.pools import probes
from raytrain_opt.pools.commands import Failure
from raytrain_opt.pools.probes import ProbeConfig, ProbeRecord, ProbeReply, run_probes
from raytrain_opt.results import Probe
from raytrain_opt.search.batch_size.strategy import SizeBounds
from raytrain_opt.train.learner_config import LearnerConfig

# Answers of a trial by its size; an exception stands for the death of its process.
Answer = Callable[[int], ProbeReply | Exception]


def speed(size: int, status: Any = "ok") -> ProbeReply:
    rate = 1000 * size / (size + 20)
    return ProbeReply(Probe(size, status, rate, rate * 0.005, 20, 1.0), pid=1)


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
        run_id="it",
        ray_storage_path="",
        trace=False,
    )


@pytest.fixture
def tune(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer, Answer], None]:
    """Ray Tune as far as the search sees it: one trial after the other."""

    def put(trial: Answer, check: Answer) -> None:
        def fit(_: Any, name: str, space: dict[str, Any], tune_config: Any) -> list[Any]:
            if "batch_size" in space:
                answer = check(space["batch_size"])
                if isinstance(answer, Exception):
                    return [SimpleNamespace(metrics=None, error=answer)]
                return [SimpleNamespace(metrics={"reply": answer}, error=None)]
            _drive(tune_config.search_alg, trial)
            return []

        monkeypatch.setattr(probes, "_fit", fit)

    return put


def _drive(searcher: Any, trial: Answer) -> None:
    for number in range(200):
        suggestion = searcher.suggest(f"trial {number}")
        if not isinstance(suggestion, dict):
            return
        answer = trial(suggestion["batch_size"])
        if isinstance(answer, Exception):
            searcher.on_trial_complete(f"trial {number}", None, error=True)
            continue
        result = {"reply": answer}
        if answer.probe is not None and answer.probe.status != "ok":
            searcher.on_trial_result(f"trial {number}", result)
            searcher.on_trial_complete(f"trial {number}", result, error=True)
        else:
            searcher.on_trial_complete(f"trial {number}", result)
    raise AssertionError("the search does not end")


def run(**search: Any) -> tuple[probes.ProbeSearchResult, list[ProbeRecord]]:
    records: list[ProbeRecord] = []
    return run_probes(setup(**search), records.append), records


def test_every_probe_is_reported_once_and_the_check_comes_last(tune: Any) -> None:
    tune(fits(100), fits(100))
    result, records = run()
    assert records == list(result.records)
    assert [record.check for record in records] == [False] * (len(records) - 1) + [True]
    assert records[-1].probe.batch_size == result.choice.batch_size <= 100


def test_a_choice_that_does_not_pass_its_check_is_replaced(tune: Any) -> None:
    tune(fits(500), fits(40))
    result, records = run()
    assert result.choice.batch_size <= 40
    checks = [record.probe.batch_size for record in records if record.check]
    assert len(checks) > 1
    assert checks[-1] == result.choice.batch_size


def test_a_check_whose_process_dies_counts_as_out_of_memory(tune: Any) -> None:
    tune(fits(500), lambda size: speed(size) if size <= 40 else OSError("killed"))
    result, records = run()
    assert result.choice.batch_size <= 40
    dead = next(record for record in records if record.check)
    assert (dead.probe.status, dead.pid) == ("out_of_memory", None)
    assert "killed" in dead.probe.why


def test_a_process_that_dies_is_tried_again_within_limits(tune: Any) -> None:
    left = [OSError("killed"), OSError("killed")]
    tune(lambda size: left.pop() if left else speed(size), fits(500))
    assert run()[0].choice.batch_size > 0
    tune(lambda _: OSError("killed"), fits(500))
    with pytest.raises(PoolError, match=r"died 3 times .*max_restarts"):
        run()


def test_an_error_of_the_training_ends_the_search(tune: Any) -> None:
    broken = ProbeReply(None, 1, failure=Failure(RuntimeError("ValueError: planted"), "trace"))
    tune(lambda _: broken, fits(500))
    with pytest.raises(ResidentError, match="planted"):
        run()
    tune(fits(500), lambda _: broken)
    with pytest.raises(ResidentError, match="planted"):
        run()


def test_nothing_fits(tune: Any) -> None:
    tune(fits(0), fits(0))
    with pytest.raises(ResourcesError, match="not even a batch of one"):
        run()


def test_an_error_of_the_strategy_is_raised(tune: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def propose(_: Any) -> None:
        raise ZeroDivisionError("a mistake of ours")

    strategy = SimpleNamespace(propose=propose)
    monkeypatch.setattr(probes, "build_strategy", lambda *_: strategy)
    tune(fits(1), fits(1))
    with pytest.raises(ZeroDivisionError, match="a mistake of ours"):
        run()
