"""The command as a user runs it: a process, its output, its exit code, Ctrl-C, resume."""

from __future__ import annotations

import ipaddress
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

from raytrain_opt.train.checkpoint import read_index, read_weights

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[2]
JOB, EPOCHS = "jobs/quickstart.yaml", 8
# All that a command starts inherits this mark.
MARK = "RAYTRAIN_OPT_TEST"
ENVIRONMENT = {**os.environ, MARK: uuid.uuid4().hex}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "raytrain_opt", "run", *arguments]


def start(*arguments: str) -> subprocess.Popen[str]:
    # A session of its own, so that a Ctrl-C reaches it as it would from a terminal.
    return subprocess.Popen(
        command(*arguments),
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def lines_of(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout is not None
    yield from process.stdout


def test_interrupted_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    """The quickstart as it stands; and once more, cut in the middle of an epoch, after its round,
    and resumed by the same command.
    """
    whole = _run(JOB, "--set", f"storage_path={tmp_path / 'whole'}")
    (whole_dir,) = (tmp_path / "whole").iterdir()
    assert read_lines(str(whole_dir), "epochs")[-1]["test_accuracy"] >= 0.95
    assert "candidates tried" in whole
    assert f"{whole_dir}/result.json" in whole
    assert "Trial" not in whole
    assert _still_there() == []

    again = [JOB, "--set", f"storage_path={tmp_path / 'cut'}", "--set", "resume=auto"]
    with start(*again) as process:
        _wait_for_a_round(process, tmp_path / "cut", after_epoch=2)
        assert _reachable_from_elsewhere() <= {"ray::RayTrainWorker"}  # torch's store
        os.killpg(process.pid, signal.SIGINT)
        output = "".join(lines_of(process))
        assert process.wait(60) == 130
    (cut_dir,) = (tmp_path / "cut").iterdir()
    last = read_index(cut_dir / "checkpoints")[-1]
    assert (last.rounds, 2 <= last.epoch < EPOCHS) == (1, True)
    assert f"kept up to {last.reached}" in output
    assert f"raytrain-opt run --resume {cut_dir}" in output
    assert "Traceback" not in output
    assert _still_there() == []

    resumed = _run(*again)
    assert f"going on with {cut_dir}" in resumed
    assert f"resumed after {last.reached}" in resumed
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


def _wait_for_a_round(process: subprocess.Popen[str], storage: Path, after_epoch: int) -> None:
    """Until a round after so many epochs is committed; its main training has just begun."""
    while process.poll() is None:
        commits = [c for at in storage.glob("*/checkpoints") for c in read_index(at)]
        if commits and commits[-1].rounds and commits[-1].epoch >= after_epoch:
            return
        time.sleep(0.002)
    pytest.fail(f"it ended without a round after epoch {after_epoch} in {storage}")


def _numbers(run_dir: Path) -> list[dict[str, object]]:
    return without_times(read_lines(str(run_dir), "rounds"))


def _still_there() -> list[str]:
    """What the commands started and left, after some seconds in which it may end."""
    deadline_s = time.monotonic() + 20
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
