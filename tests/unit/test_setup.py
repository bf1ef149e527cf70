"""The files around the package: pinned versions, shipped jobs, what is sent to a cluster."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from raytrain_opt.config.load import load_job

ROOT = Path(__file__).parents[2]
JOBS = sorted((ROOT / "jobs").glob("*.yaml"))
PIN = re.compile(r"([a-z0-9-]+)==[0-9][0-9a-z.]*( ; [a-z_'<>=!.()0-9A-Z ]+)?")


def pinned() -> set[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    matches = [PIN.fullmatch(line) for line in lines if not line.startswith("#")]
    assert all(matches), "a line is not of the form name==version"
    return {match[1] for match in matches if match}


def test_every_dependency_has_an_exact_version_and_no_address() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
    names = {re.split(r"[\[>=<]", line)[0].lower().replace("_", "-") for line in wanted}
    assert names <= pinned()


def test_there_are_jobs() -> None:
    assert JOBS


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_every_shipped_job_is_valid(path: Path) -> None:
    assert load_job(path).epochs > 0


@pytest.mark.parametrize("path", [".venv/", "/runs/", ".git/"])
def test_large_folders_stay_at_home(path: str) -> None:
    assert path in (ROOT / ".rayignore").read_text().splitlines()
