"""Failures of a run, and the messages that the user gets."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from raytrain_opt import Job, run
from raytrain_opt.config.schema import CheckpointSection
from raytrain_opt.errors import (
    DivergedError,
    PoolError,
    ResidentError,
    ResourcesError,
    StorageError,
)
from raytrain_opt.execution.signals import Terminated
from raytrain_opt.pools.faults import VARIABLE
from raytrain_opt.train.checkpoint import Checkpoints, read_index
from tests.support.ray_leftovers import placement_groups
from tests.support.small_jobs import read_lines, small_job, without_times

pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.timeout(600)]


def test_more_workers_than_the_cluster_holds(tmp_path: Path) -> None:
    job = small_job(tmp_path, workers={"count": 4, "resources": {"CPU": 1}})
    with pytest.raises(ResourcesError, match=r"4 workers of 1 CPU each do not fit: room for 2"):
        run(job)


def test_a_device_that_the_cluster_does_not_have(tmp_path: Path) -> None:
    job = small_job(tmp_path, workers={"count": 2, "use_gpu": True})
    with pytest.raises(ResourcesError, match=r"workers.use_gpu: true, but no node has a GPU"):
        run(job)


# Starting a process costs ten seconds of CPU: jobs have as few processes as possible.
ONE_WORKER: dict[str, Any] = {"workers": {"count": 1, "threads": 1}}
NO_CANDIDATES = {"policy": "schedule", "shape": "linear"}


def test_an_exception_in_user_code_reaches_the_user(tmp_path: Path) -> None:
    job = small_job(
        tmp_path,
        model="tests.support.small_jobs:make_breaking_model",
        slots={"count": 1},
        **ONE_WORKER,
    )
    with pytest.raises(ResidentError, match="slot .*ValueError: planted failure") as caught:
        run(job)
    assert "in forward" in caught.value.remote_traceback
    assert placement_groups() == set()


def test_when_all_candidates_diverge_the_base_is_halved_then_given_up(tmp_path: Path) -> None:
    learning_rate = {
        "policy": "stpt",
        "initial": 1e30,
        "candidates": [1.0, 0.5],
        "alpha": 5,
        "max_halvings": 1,
    }
    with pytest.raises(DivergedError, match=r"1e\+30, 5e\+29"):
        run(small_job(tmp_path, learning_rate=learning_rate, slots={"count": 1}, **ONE_WORKER))
    (run_dir,) = tmp_path.iterdir()
    [event] = read_lines(str(run_dir), "events")
    assert event["kind"] == "failed"
    assert "1e+30, 5e+29" in event["text"]
    rounds = read_lines(str(run_dir), "rounds")
    assert [line["winner"] for line in rounds] == [None, None]
    assert rounds[1]["base_lr"] == rounds[0]["base_lr"] / 2
    assert {c["status"] for line in rounds for c in line["candidates"]} == {"diverged"}


# Two complete runs and five restarts: minutes on a busy machine.
@pytest.mark.timeout(1800)
def test_killed_processes_are_restarted_and_nothing_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kill slots and workers in every phase and at a random step; the numbers stay the same.

    Every candidate's state is needed, so what a killed slot had is trained again.
    """
    stpt = {"policy": "stpt", "candidates": [1.0, 0.5], "alpha": 5, "merge": "average"}
    quiet = run(small_job(tmp_path / "quiet", learning_rate=stpt))
    chance = random.Random(seed := random.randrange(10**9))
    print(f"seed of the random kills: {seed}")
    main_steps = quiet.summary["steps_per_epoch"] - 5
    slot, worker, step = chance.randrange(2), chance.randrange(2), chance.randrange(main_steps)
    faults = [
        {"role": "slot", "index": 1, "epoch": 1, "phase": "pretrain", "step": 3},
        {"role": "worker", "index": 1, "phase": "evaluate", "step": 0},
        {"role": "slot", "index": 0, "epoch": 2, "phase": "send_candidate_state"},
        {"role": "worker", "index": 1, "epoch": 2, "phase": "main_train"},  # before it loads
        {"role": "slot", "index": slot, "epoch": 3, "phase": "pretrain", "step": step % 5},
        {"role": "worker", "index": worker, "epoch": 3, "phase": "main_train", "step": step},
    ]
    monkeypatch.setenv(VARIABLE, json.dumps(faults))
    disturbed = run(small_job(tmp_path / "hit", learning_rate=stpt))
    restarts = disturbed.summary["restarts"]
    assert (restarts["slot"], restarts["worker"]) == (3, 6)  # all workers, three times
    events = read_lines(disturbed.run_dir, "events")
    assert [event["kind"] for event in events] == ["restarted"] * 9
    assert all(event["silent_s"] > 0 for event in events)
    expected = without_times(read_lines(quiet.run_dir, "rounds"))
    assert without_times(read_lines(disturbed.run_dir, "rounds")) == expected
    assert {tuple(sorted(line["averaged"])) for line in expected} == {(0, 1)}
    for line in expected:
        assert line["loaded_sha256"] == [line["winner_sha256"]] * 2
    assert disturbed.test_accuracy == quiet.test_accuracy


