"""The command as a user runs it: a process, its output, its exit code, Ctrl-C, resume."""

from __future__ import annotations

import ipaddress
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from small_jobs import read_lines, without_times

from raytrain_opt.pools.faults import VARIABLE
from raytrain_opt.train.checkpoint import read_index, read_weights

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[2]
JOB, EPOCHS = "jobs/quickstart.yaml", 8
# All that a command starts inherits this mark.
MARK = "RAYTRAIN_OPT_TEST"
ENVIRONMENT = {**os.environ, MARK: uuid.uuid4().hex}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "raytrain_opt", "run", *arguments]


def start(*arguments: str, hang_in: int) -> subprocess.Popen[str]:
    """It will hang in the main training of this epoch, after its round was committed."""
    fault = {"role": "worker", "phase": "main_train", "epoch": hang_in, "step": 2}
    faults = json.dumps([{**fault, "action": "hang"}])
    # A session of its own, so that a Ctrl-C reaches it as it would from a terminal.
    return subprocess.Popen(
        command(*arguments),
        cwd=ROOT,
        env={**ENVIRONMENT, VARIABLE: faults},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def lines_of(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout is not None
    yield from process.stdout


@pytest.mark.timeout(1800)
def test_cut_and_resumed_equals_uncut(tmp_path: Path) -> None:
    """The quickstart as it stands; and once more, interrupted in the middle of an epoch, then
    its driver killed in another, each time resumed by the same command.
    """
    whole = _run(JOB, "--set", f"storage_path={tmp_path / 'whole'}")
    (whole_dir,) = (tmp_path / "whole").iterdir()
    assert read_lines(str(whole_dir), "epochs")[-1]["test_accuracy"] >= 0.95
    assert "candidates tried" in whole
    assert f"{whole_dir}/result.json" in whole
    assert "Trial" not in whole
    assert _still_there() == []

    again = [JOB, "--set", f"storage_path={tmp_path / 'cut'}", "--set", "resume=auto"]
    with start(*again, hang_in=3) as process:
        cut_dir = _wait_for_the_round(process, tmp_path / "cut", epoch=3)
        assert _reachable_from_elsewhere() <= {"ray::RayTrainWorker"}  # torch's store
        os.killpg(process.pid, signal.SIGINT)
        output = "".join(lines_of(process))
        assert process.wait(60) == 130
    assert "kept up to round 1 of epoch 3" in output
    assert f"raytrain-opt run --resume {cut_dir}" in output
    assert "Traceback" not in output
    assert _still_there() == []

    with start(*again, hang_in=6) as process:
        _wait_for_the_round(process, tmp_path / "cut", epoch=6)
        process.kill()
        process.wait(60)
    # While Ray's own agents take their time to end.
    resumed = _run(*again)
    assert _still_there() == []
    assert f"going on with {cut_dir}" in resumed
    assert "resumed after round 1 of epoch 6" in resumed
    assert _numbers(cut_dir) == _numbers(whole_dir)
    end = f"checkpoints/epoch-{EPOCHS:04d}"
    mine, other = read_weights(cut_dir / end), read_weights(whole_dir / end)
    assert all(mine[name].equal(other[name]) for name in other)


def test_a_wrong_job_ends_with_2_and_no_traceback(tmp_path: Path) -> None:
    wrong = ["--set", "epochs=0", "--set", "model=resnet9", "--set", f"storage_path={tmp_path}"]
    done = subprocess.run(
        command("jobs/quickstart.yaml", *wrong), cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "epochs" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def _run(*arguments: str) -> str:
    done = subprocess.run(
        command(*arguments), cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _wait_for_the_round(process: subprocess.Popen[str], storage: Path, epoch: int) -> Path:
    """Until the round of this epoch is committed; its main training hangs. The run directory."""
    while process.poll() is None:
        for folder in storage.glob("*/checkpoints"):
            commits = read_index(folder)
            if commits and (commits[-1].rounds, commits[-1].epoch) == (1, epoch - 1):
                return folder.parent
        time.sleep(0.05)
    pytest.fail(f"it ended without the round of epoch {epoch} in {storage}")


def _numbers(run_dir: Path) -> list[dict[str, object]]:
    return without_times(read_lines(str(run_dir), "rounds"))


def _still_there() -> list[str]:
    """What the commands started and left, after some seconds in which it may end."""
    deadline_s = time.monotonic() + 120  # agents of Ray take a minute
    while left := [p.name() for p in psutil.process_iter() if _is_ours(p)]:
        if time.monotonic() > deadline_s:
            return left
        time.sleep(0.2)
    return []


def _reachable_from_elsewhere() -> set[str]:
    """Names of the commands' processes that listen on more than loopback."""
    names = {p.pid: p.name() for p in psutil.process_iter() if _is_ours(p)}
    return {
        names[at.pid]
        for at in psutil.net_connections(kind="inet")
        if at.pid in names and at.status == psutil.CONN_LISTEN and not _is_loopback(at.laddr.ip)
    }


def _is_loopback(ip: str) -> bool:
    # gRPC listens on IPv4 addresses in the form of IPv6.
    return ipaddress.ip_address(ip.removeprefix("::ffff:")).is_loopback


def _is_ours(process: psutil.Process) -> bool:
    try:
        ended = process.status() == psutil.STATUS_ZOMBIE
        return not ended and process.environ().get(MARK) == ENVIRONMENT[MARK]
    except psutil.Error:
        return False
