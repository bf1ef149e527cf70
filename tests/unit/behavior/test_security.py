"""Input runs no code, and secrets reach no record, message or process."""

from __future__ import annotations

import io
import json
import os
import sys
import urllib.request
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from rich.console import Console

from raytrain_opt import cli
from raytrain_opt.commands import predict
from raytrain_opt.commands.doctor import Finding, print_findings
from raytrain_opt.commands.predict import Prediction
from raytrain_opt.config.data import ArraySetData
from raytrain_opt.config.load import resolve_function
from raytrain_opt.data.in_memory_sets import load_array_set
from raytrain_opt.errors import DataError, JobError
from raytrain_opt.paths import RunPaths
from raytrain_opt.pools.launcher import environment
from raytrain_opt.recording.recorder import EventLog, Recorder, versions, write_record
from raytrain_opt.recording.records import ResultRecord
from raytrain_opt.terminal import Terminal
from tests.support.cli_errors import LINEAR, write_job
from tests.support.synthetic_runs import (
    epoch_line,
    event_line,
    result,
    round_line,
    write_lines,
    write_run,
)

SECRET = "hunter2-planted-secret"


# `from os import system` in a package that somebody else names.
REEXPORTED = SimpleNamespace(system=os.system)


@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "subprocess:getoutput",
        "builtins:exec",
        "importlib.util:find_spec",
        "antigravity:fly",
        f"{__name__}:os.system",
        f"{__name__}:REEXPORTED.system",
        f"{__name__}:Path.unlink",
    ],
)
def test_a_job_file_names_no_function_of_the_standard_library(name: str) -> None:
    """With one of them, a job file alone could run anything."""
    with pytest.raises(JobError, match=r"model\.name: must be a function of your own"):
        resolve_function(name, "model.name")
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]52;c;aGk=\x07 end", "\\x1b]52;c;aGk=\\x07 end"),
        ("caf\udce9.png", "caf\\udce9.png"),
        ("\u202etxt.exe", "\\u202etxt.exe"),
        ("two\nlines – 実行", "two\nlines – 実行"),
    ],
)
def test_a_terminal_and_records_get_text_without_control_characters(
    tmp_path: Path, text: str, shown: str
) -> None:
    output = io.StringIO()
    recorder = Recorder(RunPaths.create(str(tmp_path), "r"))
    log = EventLog(recorder, Terminal(Console(file=output)).note, 0.0)
    log.log("lost", 1, text)
    log.close_with(1, DataError("data", text))
    recorder.close()
    assert output.getvalue() == f"{shown}\n"
    events = (recorder.paths.local / "events.jsonl").read_text().split("\n")[:-1]
    assert [json.loads(line)["text"] for line in events] == [shown, f"data: {shown}"]


NAME = "[red]a:smile:[bold] \x1b[31m\u202e\u2028\nstate ok"
SHOWN = "[red]a:smile:[bold] \\x1b[31m\\u202e\\u2028\\nstate ok"


@pytest.mark.filterwarnings("ignore:Glyph")  # of plots
def test_names_and_records_are_shown_in_one_line_with_escapes(tmp_path: Path) -> None:
    """In every command: no markup, no emoji, no line that a name makes up."""
    storage = tmp_path / NAME
    run_dir = write_run(storage / "r-20260101-000000-0123456789abcdef", epochs=1)
    (run_dir / "result.json").unlink()
    line = epoch_line(1, optimizer=NAME)
    line["metric"]["name"] = NAME
    write_lines(run_dir / "epochs.jsonl", [line])
    write_lines(run_dir / "rounds.jsonl", [round_line(1, reason=NAME)])
    write_lines(run_dir / "events.jsonl", [event_line("failed", NAME)])
    job = write_job(tmp_path, f"storage_path: {json.dumps(NAME)}")
    outputs = {
        "runs": CliRunner().invoke(cli.main, ["runs", str(storage)]).output,
        "report": CliRunner().invoke(cli.main, ["report", str(run_dir)]).output,
        "validate": CliRunner().invoke(cli.main, ["validate", job]).output,
    }
    prediction = Prediction(NAME, ((NAME, 1.0),))
    with redirect_stdout(io.StringIO()) as output:
        predict.print_predictions("", [prediction], as_json=False)
    outputs["predict"] = output.getvalue()
    with redirect_stdout(io.StringIO()) as output:
        print_findings([Finding(NAME, "ok", NAME)])
    outputs["doctor"] = output.getvalue()
    for command, text in outputs.items():
        assert not set(NAME) - set(SHOWN) - {"\n"} & set(text), command
        assert command == "doctor" or SHOWN in text, (command, text)
        assert not any(line.startswith("state ok") for line in text.splitlines()), command
    page = (run_dir / "report.html").read_text()
    assert not {"\x1b", "\u202e", "\u2028"} & set(page)


# Downloads.


class Served:
    """A server that returns another file than the published one."""

    length = 22

    def __init__(self, request: urllib.request.Request) -> None:
        self.url = request.full_url
        self._left = [b"not what was published"]

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read(self, _: int = 0) -> bytes:
        return self._left.pop() if self._left else b""


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "cifar10", "cifar100"])
def test_a_download_with_another_hash_is_refused_and_not_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    import torchvision.datasets.utils

    def unpack(*_: object, **__: object) -> None:
        pytest.fail("a file with a wrong hash was unpacked")

    monkeypatch.setattr(urllib.request, "urlopen", Served)
    monkeypatch.setattr(torchvision.datasets.utils, "extract_archive", unpack)
    section = ArraySetData(name=name, root=str(tmp_path), download=True)
    with pytest.raises(DataError, match=f"data.name: {name} .* could not be downloaded"):
        load_array_set(section)
    assert "not what was published" in everything_in(tmp_path)


# Secrets.


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> str:
    for name in ("RAY_AUTH_TOKEN", "MY_SECRET_TOKEN", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, SECRET)
    return SECRET


def test_records_hold_nothing_of_the_environment(tmp_path: Path, secret: str) -> None:
    paths = RunPaths.create(str(tmp_path), "r")
    write_record(paths.local, ResultRecord.model_validate({**result(2), "versions": versions()}))
    assert paths.result.exists()
    assert secret not in everything_in(tmp_path)


def test_processes_are_given_only_settings_of_ours(secret: str) -> None:
    assert secret not in str(environment(local=True, start_s=1.0))


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize("loss", ["cross_entropy", "tests.support.broken_parts:loss_per_sample"])
def test_errors_and_tracebacks_show_nothing_of_the_environment(
    tmp_path: Path, secret: str, loss: str
) -> None:
    data = "data: {num_classes: 3, name: 'tests.support.broken_parts:raising'}"
    file = write_job(tmp_path, LINEAR, f"loss: '{loss}'", data)
    for options in ([], ["--verbose"]):
        result = CliRunner().invoke(cli.main, ["run", file, *options])
        assert result.exit_code == 2
        assert ("Traceback" in result.output) == bool(options)
        assert secret not in result.output
    assert os.environ["MY_SECRET_TOKEN"] == secret
    assert secret not in everything_in(tmp_path)


def everything_in(folder: Path) -> str:
    """All bytes of all files, as text."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return "".join(path.read_bytes().decode("latin-1") for path in files)
