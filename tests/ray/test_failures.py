"""What goes wrong in a run, and what the user gets to know of it."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import psutil
import pytest
from small_jobs import read_lines, small_job, without_times

from raytrain_opt import run
from raytrain_opt.errors import DivergedError, MemberError, ResourcesError
from raytrain_opt.pools.session import placement_groups

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
    rounds = read_lines(str(run_dir), "rounds")
    assert [line["winner"] for line in rounds] == [None, None]
    assert rounds[1]["base_lr"] == rounds[0]["base_lr"] / 2
    assert {c["status"] for line in rounds for c in line["candidates"]} == {"diverged"}


# Two whole runs and two restarts: minutes where other work slows the machine down.
@pytest.mark.timeout(900)
def test_killed_processes_are_started_again_and_nothing_changes(tmp_path: Path) -> None:
    """A slot and a worker are killed in the middle; the numbers are those of a quiet run."""
    quiet = run(small_job(tmp_path / "quiet", epochs=8))
    killed: list[str] = []
    over = threading.Event()
    killer = threading.Thread(target=_kill_when_running, args=(tmp_path / "hit", killed, over))
    killer.start()
    try:
        disturbed = run(small_job(tmp_path / "hit", epochs=8))
    finally:  # or a run that fails early would keep the tests from ending
        over.set()
        killer.join()
    assert len(killed) == 2
    assert disturbed.summary["restarts"]["slot"] >= 1
    assert disturbed.summary["restarts"]["worker"] >= 1
    expected = without_times(read_lines(quiet.run_dir, "rounds"))
    assert without_times(read_lines(disturbed.run_dir, "rounds")) == expected
    assert disturbed.test_accuracy == quiet.test_accuracy


def _kill_when_running(storage: Path, killed: list[str], over: threading.Event) -> None:
    """Kill a slot after the first epoch, and a worker after the second."""
    for epochs, title in ((1, "ImplicitFunc"), (2, "RayTrainWorker")):
        while _epochs_done(storage) < epochs:
            if over.wait(0.02):
                return
        victim = next(p for p in psutil.process_iter(["cmdline"]) if _is(p, title))
        os.kill(victim.pid, signal.SIGKILL)
        killed.append(title)


def _is(process: psutil.Process, title: str) -> bool:
    # Ray writes what an actor is into its command line.
    return title in " ".join(process.info["cmdline"] or [])


def _epochs_done(storage: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in storage.glob("*/epochs.jsonl"))
