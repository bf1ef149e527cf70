"""The command as a user runs it: its output, exit code, reaction to SIGTERM, and resume."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from raytrain_opt import RunResult
from raytrain_opt.train.checkpoint import Checkpoint, read_index, read_weights
from tests.support.small_jobs import EPOCHS, read_lines, without_times

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[3]
JOB = "jobs/quickstart.yaml"
# As the run that is compared with.
SHORT = ["--set", "workers.threads=1", "--set", f"epochs={EPOCHS}"]
# Every process that a command starts inherits its mark: one of these tests, and of the command.
MARK, TESTS = "RAYTRAIN_OPT_TEST", uuid.uuid4().hex


def environment(name: str) -> dict[str, str]:
    return {**os.environ, MARK: f"{TESTS} {name}"}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "raytrain_opt", "run", *arguments]


def start(name: str, epoch: int, *arguments: str, **fault: object) -> subprocess.Popen[str]:
    """Start a command in which a worker hangs or waits in an epoch, after its round is saved."""
    where = {"role": "worker", "phase": "main_train", "epoch": epoch, "step": 2, "index": 0}
    faults = json.dumps([{**where, **fault}])
    # A session of its own, so that a signal reaches all of its processes as from a terminal.
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.faults", faults, "run", *arguments],
        cwd=ROOT,
        env=environment(name),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def lines_of(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout is not None
    yield from process.stdout


@pytest.mark.timeout(1800)
def test_a_killed_terminated_and_resumed_run_equals_an_uninterrupted_one(
    tmp_path: Path, finished: RunResult
) -> None:
    """The driver of the quickstart is killed in the middle of an epoch, after a checkpoint in it.
    In another, SIGTERM reaches it and all processes of its group, as `timeout` and Slurm send it,
    and it saves the step that it has reached. The same command resumes it each time.
    """
    arguments = [JOB, "--set", f"storage_path={tmp_path}", "--set", "resume=auto", *SHORT]
    every = ["--set", "checkpoint.every=4"]
    with start("killed", 1, *arguments, *every, action="wait", always=True) as process:
        run_dir = _wait_for(process, tmp_path, lambda latest: latest.epoch == 0 < latest.steps)
        process.kill()
        process.wait(60)
    saved = read_index(run_dir / "checkpoints")[-1].text
    # At once, while Ray's own agents are still ending.
    with start("terminated", 3, *arguments, action="wait") as process:
        assert _wait_for(process, tmp_path, lambda c: (c.rounds, c.epoch) == (1, 2)) == run_dir
        assert _processes_listening_beyond_loopback() <= {"ray::RayTrainWorker"}  # torch's store
        time.sleep(2)  # until the workers have begun to train the epoch
        os.killpg(process.pid, signal.SIGTERM)
        output = "".join(lines_of(process))
        assert process.wait(60) == 143
    assert f"resuming {run_dir}" in output
    assert f"resumed after {saved}" in output
    [step] = re.findall(r"saved through step (\d+) of epoch 3", output)
    assert f"raytrain-opt run --resume {run_dir}" in output
    assert "Traceback" not in output
    assert _leftover_processes("terminated") == []

    resumed = _run(*arguments)
    assert _leftover_processes() == []
    assert f"resumed after step {step} of epoch 3" in resumed
    assert "trained with" in resumed
    assert "Trial" not in resumed
    expected_dir = Path(finished.run_dir)
    assert _numbers(run_dir) == _numbers(expected_dir)
    end = f"checkpoints/epoch-{EPOCHS:04d}"
    weights = read_weights(run_dir / end)
    expected_weights = read_weights(expected_dir / end)
    assert all(weights[name].equal(expected_weights[name]) for name in expected_weights)


def _run(*arguments: str) -> str:
    done = subprocess.run(
        command(*arguments), cwd=ROOT, env=environment("resumed"), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _wait_for(
    process: subprocess.Popen[str], storage: Path, is_it: Callable[[Checkpoint], bool]
) -> Path:
    """Wait until the latest checkpoint is such a one; return the run directory."""
    while process.poll() is None:
        for folder in storage.glob("*/checkpoints"):
            checkpoints = read_index(folder)
            if checkpoints and is_it(checkpoints[-1]):
                return folder.parent
        time.sleep(0.05)
    pytest.fail("no such checkpoint; the run ended with:\n" + "".join(lines_of(process)))


def _numbers(run_dir: Path) -> list[dict[str, object]]:
    return without_times(read_lines(str(run_dir), "rounds"))


def _leftover_processes(name: str = "") -> list[str]:
    """Return processes of a command, or of all, that do not end within two minutes."""
    deadline_s = time.monotonic() + 120  # agents of Ray take a minute
    while left := [p.name() for p in psutil.process_iter() if _is_ours(p, name)]:
        if time.monotonic() > deadline_s:
            return left
        time.sleep(0.2)
    return []


def _processes_listening_beyond_loopback() -> set[str]:
    """Return names of the commands' processes that listen on more than loopback."""
    names = {p.pid: p.name() for p in psutil.process_iter() if _is_ours(p)}
    return {
        names[connection.pid]
        for connection in psutil.net_connections(kind="inet")
        if connection.pid in names
        and connection.status == psutil.CONN_LISTEN
        and not _is_loopback(connection.laddr.ip)
    }


def _is_loopback(ip: str) -> bool:
    # gRPC listens on IPv4 addresses in the form of IPv6.
    return ipaddress.ip_address(ip.removeprefix("::ffff:")).is_loopback


def _is_ours(process: psutil.Process, name: str = "") -> bool:
    try:
        ended = process.status() == psutil.STATUS_ZOMBIE
        return not ended and process.environ().get(MARK, "").startswith(f"{TESTS} {name}")
    except psutil.Error:
        return False