def test_a_slot_that_dies_too_often_is_given_up_and_the_others_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    faults = [{"role": "slot", "index": 1, "epoch": 2, "phase": "pretrain", "always": True}]
    monkeypatch.setenv(VARIABLE, json.dumps(faults))
    result = run(small_job(tmp_path, max_restarts=1, **ONE_WORKER))
    first, second, third = read_lines(result.run_dir, "rounds")
    assert [c["status"] for c in first["candidates"]] == ["ok", "ok"]
    assert [c["status"] for c in second["candidates"]] == ["ok", "lost"]
    assert (second["winner"], second["candidates"][1]["score"]) == (0, None)
    # One slot does both candidates now.
    assert [(c["status"], c["slot"]) for c in third["candidates"]] == [("ok", 0)] * 2
    assert "is left out: its slot died more often" in _output(capfd)


def test_a_hung_worker_is_named_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So are the workers that wait for it: from outside they look the same."""
    fault = {"role": "worker", "index": 1, "phase": "main_train", "step": 4, "action": "hang"}
    monkeypatch.setenv(VARIABLE, json.dumps([fault]))
    resident = (
        r"worker {} \(pid \d+, worker-\S+\.err in Ray's session logs\): \d+ of \d+ steps, silent"
    )
    words = r"no progress of main_train for \d+ s .*timeouts\.no_progress_s: 20.*" + ".*".join(
        resident.format(rank) for rank in range(2)
    )
    timeouts = {"no_progress_s": 20, "stop_s": 2}
    with pytest.raises(PoolError, match=words):
        run(small_job(tmp_path, learning_rate=NO_CANDIDATES, timeouts=timeouts))
    assert placement_groups() == set()


@pytest.mark.parametrize(
    ("title", "words"),
    [("Mailbox", "the mailbox, the process .* has died"), ("PoolLauncher", "pool ended before")],
)
def test_the_death_of_a_process_that_is_not_restarted_is_reported(
    tmp_path: Path, title: str, words: str
) -> None:
    """The checkpoints are there to resume from."""

    def kill() -> None:
        victim = next(p for p in psutil.process_iter(["cmdline"]) if _is(p, title))
        os.kill(victim.pid, signal.SIGKILL)

    with after_the_first_checkpoint(tmp_path, kill), pytest.raises(PoolError, match=words):
        run(endless_job(tmp_path))
    (run_dir,) = tmp_path.iterdir()
    assert read_index(run_dir / "checkpoints")
    assert placement_groups() == set()


def test_a_storage_that_vanishes_ends_the_run_and_is_named(tmp_path: Path) -> None:
    """Nothing is written in its place: that would be a run without its beginning."""
    storage, elsewhere = tmp_path / "runs", tmp_path / "elsewhere"
    with (
        after_the_first_checkpoint(storage, lambda: storage.rename(elsewhere)),
        pytest.raises(StorageError, match=rf"^{storage}/\S+ cannot be written: "),
    ):
        run(endless_job(storage))
    (run_dir,) = elsewhere.iterdir()
    assert read_index(run_dir / "checkpoints")
    assert not list(storage.glob("*/*.json*"))
    assert placement_groups() == set()


def test_sigterm_ends_a_run_and_keeps_its_checkpoints(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with (
        after_the_first_checkpoint(tmp_path, lambda: os.kill(os.getpid(), signal.SIGTERM)),
        pytest.raises(Terminated),
    ):
        run(endless_job(tmp_path))
    (run_dir,) = tmp_path.iterdir()
    checkpoints = Checkpoints(run_dir / "checkpoints", CheckpointSection())
    assert checkpoints.latest is not None
    assert checkpoints.drop_damaged() == []
    assert f"terminated; saved through {checkpoints.latest.reached}; resume with" in _output(capfd)
    assert placement_groups() == set()


def endless_job(storage: Path) -> Job:
    timeouts = {"stop_s": 2}
    return small_job(
        storage, epochs=2000, learning_rate=NO_CANDIDATES, timeouts=timeouts, **ONE_WORKER
    )


@contextmanager
def after_the_first_checkpoint(storage: Path, act: Callable[[], object]) -> Iterator[None]:
    """Do something while the block runs."""
    ended = threading.Event()

    def wait_and_act() -> None:
        while not list(storage.glob("*/checkpoints/index.json")):
            if ended.wait(0.02):
                return
        act()

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    try:
        yield
    finally:  # or a run that fails early would keep the tests from ending
        ended.set()
        thread.join()


def _is(process: psutil.Process, title: str) -> bool:
    # Ray writes the class of an actor into its command line.
    return f"ray::{title}" in " ".join(process.info["cmdline"] or [])


def _output(capfd: pytest.CaptureFixture[str]) -> str:
    return " ".join(capfd.readouterr().out.split())
