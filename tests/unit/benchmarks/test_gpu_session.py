"""A session on a GPU machine: what it prints whenever it ends, and its parts in small form."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_session
from benchmarks.gpu_session import PARTS, Part
from raytrain_opt.config.load import load_job

ENDLESS = ("http.server", "0")


def session(monkeypatch: pytest.MonkeyPatch, out: Path, *options: str, **parts: Part) -> Any:
    monkeypatch.setattr(gpu_session, "PARTS", parts)
    return gpu_session.main(["--out", str(out), *options])


def statuses(reports: dict[str, Any]) -> dict[str, str]:
    return {name: report["status"] for name, report in reports.items()}


def test_each_part_reports_when_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "found.json").write_text('{"ratio": 1.5}')
    found = Part(1.0, ("json.tool", "--compact", str(tmp_path / "found.json")))
    parts = {"a": found, "b": Part(0.005, ENDLESS), "c": Part(1.0, ("json.tool", "nowhere"))}
    reports = session(monkeypatch, tmp_path, **parts, usage=Part(1.0, found.command))
    expected = {"a": "ok", "b": "timeout", "c": "failed", "usage": "skipped"}
    assert statuses(reports) == expected
    assert reports["a"]["result"] == {"ratio": 1.5}
    assert "nowhere" in reports["c"]["result"]
    written = [json.loads(line) for line in (tmp_path / "parts.jsonl").read_text().splitlines()]
    assert written == list(reports.values())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["a", "1.0", "min"]
    assert [line.split()[:2] for line in lines[-4:]] == [*map(list, expected.items())]


def test_what_has_ended_stays_when_the_session_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = {"a": Part(1.0, ("json.tool", "nowhere")), "b": Part(1.0, ENDLESS), "c": PARTS["lars"]}
    main = threading.main_thread().ident
    assert main is not None
    threading.Timer(2.0, signal.pthread_kill, (main, signal.SIGTERM)).start()
    reports = session(monkeypatch, tmp_path, "--minutes", "1", **parts)
    assert statuses(reports)["a"] == "failed"
    table = [line.split()[0] for line in capsys.readouterr().out.splitlines()[-3:]]
    assert table == ["a", "b", "c"]


def test_the_parts_run_in_small_form_on_a_cpu(tmp_path: Path) -> None:
    """Those left out have one of these programs, or one that is tested by itself."""
    names = ["lars", "ray", "batch"]
    reports = gpu_session.main(["--small", "--out", str(tmp_path), "--parts", *names])
    assert statuses(reports) == dict.fromkeys(names, "ok")
    assert reports["lars"]["result"]["ours_over_sgd"] > 0
    assert reports["ray"]["result"]["final"]["epoch"] == 1


@pytest.mark.parametrize("name", [n for n, p in PARTS.items() if p.command[0] == "raytrain_opt"])
def test_the_jobs_of_the_parts_are_valid(name: str) -> None:
    _, _, job, *options = PARTS[name].command
    load_job(Path(job), options[1::2])
