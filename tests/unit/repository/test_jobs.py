"""Files around the package: pinned versions, shipped jobs, the upload to a cluster."""

from __future__ import annotations

import importlib.util
import logging
import re
import tomllib
from pathlib import Path
from types import ModuleType
from zipfile import ZipFile

import pytest
import torch
from ray._private.runtime_env.packaging import create_package
from torch import nn

from raytrain_opt.config.load import dump_job, load_job
from raytrain_opt.execution.check import check_job, try_job
from raytrain_opt.models.factory import check_model
from tests.support.synthetic_runs import write_schedule

ROOT = Path(__file__).parents[3]
JOBS = sorted((ROOT / "jobs").glob("*.yaml"))
SCRIPTS = ("only_batch_size", "only_learning_rate", "own_model")
PIN = re.compile(r"([a-z0-9-]+)==[0-9][0-9a-z.]*( ; [a-z_'<>=!.()0-9A-Z ]+)?")


def pinned() -> set[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    matches = [PIN.fullmatch(line) for line in lines if not line.startswith("#")]
    assert all(matches), "a line is not of the form name==version"
    return {match[1] for match in matches if match}


def test_every_dependency_has_an_exact_version_and_no_address() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    dependencies = project["dependencies"] + extras["dev"] + extras["mlflow"]  # dev contains it
    names = {re.split(r"[\[>=<]", line)[0].lower().replace("_", "-") for line in dependencies}
    assert names - {"raytrain-opt"} <= pinned()


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_every_shipped_job_is_valid(path: Path) -> None:
    assert load_job(path).name


def script(name: str) -> ModuleType:
    """Import a driver script of jobs/ without running it."""
    path = ROOT / "jobs" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"script_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_scripts_are_tested_here() -> None:  # others: test_tasks
    tested = {*SCRIPTS, "replay_schedule", "cnn11", "fine_tune", "tasks"}
    assert {path.stem for path in (ROOT / "jobs").glob("*.py")} == tested


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_job_of_every_script_is_valid(name: str) -> None:
    assert check_job(script(name).make_job()) == []


def test_the_fine_tuning_job_reads_its_digits() -> None:
    """The weights come from the run that the header starts first."""
    job = load_job(ROOT / "jobs/fine_tune.yaml", ["model.weights=null"])
    info = try_job(job)[0].info
    assert (info.train_size, info.class_names) == (50, ("5", "6", "7", "8", "9"))


def test_the_replay_script_takes_job_and_rates_of_a_run(tmp_path: Path) -> None:
    job = load_job(ROOT / "jobs/quickstart.yaml", ["epochs=1"])
    (tmp_path / "job.yaml").write_text(dump_job(job))
    write_schedule(tmp_path / "schedule.jsonl", (0.1, 0.05))
    replay = script("replay_schedule").make_job(str(tmp_path))
    assert check_job(replay) == []
    assert replay.learning_rate.policy == "replay"
    assert (replay.hold_out, replay.seed, replay.epochs) == (job.hold_out, job.seed, 1)


@pytest.mark.parametrize(
    "ends", [["epochs=null", "train_for=10s"], ["epochs=9", "stop.patience=1"]]
)
def test_the_replay_script_trains_for_as_long_as_the_run(tmp_path: Path, ends: list[str]) -> None:
    policy = "learning_rate={policy: schedule, shape: linear}"
    job = load_job(ROOT / "jobs/quickstart.yaml", [*ends, policy])
    (tmp_path / "job.yaml").write_text(dump_job(job))
    write_schedule(tmp_path / "schedule.jsonl", (0.1, 0.05), (0.05, 0.02))
    replay = script("replay_schedule").make_job(str(tmp_path))
    assert (replay.epochs, replay.train_for, replay.stop) == (2, None, None)


def test_the_replay_script_names_the_optimizer_that_the_search_chose(tmp_path: Path) -> None:
    job = load_job(ROOT / "jobs/quickstart.yaml", ["learning_rate={policy: stpt_horizon}"])
    assert job.optimizer.name == "auto"
    (tmp_path / "job.yaml").write_text(dump_job(job))
    write_schedule(tmp_path / "schedule.jsonl", (0.1, 0.05), optimizer="Muon")
    replay = script("replay_schedule").make_job(str(tmp_path))
    assert check_job(replay) == []
    assert (replay.optimizer.name, replay.optimizer.args) == ("Muon", {"weight_decay": "auto"})
    assert replay.hold_out.fraction == 0


def test_the_network_of_the_asynchronous_paper_has_eleven_convolutions() -> None:
    job = load_job(ROOT / "jobs/imagenet_cnn11_async.yaml")
    assert check_model(job.model) == []
    model = script("cnn11").make_model(num_classes=10)
    assert sum(isinstance(module, nn.Conv2d) for module in model.modules()) == 11
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def packaged(folder: Path) -> Path:
    """Return the package that `ray job submit --working-dir .` sends, made by Ray."""
    target = folder / "package.zip"
    create_package(str(ROOT), target, include_gitignore=True, logger=logging.getLogger("test"))
    return target


def test_little_is_sent_to_a_cluster(tmp_path: Path) -> None:
    package = packaged(tmp_path)
    assert package.stat().st_size < 5 * 10**6
    with ZipFile(package) as archive:
        names = archive.namelist()
    assert {"raytrain_opt/driver.py", "jobs/quickstart.yaml", "jobs/own_model.py"} <= set(names)
    # An empty folder is an entry of its own ("runs/"), and costs nothing.
    folders = {name.split("/")[0] for name in names if not name.endswith("/")}
    assert folders & {".git", ".venv", "runs", "tests", "build", ".mypy_cache"} == set()
