"""What keeps a job from being submitted, and what comes home of one that was."""

from __future__ import annotations

import base64
import json
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
from raytrain_opt.paths import local_folder
from raytrain_opt.run_files import MARK, packed
from raytrain_opt.telemetry.terminal import find_run_dir, run_dir_text

JOB = "model: resnet8\ndata: digits\nepochs: 1\nglobal_batch_size: 8\n"


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder with a job; variables that `connect` may set are put back afterwards."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here/job.yaml").write_text(JOB)
    monkeypatch.chdir(tmp_path / "here")
    for name in ("RAY_API_SERVER_ADDRESS", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))


@contextmanager
def answering(status: int) -> Iterator[str]:
    """Something at an address that answers every request with this status."""

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


def test_no_token_here() -> None:
    with answering(401) as address:
        code, message = submit("job.yaml", "--address", address)
    assert code == 2
    assert "--address: the cluster asks for a token, and there is none here" in message
    assert "RAY_AUTH_TOKEN" in message


def test_the_wrong_token_is_named_by_its_place_not_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("planted-secret" * 4)
    with answering(403) as address:
        code, message = submit("job.yaml", "--address", address)
        monkeypatch.setenv("RAY_AUTH_TOKEN", "planted-secret")
        of_variable = submit("job.yaml", "--address", address)
    assert code == 2
    assert f"the cluster refuses the token of {tmp_path / 'token'}" in message
    assert "the cluster refuses the token of RAY_AUTH_TOKEN" in of_variable[1]
    assert "planted-secret" not in message + of_variable[1]


def test_a_token_that_is_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("of the cluster")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with answering(401) as address:
        code, message = submit("job.yaml", "--address", address)
    assert code == 2
    assert "RAY_AUTH_MODE=disabled sends none" in message
    assert "; set RAY_AUTH_MODE=token" in message


def test_nobody_is_there() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{reserved.getsockname()[1]}"
        code, message = submit("job.yaml", "--address", address)
    assert code == 2
    assert "no dashboard of a Ray cluster answers there" in message
    assert "ray dashboard CLUSTER.yaml" in message


def test_somebody_else_is_there() -> None:
    with answering(404) as address:
        code, message = submit("job.yaml", "--address", address)
    assert code == 2
    assert "no dashboard of this Ray" in message


def test_the_address_of_the_cluster_instead_of_the_dashboards() -> None:
    code, message = submit("job.yaml", "--address", "ray://head:10001")
    assert code == 2
    assert "must be the address of the head's dashboard, http://HOST:PORT" in message


def test_a_wrong_job_is_found_before_anybody_is_asked() -> None:
    code, message = submit("job.yaml", "--set", "epochs=0", "--address", "http://127.0.0.1:1")
    assert code == 2
    assert "epochs" in message
    assert "dashboard" not in message


def test_a_job_elsewhere_would_not_be_sent(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    from raytrain_opt.errors import JobError
    from raytrain_opt.submit import _inside

    assert _inside("job.yaml") == "job.yaml"
    with pytest.raises(JobError, match="must be in this folder or below"):
        _inside("../job.yaml")


@pytest.mark.parametrize("resumed", [False, True])
def test_the_run_directory_is_found_in_the_log(resumed: bool) -> None:
    line = run_dir_text("s3://bucket/a run", resumed=resumed)
    assert find_run_dir(f"Running entrypoint\n{line}\nepoch 1/2\n") == "s3://bucket/a run"
    assert find_run_dir("epoch 1/2\n") is None


def test_files_of_a_run_are_one_line_of_a_log(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text('{"wall_s": 1}\n')
    (tmp_path / "report.html").write_text("<p>grüße</p>\n")
    line = packed(str(tmp_path))
    assert "\n" not in line
    files = json.loads(line.removeprefix(MARK))
    contents = {n: zlib.decompress(base64.b64decode(text)).decode() for n, text in files.items()}
    assert contents == {"result.json": '{"wall_s": 1}\n', "report.html": "<p>grüße</p>\n"}


def test_results_do_not_go_to_the_copy_that_ray_deletes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert local_folder("runs") == Path(os.getcwd(), "runs")
    copy = tmp_path / "working_dir_files/_ray_pkg_0123"
    copy.mkdir(parents=True)
    monkeypatch.chdir(copy)
    assert local_folder("runs") == tmp_path / "home/runs"
    assert local_folder("~/runs") == tmp_path / "home/runs"
    assert local_folder("/data/runs") == Path("/data/runs")
