"""Processes that the fork server starts; a program stands in for Ray's but in the last test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from raytrain_opt.cluster import fork_client
from raytrain_opt.cluster.fork_server import fork_server

pytestmark = pytest.mark.timeout(240)

REPORT = """
import gc, json, numpy, os, random, sys, tempfile
report = {"arguments": sys.argv, "parent": os.getppid(), "group": os.getpgrp(),
          "loaded": [n for n in ("torch", "ray") if n in sys.modules], "collects": gc.isenabled(),
          "directory": os.getcwd(), "variable": os.environ.get("RAY_A"), "niceness": os.nice(0),
          "folder": tempfile.gettempdir(), "drawn": [numpy.random.rand(), random.random()]}
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def variables() -> Iterator[dict[str, str]]:
    with fork_server() as variables:
        yield variables


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "default_worker.py"
    path.write_text(REPORT)
    (tmp_path / "setup_worker.py").write_text("print('\"as Ray does\"')")
    return path


def start(variables: dict[str, str], program: Path, **env_vars: str) -> Any:
    context = json.dumps({"env_vars": env_vars})
    command = [sys.executable, fork_client.__file__, str(program), "--node-id=1"]
    command += ["--language=PYTHON", f"--serialized-runtime-env-context={context}"]
    process = subprocess.Popen(
        ["nice", "-n", "15", *command],
        cwd=program.parent,
        env={**os.environ, **variables, "TMPDIR": str(program.parent)},
        stdout=subprocess.PIPE,
        process_group=0,
    )
    report = json.loads(process.communicate()[0])  # ends when the fork has closed its output
    if isinstance(report, dict):
        assert report["group"] == process.pid
    return report


def test_a_fork_is_what_was_asked_for(variables: dict[str, str], program: Path) -> None:
    report, other = (start(variables, program, RAY_A="1") for _ in range(2))
    assert not {*report["drawn"]} & {*other["drawn"]}
    assert report["parent"] != os.getpid()
    assert report["loaded"] == ["torch"], "Ray's imports draw identities, which forks would share"
    assert report["directory"] == report["folder"] == str(program.parent)
    assert (report["variable"], report["arguments"]) == ("1", [str(program), "--node-id=1"])
    assert (report["niceness"], report["collects"]) == (min(19, os.nice(0) + 15), True)
    assert start(variables, program, OMP_NUM_THREADS="7") == "as Ray does"


def test_processes_start_without_a_server_that_was_killed(program: Path) -> None:
    others = psutil.Process().children()
    with fork_server() as variables:
        server = _server(others)
        server.send_signal(signal.SIGKILL)
        server.wait(60)
        assert start(variables, program) == "as Ray does"


def test_the_server_ends_with_the_block_and_with_its_driver() -> None:
    others = psutil.Process().children()
    with fork_server() as variables:
        server = _server(others)
    assert not server.is_running()
    assert not Path(variables[fork_client.SOCKET_VARIABLE]).exists()
    program = """
import time
from raytrain_opt.cluster.fork_server import fork_server
with fork_server():
    print(flush=True)
    time.sleep(60)
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as driver:
        assert driver.stdout is not None
        driver.stdout.readline()
        server = _server([], driver.pid)
        driver.kill()
    server.wait(timeout=120)  # it looks after it has imported torch


def test_a_user_can_do_without_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(fork_client.SOCKET_VARIABLE, "0")
    with fork_server() as variables:
        assert variables == {}


def test_ray_starts_before_the_server_is_ready(tmp_path: Path) -> None:
    """Ray starts no others in place of its first processes, which the driver would wait for."""
    program = """
import contextlib, socket, sys
from raytrain_opt.cluster import connection, fork_client
from raytrain_opt.pools.launcher import environment
listener = socket.create_server(sys.argv[1], family=socket.AF_UNIX)
connection.fork_server = lambda: contextlib.nullcontext({fork_client.SOCKET_VARIABLE: sys.argv[1]})
with connection.ray_session(None, verbose=False, environment=environment(local=True, start_s=9)):
    print("connected")
"""
    command = [sys.executable, "-c", program, str(tmp_path / "socket")]
    assert subprocess.check_output(command, timeout=120) == b"connected\n"


def _server(others: list[psutil.Process], pid: int | None = None) -> psutil.Process:
    """Return the other server of a process; its command line shows a moment after its start."""
    for _ in range(12_000):
        for child in psutil.Process(pid).children():
            if child not in others and "raytrain_opt.cluster.fork_server" in child.cmdline():
                return child
        time.sleep(0.01)
    raise TimeoutError
