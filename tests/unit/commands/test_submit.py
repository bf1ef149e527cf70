"""Submitting a job: what prevents it, and what is downloaded afterwards."""

from __future__ import annotations

import base64
import os
import socket
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner

from raytrain_opt.cli import main
from raytrain_opt.commands import download
from raytrain_opt.commands.download import MARKER, pack_files, unpack_files
from raytrain_opt.commands.submit import _download, _relative_path, _show_lines
from raytrain_opt.errors import ClusterError, JobError
from raytrain_opt.remote.log_markers import (
    ANNOUNCE_VARIABLE,
    announce_run_dir,
    find_marker,
    is_marker,
    marker_line,
)
from raytrain_opt.storage import local_path

JOB = "model: resnet8\ndata: digits\nepochs: 1\nglobal_batch_size: 8\n"


@pytest.fixture(autouse=True)
def _isolate_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Work in a folder with a job; restore the variables that `connect` sets."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here/job.yaml").write_text(JOB)
    monkeypatch.chdir(tmp_path / "here")
    for name in ("RAY_API_SERVER_ADDRESS", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))


@contextmanager
def serve_status(status: int) -> Iterator[str]:
    """Yield the address of a server that answers every request with this status."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # noqa: N802
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def submit(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["submit", *arguments])
    assert not isinstance(result.exception, AssertionError)
    return result.exit_code, result.stderr


@pytest.mark.parametrize(
    ("status", "token", "words"),
    [
        (401, "", "--address: the cluster requires a token, and none was found on this machine"),
        (404, "mine", "is not a dashboard of this Ray version"),
    ],
    ids=["no token", "another server"],
)
def test_a_server_that_takes_no_job_is_explained(
    tmp_path: Path, status: int, token: str, words: str
) -> None:
    if token:
        (tmp_path / "token").write_text(token)
    with serve_status(status) as address:
        code, message = submit("job.yaml", "--address", address)
    assert code == 2
    assert words in message


def test_a_wrong_token_is_named_by_its_source_not_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("planted-secret" * 4)
    with serve_status(403) as address:
        code, message = submit("job.yaml", "--address", address)
        monkeypatch.setenv("RAY_AUTH_TOKEN", "planted-secret")
        from_variable = submit("job.yaml", "--address", address)
    assert code == 2
    assert f"the cluster refuses the token in {tmp_path / 'token'}" in message
    assert "the cluster refuses the token in RAY_AUTH_TOKEN" in from_variable[1]
    assert "planted-secret" not in message + from_variable[1]


def test_a_token_that_the_mode_does_not_send(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("of the cluster")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with serve_status(401) as address:
        code, message = submit("job.yaml", "--address", address)
    assert code == 2
    assert "RAY_AUTH_MODE=disabled sends none" in message
    assert "; set RAY_AUTH_MODE=token" in message


def test_no_server_answers(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("mine")
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{reserved.getsockname()[1]}"
        code, message = submit("job.yaml", "--address", address)
    assert code == 2
    assert "no dashboard of a Ray cluster answers at this address" in message
    assert "ray dashboard CLUSTER.yaml" in message


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (RuntimeError("Request failed with status code 413: Maximum request body size"), True),
        (ValueError("Package size (600.00MiB) exceeds the maximum size of 500.00MiB"), True),
        (ConnectionError("Failed to connect to Ray"), False),
        (PermissionError("secret.key: Permission denied"), False),
    ],
)
def test_a_job_that_cannot_be_sent(
    monkeypatch: pytest.MonkeyPatch, error: Exception, hint: bool
) -> None:
    class Client:
        def get_address(self) -> str:
            return "http://head:8265"

        def submit_job(self, **_: object) -> str:
            raise error

    monkeypatch.setattr("raytrain_opt.commands.submit.connect", lambda _: Client())
    code, message = submit("job.yaml")
    assert code == 1
    assert f"error: the job could not be sent to http://head:8265: {error}" in message
    assert (".rayignore" in message) == hint


def test_the_address_of_ray_is_not_that_of_the_dashboard() -> None:
    code, message = submit("job.yaml", "--address", "ray://head:10001")
    assert code == 2
    assert "must be the address of the head's dashboard, http://HOST:PORT" in message


def test_a_wrong_job_is_reported_before_the_cluster_is_contacted() -> None:
    code, message = submit("job.yaml", "--set", "epochs=0", "--address", "http://127.0.0.1:1")
    assert code == 2
    assert "epochs" in message
    assert "dashboard" not in message


def test_a_job_outside_this_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    assert _relative_path("job.yaml") == "job.yaml"
    with pytest.raises(JobError, match="must be in this directory or below"):
        _relative_path("../job.yaml")


def test_the_run_directory_is_a_line_for_programs_that_only_submit_asks_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(ANNOUNCE_VARIABLE, raising=False)
    announce_run_dir("runs/r")
    assert capsys.readouterr().out == ""
    monkeypatch.setenv(ANNOUNCE_VARIABLE, "1")
    announce_run_dir("s3://bucket/a run: ü")
    log = f"Running entrypoint\n{capsys.readouterr().out}epoch 1/2\n"
    assert find_marker(log, "run_dir") == "s3://bucket/a run: ü"
    assert find_marker(log, "files") is None
    assert find_marker("epoch 1/2\n", "run_dir") is None


def test_the_last_complete_marker_counts() -> None:
    lines = [marker_line("run_dir", "a"), marker_line("run_dir", "b"), '{"raytrain_opt": {"run_d']
    assert all(map(is_marker, lines))
    assert find_marker("\n".join(lines), "run_dir") == "b"


def test_lines_for_programs_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    log = f"epoch 1/2\n{marker_line('run_dir', 'runs/r')}\nepoch 2"
    position = _show_lines(log, 0)
    assert _show_lines(f"{log}/2\n", position) == len(log) + 3
    assert capsys.readouterr().out == "epoch 1/2\nepoch 2/2\n"


def test_files_of_a_run_travel_in_one_line_of_a_log(tmp_path: Path) -> None:
    contents = {"result.json": '{"wall_s": 1}\n', "report.html": "<p>grüße</p>\n"}
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    line = pack_files(str(tmp_path))
    assert "\n" not in line
    files = find_marker(f"ready\n{line}\n", MARKER)
    assert files is not None
    paths = unpack_files(files, tmp_path / "runs/r")
    assert {path.name: path.read_text() for path in paths} == contents


def test_only_files_of_a_run_are_downloaded_each_into_its_folder(tmp_path: Path) -> None:
    assert find_marker(pack_files(str(tmp_path)), MARKER) == {}
    names = ("../../job.yaml", "job.yaml", "Makefile", "sitecustomize.py")
    files = dict.fromkeys(names, "eJwDAAAAAAE=")
    assert unpack_files(files, tmp_path / "runs/r") == [tmp_path / "runs/r/job.yaml"]


@pytest.mark.parametrize("run_dir", ["..", "runs/../", "/", ""])
def test_a_run_directory_above_this_one_is_refused(run_dir: str) -> None:
    """A hostile job prints it."""
    with pytest.raises(ClusterError, match="in the job's log is no run directory"):
        _download(None, run_dir)  # type: ignore[arg-type]


def test_results_do_not_go_to_the_copy_that_ray_deletes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert local_path("runs") == Path(os.getcwd(), "runs")
    copy = tmp_path / "working_dir_files/_ray_pkg_0123"
    copy.mkdir(parents=True)
    monkeypatch.chdir(copy)
    assert local_path("runs") == tmp_path / "home/runs"
    assert local_path("~/runs") == tmp_path / "home/runs"
    assert local_path("/data/runs") == Path("/data/runs")


def test_a_few_bytes_of_a_log_fill_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "_MAX_BYTES", 1000)
    bomb = base64.b64encode(zlib.compress(bytes(1001))).decode()
    with pytest.raises(ClusterError, match="more than 1,000 bytes"):
        unpack_files({"job.yaml": bomb}, tmp_path / "r")
    assert not (tmp_path / "r").exists()
