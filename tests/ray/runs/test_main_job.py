"""The quickstart on a real local Ray: what it decides, records, survives and leaves."""

from __future__ import annotations

import os
import random
import re
import time
from pathlib import Path

import psutil
import pytest
import ray

from raytrain_opt import RunResult, run
from raytrain_opt.cluster.connection import free_resources
from raytrain_opt.commands.doctor import diagnose
from raytrain_opt.paths import RunPaths
from tests.support.faults import injected
from tests.support.s3_server import S3Server, cut, refuse
from tests.support.small_jobs import quickstart, read_lines, small_job, without_times

pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.timeout(600)]


def test_the_quickstart_learns(finished: RunResult) -> None:
    assert finished.test_metric is not None
    assert finished.test_metric >= 0.95


def test_the_report_is_written(finished: RunResult) -> None:
    page = (Path(finished.run_dir) / "report.html").read_text()
    assert f"{finished.test_metric:.2%}".replace("%", " %") in page


def test_no_file_of_a_run_holds_what_is_secret_in_the_environment(finished: RunResult) -> None:
    secret = os.environ["MY_SECRET_TOKEN"].encode()
    files = [path for path in Path(finished.run_dir).rglob("*") if path.is_file()]
    assert Path(finished.run_dir, "result.json") in files
    assert [path for path in files if secret in path.read_bytes()] == []


def test_nothing_of_ours_stays_alive(finished: RunResult) -> None:
    ours = ("PoolLauncher", "Mailbox", "RayTrainWorker", "ImplicitFunc", "TrainController")
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s:
        titles = {process.name().removeprefix("ray::") for process in _descendants()}
        # All CPUs are free again when the placement groups are gone.
        free = ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"]
        if free and not any(title.startswith(ours) for title in titles):
            return
        time.sleep(0.2)
    pytest.fail(f"still there: {titles}, CPUs free: {free}")


def test_the_doctor_finds_this_machine_fit_or_says_why_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workers = {"count": 2, "resources": {"CPU": 0.5, "memory": 1e8}}
    assert diagnose(small_job(tmp_path, workers=workers), None) == 0
    output = capsys.readouterr().out
    for about in ("Ray", "job", "versions", "storage", "room"):
        assert re.search(rf"│ ok +│ {about} ", output), output
    assert re.search(r"2 workers and \d slots fit", output), output
    assert not list(tmp_path.iterdir())
    too_large = small_job(tmp_path, workers={"count": 2, "resources": {"CPU": 7}})
    assert diagnose(too_large, None) == 1
    assert re.search(r"│ error +│ room ", capsys.readouterr().out)


@pytest.mark.usefixtures("without_plots")
def test_killed_processes_are_restarted_and_nothing_changes(
    finished: RunResult, s3: S3Server
) -> None:
    """Kill a slot, the winner's slot, and a worker at a random step of a real training.

    The worker dies after a checkpoint within an epoch, from which the others continue. A storage
    that refuses requests and loses connections changes no number either.
    """
    chance = random.Random(seed := random.randrange(10**9))
    print(f"seed of the random kill: {seed}")
    epochs = 3  # a slot that died in the second is needed again
    epoch_steps = finished.summary.steps_per_epoch
    kept = epoch_steps - epoch_steps * 3 // 4
    every = (epoch_steps - kept) // 2
    killed = {"index": chance.randrange(2), "step": chance.randrange(every)}
    faults = [
        {"role": "slot", "index": 1, "epoch": 1, "phase": "pretrain", "step": 3},
        {"role": "slot", "epoch": 2, "phase": "send_candidate_state"},
        {"role": "worker", "epoch": 2, "phase": "main_train", "from_step": kept + every, **killed},
    ]
    uri = s3.new_uri()
    s3.faults.extend([None, refuse("SlowDown"), None, cut] * 20)
    with injected(faults):
        disturbed = run(quickstart(uri, epochs=epochs, checkpoint={"every": every}))
    assert len(s3.faults) < 50
    restarts = disturbed.summary.restarts
    assert (restarts["slot"], restarts["worker"]) == (2, 2)
    run_dir = str(RunPaths.existing(disturbed.run_dir, write=False).local)
    events = read_lines(run_dir, "events")
    assert [event["kind"] for event in events] == ["restarted"] * 4
    assert all(event["silent_s"] > 0 for event in events)
    expected = without_times(read_lines(finished.run_dir, "rounds"))[:epochs]
    assert without_times(read_lines(run_dir, "rounds")) == expected
    recorded = read_lines(finished.run_dir, "epochs")[epochs - 1]
    assert disturbed.test_metric == recorded["test_metrics"]["accuracy"]


def test_resources_that_others_hold_are_not_free() -> None:
    def wait_for(free_cpus: int) -> None:
        deadline_s = time.monotonic() + 60
        while free_resources()[0].get("CPU", 0) != free_cpus:
            assert time.monotonic() < deadline_s
            time.sleep(0.1)

    wait_for(2)
    group = ray.util.placement_group([{"CPU": 1}])
    # Ray 2.60 may never return the CPU of a group that is removed before it is ready.
    assert group.wait(60)
    wait_for(1)
    ray.util.remove_placement_group(group)
    wait_for(2)


def _descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)
