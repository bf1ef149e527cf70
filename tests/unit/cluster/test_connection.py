"""What a Ray that is started for a run gets, without starting one."""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import RaySystemError

from raytrain_opt.cluster import connection
from raytrain_opt.cluster.connection import watch_preemption
from raytrain_opt.cluster.fork_client import SOCKET_VARIABLE
from raytrain_opt.errors import PoolError
from raytrain_opt.execution.signals import Terminated, stop_on_signals


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replace Ray and the fork server by records of what happened, in order."""
    calls: list[Any] = []

    @contextmanager
    def fork_server() -> Iterator[dict[str, str]]:
        yield {SOCKET_VARIABLE: "/socket"}
        calls.append("server ended")

    def init(**options: Any) -> None:
        calls.append((options["address"], os.environ.get(SOCKET_VARIABLE), os.environ.get("A")))

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv(SOCKET_VARIABLE, raising=False)
    monkeypatch.setattr(connection, "fork_server", fork_server)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: calls.append("shutdown"))
    return calls


def test_a_ray_of_our_own_starts_beside_others_and_forks_its_processes(calls: list[Any]) -> None:
    """Without an address Ray would connect to a cluster that `ray start` left on this machine."""
    with connection.ray_session(None, verbose=False, environment={"A": "1"}) as local:
        assert local
        assert calls == [("local", "/socket", "1")]
        assert SOCKET_VARIABLE not in os.environ
    assert calls[1:] == ["shutdown", "server ended"]


def test_only_the_variables_of_ray_and_those_that_were_given_are_taken_back(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """User code, which another thread calls while Ray starts, may set others."""
    for name in ("HF_HOME", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("A", "0")
    variables = {"HF_HOME": "/data", "RAY_AUTH_MODE": "token"}
    monkeypatch.setattr(ray, "init", lambda **_: os.environ.update(variables))
    with connection.ray_session(None, verbose=False, environment={"A": "1"}):
        assert (os.environ["HF_HOME"], os.environ["A"]) == ("/data", "0")
        assert "RAY_AUTH_MODE" not in os.environ
    del os.environ["HF_HOME"]


@pytest.mark.parametrize("length", [1, 100])
def test_a_ray_of_our_own_lives_in_a_private_folder_with_a_short_path(
    monkeypatch: pytest.MonkeyPatch, calls: list[Any], length: int
) -> None:
    with TemporaryDirectory(dir="/tmp") as parent:
        long = Path(parent) / ("x" * length)
        long.mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(long))
        folders: list[Path] = []
        monkeypatch.setattr(ray, "init", lambda **o: folders.append(Path(o["_temp_dir"])))
        with connection.ray_session(None, verbose=False):
            [folder] = folders
            assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
            assert (long in folder.parents) == (length == 1)
            assert (
                len(f"{folder}/session_2026-11-25_14-41-48_202214_4194304/sockets/plasma_store")
                <= 107
            )
        assert not folder.parent.exists()


def test_a_ray_that_does_not_start_starts_again_and_keeps_the_logs_that_the_error_names(
    monkeypatch: pytest.MonkeyPatch, calls: list[Any]
) -> None:
    def fail(**_: Any) -> None:
        calls.append("init")
        raise ChildProcessError("planted failure")

    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(PoolError, match="planted failure.*session_latest/logs") as caught:
        connection.ray_session(None, verbose=False).__enter__()
    assert calls.count("init") == 2
    folder = Path(str(caught.value).rpartition("see ")[2]).parents[2]
    assert folder.is_dir()
    assert not (folder / ".owner").exists()  # else the next process removes the folder
    shutil.rmtree(folder)


def test_a_cluster_starts_its_processes_by_itself(calls: list[Any]) -> None:
    with connection.ray_session("auto", verbose=False) as local:
        assert not local
    assert calls == [("auto", None, None), "shutdown"]


def test_a_connection_that_existed_before_stays(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    with connection.ray_session(None, verbose=False) as local:
        assert not local
    assert calls == []


def test_the_token_of_ray_is_readable_by_its_owner_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: list[Any]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ray").mkdir()
    token = tmp_path / ".ray" / "auth_token"
    token.touch(0o644)
    with connection.ray_session(None, verbose=False, environment={}):
        assert token.stat().st_mode & 0o777 == 0o600


# A node that will be taken away: the driver's ends the run, another one does not.


class Notices:
    """What Ray says at each look: identities of nodes, or an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *looks: set[str] | Exception) -> None:
        self.looks = list(looks)
        context = SimpleNamespace(get_node_id=lambda: "driver")
        monkeypatch.setattr(connection, "_NOTICE_POLL_S", 0.001)
        monkeypatch.setattr(connection.ray, "get_runtime_context", lambda: context)
        monkeypatch.setattr(connection, "draining_nodes", self.look)

    def look(self) -> set[str]:
        look = self.looks.pop(0) if self.looks else set[str]()
        if isinstance(look, Exception):
            raise look
        return look


def wait_for_all(notices: Notices) -> None:
    deadline_s = time.monotonic() + 30
    while notices.looks and time.monotonic() < deadline_s:
        time.sleep(0.001)


def test_the_driver_ends_when_its_node_will_be_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    notices, notes = Notices(monkeypatch, RaySystemError("GCS"), set(), {"driver"}), list[str]()
    with pytest.raises(Terminated), stop_on_signals(), watch_preemption(notes.append):
        time.sleep(30)
    assert notes == ["this node will be taken away: the run ends"]
    assert notices.looks == []


def test_the_run_continues_when_another_node_will_be(monkeypatch: pytest.MonkeyPatch) -> None:
    notices, notes = Notices(monkeypatch, {"a"}, {"a"}, {"a", "b"}, set()), list[str]()
    with stop_on_signals(), watch_preemption(notes.append):
        wait_for_all(notices)
    assert [note.split(" will", 1)[0] for note in notes] == ["1 node", "2 nodes"]
