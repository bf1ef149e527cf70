"""The command line: exit codes, messages, and which modules it imports."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from hashlib import sha256
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from PIL import Image

from raytrain_opt import cli, clock
from raytrain_opt.errors import DataError, JobError, PoolError, Problem
from tests.support.synthetic_runs import write_run

ROOT = Path(cli.__file__).parents[1]
Outcome = Callable[[], object]
SEARCH = "batch_size_search={strategy: throughput_knee}"


@pytest.fixture
def job_file(tmp_path: Path) -> str:
    file = tmp_path / "job.yaml"
    file.write_text("model: resnet8\ndata: digits\nepochs: 2\nglobal_batch_size: 8\n")
    return str(file)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Callable[[Outcome], list[dict[str, Any]]]:
    """Replace the driver by one whose run records its call and produces `outcome`."""

    def put(outcome: Outcome) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []

        def run(job: object, **options: object) -> object:
            calls.append({"job": job, **options})
            return outcome()

        fake = ModuleType("raytrain_opt.driver")
        fake.__dict__["run"] = run
        monkeypatch.setitem(sys.modules, "raytrain_opt.driver", fake)
        return calls

    return put


def fails(error: BaseException) -> Outcome:
    def outcome() -> object:
        raise error

    return outcome


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, arguments)


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)


def test_run_hands_the_job_to_the_driver(job_file: str, driver: Any) -> None:
    calls = driver(lambda: None)
    options = ("--set", "epochs=3", "--set", "workers.count=2", "--address", "auto", "--verbose")
    result = invoke("run", job_file, *options)
    assert result.exit_code == 0
    (call,) = calls
    assert (call["job"].epochs, call["job"].workers.count) == (3, 2)
    assert (call["address"], call["verbose"]) == ("auto", True)
    assert call["started_s"] == clock.PROCESS_STARTED_S


@pytest.mark.parametrize(
    ("run_dir", "command"),
    [
        ("runs/chosen", "raytrain-opt run runs/chosen/job.yaml"),
        ("my runs/chosen", "raytrain-opt run 'my runs/chosen/job.yaml'"),
        (
            "s3://bucket/chosen?region=x",
            "copy s3://bucket/chosen/job.yaml?region=x here, then raytrain-opt run job.yaml",
        ),
    ],
)
def test_find_batch_size_searches_and_prints_the_next_command(
    job_file: str, monkeypatch: pytest.MonkeyPatch, run_dir: str, command: str
) -> None:
    calls: list[dict[str, Any]] = []

    def find(job: object, **options: object) -> object:
        calls.append({"job": job, **options})
        return SimpleNamespace(run_dir=run_dir)

    fake = ModuleType("raytrain_opt.execution.batch_size")
    fake.__dict__["find_batch_size"] = find
    monkeypatch.setitem(sys.modules, "raytrain_opt.execution.batch_size", fake)
    result = invoke("find-batch-size", job_file, "--set", "epochs=7")
    assert result.exit_code == 0
    assert f"train with this batch size: {command}\n" in result.stdout
    assert calls[0]["job"].epochs == 7


def test_resume_takes_the_job_of_the_run(tmp_path: Path, job_file: str, driver: Any) -> None:
    calls, run_dir = driver(lambda: None), tmp_path / "run"
    (run_dir / "checkpoints").mkdir(parents=True)
    (run_dir / "checkpoints" / "index.json").write_text('{"checkpoints": []}')
    Path(job_file).replace(run_dir / "job.yaml")
    overrides = ("--set", "timeouts.start_s=7", "--set", "checkpoint.keep=3")
    assert invoke("run", "--resume", str(run_dir), *overrides).exit_code == 0
    (call,) = calls
    assert (call["job"].timeouts.start_s, call["job"].model.name) == (7, "resnet8")
    assert call["resume"] == str(run_dir)
    assert (call["address"], call["verbose"]) == (None, False)


@pytest.mark.parametrize(
    "section",
    ["model: 'theirs:run'", "optimizer: {name: auto, candidates: [SGD, {name: 'theirs:run'}]}"],
)
@pytest.mark.parametrize("command", [("run", "--resume"), ("evaluate",)])
def test_functions_that_a_run_directory_names_need_trust(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    driver: Any,
    section: str,
    command: tuple[str, ...],
) -> None:
    """Not even their module is imported."""
    calls, run_dir = driver(lambda: None), tmp_path / "run"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "theirs", raising=False)
    marker = str(tmp_path / "imported")
    (tmp_path / "theirs.py").write_text(f"import pathlib\npathlib.Path({marker!r}).touch()")
    folder, digest = run_dir / "checkpoints" / "epoch-0001", sha256(b"").hexdigest()
    folder.mkdir(parents=True)
    digests = dict.fromkeys(("weights.safetensors", "rest.pt"), digest)
    for name in digests:
        (folder / name).touch()
    saved = {"checkpoints": [{"epoch": 1, "score": None, "sha256": digests}]}
    (folder.parent / "index.json").write_text(json.dumps(saved))
    lines = {"model": "model: resnet8", "data": "data: digits", "epochs": "epochs: 1"}
    lines |= {"batch": "global_batch_size: 64", "lr": "learning_rate: {policy: stpt_horizon}"}
    lines |= {"workers": "workers: {count: 1}", section.partition(":")[0]: section}
    (run_dir / "job.yaml").write_text("\n".join(lines.values()))
    result = invoke(*command, str(run_dir))
    assert result.exit_code == 2
    assert ".name: names a function" in result.output
    assert "--trust" in result.output
    assert not (tmp_path / "imported").exists()
    trusted = invoke(*command, str(run_dir), "--trust")
    assert "names a function" not in trusted.output
    assert len(calls) == (command[0] == "run")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DataError("data.root", "no image found"), 2),
        (JobError([Problem("slots", "do not fit")]), 2),
        (PoolError("worker 1 is silent"), 1),
    ],
)
def test_our_errors_are_a_message_and_a_code(
    job_file: str, driver: Any, error: Exception, code: int
) -> None:
    driver(fails(error))
    result = invoke("run", job_file)
    assert result.exit_code == code
    assert result.stderr == f"error: {error}\n"


def test_verbose_shows_the_traceback_too(job_file: str, driver: Any) -> None:
    driver(fails(PoolError("worker 1 is silent")))
    result = invoke("run", job_file, "--verbose")
    assert "Traceback (most recent call last)" in result.stderr
    assert result.stderr.endswith("error: worker 1 is silent\n")


def test_other_errors_are_raised(job_file: str, driver: Any) -> None:
    driver(fails(ZeroDivisionError("a bug")))
    assert isinstance(invoke("run", job_file).exception, ZeroDivisionError)


def test_ctrl_c_exits_130(job_file: str, driver: Any) -> None:
    driver(fails(KeyboardInterrupt()))
    assert invoke("run", job_file).exit_code == 130


def test_validate_names_classes_and_what_is_left_out(tmp_path: Path) -> None:
    for split, name in product(("train", "val"), (f"class-{i:02}" for i in range(12))):
        (tmp_path / split / name).mkdir(parents=True)
        for i in range(2):
            Image.new("RGB", (9, 9)).save(tmp_path / split / name / f"{i}.png")
    (tmp_path / "train/class-03/0.gif").touch()
    data = f"{{name: image_folder, root: {tmp_path}, image_size: 32, loader_workers: 0}}"
    file = tmp_path / "job.yaml"
    file.write_text(f"model: resnet8\ndata: {data}\nepochs: 2\nglobal_batch_size: 4\n")
    output = invoke("validate", str(file)).stdout
    assert re.search(r"data +image_folder, \d+ to train on, 24 to test\n", output)
    assert re.search(r"classes +12: class-00, class-01, .*class-09, …\n", output)
    assert "1 files or folders are left out: 1 .gif" in output


def test_validate_says_what_training_and_search_cost(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("model: small_cnn\ndata: digits\nepochs: 4\nglobal_batch_size: 64\n")
    output = invoke("validate", str(file), "--set", "workers.use_gpu=false").stdout
    assert "updates        88 (22 in epoch 1)\n" in output
    assert "search         at most 88 updates, 100 % as many\n" in output
    for policy, cost in (
        (
            "{policy: stpt, candidates: [1, 2, 3], alpha: 5}",
            "search         at most 40 updates, 50 %",
        ),
        ("{policy: schedule}", None),
    ):
        output = invoke("validate", str(file), "--set", f"learning_rate={policy}").stdout
        assert cost in output if cost else "search  " not in output


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["learning_rate={policy: schedule, shape: linear}"],
            "schedule, shape linear, initial 0.1",
        ),
        (
            ["learning_rate={policy: stpt, candidates: [2, 1], alpha: 100}"],
            "stpt, initial 0.1, candidates [2.0, 1.0], alpha 100",
        ),
        ([SEARCH], "8, divided among the free GPUs, if there are any, before the search by"),
        ([SEARCH, "workers.count=2"], "8 = 2 workers x 4, before the search by throughput_knee"),
    ],
)
def test_the_summary_names_policy_and_search(
    job_file: str, overrides: list[str], words: str
) -> None:
    arguments = [text for override in overrides for text in ("--set", override)]
    assert words in invoke("validate", job_file, *arguments).stdout


@pytest.mark.parametrize("command", sorted(cli.main.commands))
def test_every_command_has_an_example_in_its_help(command: str) -> None:
    help_text = " ".join(invoke(command, "--help").stdout.split())
    assert f"Example: raytrain-opt {command} " in help_text
    assert "..." not in invoke("--help").stdout.partition("Commands:")[2]  # cut


def test_report_writes_a_page_and_says_where(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", epochs=1)
    result = invoke("report", str(run))
    assert (result.exit_code, result.stdout) == (0, f"report  {run}/report.html\n")
    assert (run / "report.html").is_file()


COMMANDS = tuple(cli.main.commands)


def test_shard_prints_shards_and_their_patterns(tmp_path: Path) -> None:
    folder = tmp_path / "images" / "train" / "cat"
    folder.mkdir(parents=True)
    (folder / "0.jpg").write_bytes(b"not read")
    result = invoke("shard", str(tmp_path / "images"), str(tmp_path / "out"))
    assert result.exit_code == 0
    pattern = f"{tmp_path}/out/train-{{000000..000000}}.tar"
    assert result.stdout.splitlines() == ["train-000000.tar", pattern]


def test_the_module_is_the_command() -> None:
    result = python("-m", "raytrain_opt", "schema")
    assert result.returncode == 0, result.stderr
    assert "global_batch_size" in json.loads(result.stdout)["properties"]
    assert json.loads(result.stdout) == json.loads(invoke("schema").stdout)


def imported_by(*commands: Sequence[str]) -> set[str]:
    """Top-level modules that are loaded when one process has done these commands."""
    code = (
        "import sys; from click.testing import CliRunner; from raytrain_opt.cli import main\n"
        f"for arguments in {commands!r}:\n"
        "    result = CliRunner().invoke(main, arguments)\n"
        "    assert result.exit_code == 0, result.output\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    result = python("-c", code)
    assert result.returncode == 0, result.stderr
    return set(result.stderr.split())


def test_light_commands_import_nothing_heavy(tmp_path: Path) -> None:
    heavy = {"torch", "torchvision", "ray", "sklearn", "numpy"}
    report = ["report", str(write_run(tmp_path / "run", epochs=1))]
    assert imported_by(report) & (heavy - {"numpy"}) == set()
    assert imported_by(["schema"]) & heavy == set()
    assert imported_by(["--help"]) & {*heavy, "pydantic"} == set()
    assert imported_by(*([name, "--help"] for name in COMMANDS)) & heavy == set()


def test_a_job_is_validated_and_trained_in_process_where_ray_is_not_installed(
    job_file: str, tmp_path: Path
) -> None:
    code = "import sys; sys.modules['ray'] = None; from raytrain_opt.cli import main\n"
    code += f"main(['validate', {job_file!r}], standalone_mode=False); main()"
    values = ("model=small_cnn", "epochs=1", "global_batch_size=64", f"storage_path={tmp_path}/r")
    settings = [part for value in values for part in ("--set", value)]
    done = python("-c", code, "run", job_file, "--in-process", *settings)
    assert done.returncode == 0, done.stderr
