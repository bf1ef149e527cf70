"""Bad input: exit code 2 and one message that names the field, before Ray starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from raytrain_opt import cli
from tests.support.cli_errors import LINEAR, command_error, write_job
from tests.support.synthetic_runs import write_schedule

pytestmark = pytest.mark.usefixtures("no_ray")

STPT = "learning_rate: {policy: stpt, "


def test_errors_that_the_schema_finds(tmp_path: Path) -> None:
    """All of them are in tests/unit/config/test_broken_jobs.py."""
    file = write_job(tmp_path, "epoch: 3")
    message = command_error("run", file)
    assert message.startswith(f"{file}: 1 problem\n  epoch: ")
    assert command_error("validate", file) == command_error("find-batch-size", file) == message
    overridden = command_error("run", write_job(tmp_path), "--set", "epochs=0")
    assert overridden.endswith(": 1 problem\n  epochs: must be greater than 0 (given: 0)")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run"], "give either JOB.yaml or --resume RUN_DIR"),
        (["run", "job.yaml", "--resume", "runs/r"], "give either JOB.yaml or --resume RUN_DIR"),
        (["run", "job.yaml", "--workers", "3"], "No such option"),
        (["validate"], "Missing argument 'JOB.yaml'"),
    ],
)
def test_arguments_that_are_wrong(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(cli.main, arguments)
    assert result.exit_code == 2
    assert words in result.stderr


SETS = "data: {num_classes: 3, loader_workers: 0, name: 'tests.support.broken_parts:"


@pytest.mark.parametrize("variable", [False, True])
@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1:1", "Connection refused (given: '127.0.0.1:1'); give HOST:PORT"),
        ("ray://127.0.0.1:1", "Connection refused"),
        ("head", "it has no HOST:PORT"),
        ("head:port", "could not be cast to integer"),
        ("head.invalid:6379", "no Ray cluster can be reached there: "),
    ],
)
def test_a_cluster_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: bool, address: str, words: str
) -> None:
    if variable:
        monkeypatch.setenv("RAY_ADDRESS", address)
    message = command_error(
        "run", write_job(tmp_path), *([] if variable else ["--address", address])
    )
    field = "RAY_ADDRESS" if variable else "--address"
    assert message.startswith(
        f"arguments: 1 problem\n  {field}: no Ray cluster can be reached there"
    )
    assert words in message
    assert not list(tmp_path.glob("runs/*"))


# Names, functions and values that only torch, or the user's code, can judge.
NAMES = [
    ("model: resnet9", "model.name", "did you mean 'resnet8'"),
    ("model: ':'", "model.name", "must have the form package.module:function"),
    ("model: 'no_such:f'", "model.name", "No module named 'no_such'"),
    ("model: 'raises:f'", "model.name", "ZeroDivisionError: division by zero (given"),
    ("model: 'leaves:f'", "model.name", "SystemExit: 0"),
    (
        "model: 'tests.support.broken_parts:NOT_A_FUNCTION'",
        "model.name",
        "must be a function or class",
    ),
    ("model: 'tests.support.broken_parts:linear'", "model.args.outputs", "is required"),
    ("data: 'tests.support.broken_parts:pionts'", "data.name", "did you mean 'points'?"),
    (
        "loss: 'tests.support.broken_parts:loss_of_one'",
        "loss.name",
        "must be callable as (output, labels)",
    ),
    (STPT.replace("stpt", "replay") + "schedule: none.json}", "learning_rate.schedule", "read"),
]

# Data against themselves, the model, the batch and the schedule.
MISMATCHES = [
    ("global_batch_size: 4096", "global_batch_size", "larger than the training set"),
    ("batch_ramp: [{epoch: 2, factor: 999}]", "batch_ramp.0.factor", "the training set"),
    ("global_batch_size: 5000\nworkers: {count: 5000}", "workers.count", "more than the training"),
    (STPT + "alpha: 163}", "learning_rate.alpha", "longer than an epoch, which has 161"),
    (
        "learning_rate: {policy: replay, schedule: schedule.jsonl}",
        "learning_rate.schedule",
        "epochs",
    ),
    ("data: {name: digits, normalize: [[0, 0], [1, 1]]}", "data.normalize", "for 1 channels"),
    ("data: {name: mnist, root: damaged}", "data.name", "is missing or damaged"),
    ("model: vgg16_bn", "model", "Output size is too small. Choose another model.name"),
    ("model: resnet18", "model.name", "takes images [3, height, width]"),
    ("model: {name: 'tests.support.broken_parts:linear', args: {outputs: 9}}", "model", "[2, 10]"),
    (
        "model: 'tests.support.broken_parts:breaks'",
        "model.name",
        "raised ZeroDivisionError: planted bug",
    ),
    (
        "loss: 'tests.support.broken_parts:loss_per_sample'",
        "loss.name",
        "must return the mean over the batch",
    ),
    (f"{LINEAR}\n{SETS}raising'}}", "data.name", "raised KeyError: 'planted bug'"),
    (f"{LINEAR}\n{SETS}uneven'}}", "data.name", "all must be the same"),
    (f"{LINEAR}\n{SETS}points', args: {{samples: 1}}}}", "data", "no sample is left to train on"),
    (
        "data: 'tests.support.broken_parts:without_classes'",
        "data.num_classes",
        "give the job data.num_classes",
    ),
    (
        f"model: 'tests.support.broken_parts:two_outputs'\n{SETS}points'}}",
        "model",
        "must be [2, 3] (samples, classes of the data), but is tuple",
    ),
]


@pytest.mark.parametrize(("lines", "path", "words"), [*NAMES, *MISMATCHES])
def test_names_and_data_that_do_not_exist_or_match(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, path: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "raises.py").write_text("1 / 0")
    (tmp_path / "leaves.py").write_text("raise SystemExit(0)")
    write_schedule(tmp_path / "schedule.jsonl", (0.1,), (0.1,))
    damaged = tmp_path / "damaged" / "MNIST" / "raw"
    damaged.mkdir(parents=True)
    for split in ("train", "t10k"):
        for kind in ("images-idx3", "labels-idx1"):
            (damaged / f"{split}-{kind}-ubyte").write_bytes(b"\0\0\x08\x01 cut off")
    message = command_error("run", write_job(tmp_path, *lines.split("\n")))
    last = message.split("\n")[-1].strip()
    assert last.startswith(f"{path}: ")
    assert words in last
    assert message.count("\n") <= 1
    assert not list(tmp_path.glob("runs/*"))


def test_validate_downloads_no_data(tmp_path: Path) -> None:
    data = f"data: {{name: cifar10, root: '{tmp_path}/none', download: true}}"
    result = CliRunner().invoke(cli.main, ["validate", write_job(tmp_path, data)])
    assert result.exit_code == 0
    assert "not checked: the data set is not downloaded yet" in result.stdout
    assert not (tmp_path / "none").exists()
