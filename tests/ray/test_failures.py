"""What goes wrong in a run, and what the user gets to know of it."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import psutil
import pytest
from small_jobs import read_lines, small_job, without_times

from raytrain_opt import run
from raytrain_opt.errors import DivergedError, MemberError, PoolError, ResourcesError
from raytrain_opt.pools.faults import VARIABLE
from raytrain_opt.pools.session import placement_groups
from raytrain_opt.train.checkpoint import read_index

pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.timeout(600)]


def test_more_workers_than_the_cluster_holds(tmp_path: Path) -> None:
    job = small_job(tmp_path, workers={"count": 4, "resources": {"CPU": 1}})
    with pytest.raises(ResourcesError, match=r"4 workers of 1 CPU each do not fit: room for 2"):
        run(job)


def test_a_device_that_the_cluster_does_not_have(tmp_path: Path) -> None:
    job = small_job(tmp_path, workers={"count": 2, "use_gpu": True})
    with pytest.raises(ResourcesError, match=r"workers.use_gpu: true, but no node has a GPU"):
        run(job)


def test_an_exception_in_user_code_reaches_the_user(tmp_path: Path) -> None:
    with pytest.raises(MemberError, match="slot .*ValueError: planted failure") as caught:
        run(small_job(tmp_path, model="small_jobs:make_breaking_model"))
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
        run(small_job(tmp_path, learning_rate=learning_rate))
    (run_dir,) = tmp_path.iterdir()
    [event] = read_lines(str(run_dir), "events")
    assert event["what"] == "failed"
    assert "1e+30, 5e+29" in event["text"]
    rounds = read_lines(str(run_dir), "rounds")
    assert [line["winner"] for line in rounds] == [None, None]
    assert rounds[1]["base_lr"] == rounds[0]["base_lr"] / 2
    assert {c["status"] for line in rounds for c in line["candidates"]} == {"diverged"}


# Two whole runs and five restarts: minutes where other work slows the machine down.
@pytest.mark.timeout(1800)
def test_killed_processes_are_started_again_and_nothing_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots and workers are killed in every phase; the numbers are those of a quiet run. Every
    candidate's state is wanted, so what a killed slot had is trained again.
    """
    stpt = {"policy": "stpt", "candidates": [1.0, 0.5], "alpha": 5, "combine": "average"}
    changes = {"epochs": 4, "learning_rate": stpt}
    quiet = run(small_job(tmp_path / "quiet", **changes))
    faults = [
        {"role": "slot", "index": 1, "epoch": 1, "phase": "pretrain", "step": 3},
        {"role": "slot", "index": 0, "epoch": 2, "phase": "take_state"},
        {"role": "worker", "index": 1, "epoch": 2, "phase": "main_train"},  # before it loads
        {"role": "worker", "index": 0, "epoch": 3, "phase": "main_train", "step": 4},
        {"role": "worker", "index": 1, "phase": "evaluate", "step": 0},
    ]
    monkeypatch.setenv(VARIABLE, json.dumps(faults))
    disturbed = run(small_job(tmp_path / "hit", **changes))
    restarts = disturbed.summary["restarts"]
    assert (restarts["slot"], restarts["worker"]) == (2, 6)  # the whole group, three times
    events = read_lines(disturbed.run_dir, "events")
    assert [event["what"] for event in events] == ["restarted"] * 8
    assert all(event["cost_s"] > 0 for event in events)
    expected = without_times(read_lines(quiet.run_dir, "rounds"))
    assert without_times(read_lines(disturbed.run_dir, "rounds")) == expected
    assert {tuple(sorted(line["averaged"])) for line in expected} == {(0, 1)}
    for line in expected:
        assert line["loaded_sha256"] == [line["winner_sha256"]] * 2
    assert disturbed.test_accuracy == quiet.test_accuracy


def test_a_slot_that_dies_too_often_is_given_up_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    faults = [{"role": "slot", "index": 1, "epoch": 2, "phase": "pretrain", "always": True}]
    monkeypatch.setenv(VARIABLE, json.dumps(faults))
    result = run(small_job(tmp_path, limits={"max_restarts": 1}))
    first, second, third = read_lines(result.run_dir, "rounds")
    assert [c["status"] for c in first["candidates"]] == ["ok", "ok"]
    assert [c["status"] for c in second["candidates"]] == ["ok", "lost"]
    assert (second["winner"], second["candidates"][1]["score"]) == (0, None)
    # One slot does both candidates now.
    assert [(c["status"], c["slot"]) for c in third["candidates"]] == [("ok", 0)] * 2
    assert "is left out: its slot died more often" in _told(capfd)


def test_who_hangs_is_named_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And those that wait for it: from outside they look the same."""
    fault = {"role": "worker", "index": 1, "phase": "main_train", "step": 4, "action": "hang"}
    monkeypatch.setenv(VARIABLE, json.dumps([fault]))
    each = (
        r"worker {} \(pid \d+, worker-\S+\.err in Ray's session logs\): \d+ of \d+ steps, silent"
    )
    words = r"no progress of MainTrain for \d+ s .*limits\.stall_s: 20.*" + ".*".join(
        each.format(rank) for rank in range(2)
    )
    with pytest.raises(PoolError, match=words):
        run(small_job(tmp_path, limits={"stall_s": 20, "stop_s": 2}))
    assert placement_groups() == set()


@pytest.mark.parametrize(
    ("title", "words"),
    [("Mailbox", "the mailbox, the process .* has died"), ("Host", "pool ended before")],
)
def test_the_death_of_a_single_process_is_told(tmp_path: Path, title: str, words: str) -> None:
    """Of those that are not started again; what was committed is there to resume from."""
    over = threading.Event()
    killer = threading.Thread(target=_kill_after_first_commit, args=(tmp_path, title, over))
    killer.start()
    try:
        with pytest.raises(PoolError, match=words):
            run(small_job(tmp_path, epochs=200, limits={"stop_s": 2}))
    finally:  # or a run that fails early would keep the tests from ending
        over.set()
        killer.join()
    (run_dir,) = tmp_path.iterdir()
    assert read_index(run_dir / "checkpoints")
    assert placement_groups() == set()


def _kill_after_first_commit(storage: Path, title: str, over: threading.Event) -> None:
    while not list(storage.glob("*/checkpoints/index.json")):
        if over.wait(0.02):
            return
    victim = next(p for p in psutil.process_iter(["cmdline"]) if _is(p, title))
    os.kill(victim.pid, signal.SIGKILL)


def _is(process: psutil.Process, title: str) -> bool:
    # Ray writes what an actor is into its command line.
    return f"ray::{title}" in " ".join(process.info["cmdline"] or [])


def _told(capfd: pytest.CaptureFixture[str]) -> str:
    return " ".join(capfd.readouterr().out.split())
