from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from raytrain_opt.cli import main

JOB = {
    "model": "cifar_resnet18",
    "data": {"name": "image_folder", "root": "/not/here", "image_size": 32},
    "epochs": 30,
    "global_batch_size": 128,
}
SIZE = ("--data", "50000x10")


def plan(tmp_path: Path, *options: str, **changes: Any) -> tuple[int, str]:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(JOB | changes))
    cluster = () if "--cluster" in options else ("--cluster", "2x4xA100")
    result = CliRunner().invoke(main, ["plan", str(path), *cluster, *options])
    return result.exit_code, result.output


def priced(tmp_path: Path) -> tuple[str, str]:
    path = tmp_path / "cluster.yaml"
    path.write_text("{nodes: 2, devices: 4, kind: A100, price_per_node_hour: 12}")
    return "--cluster", str(path)


def test_a_plan_says_what_the_job_takes_and_where_doubling_stops(tmp_path: Path) -> None:
    code, text = plan(tmp_path, *SIZE)
    assert code == 0
    names = ("step", "epoch", "search", "training", "memory", "storage", "cost")
    assert all(any(line.startswith(name) for line in text.splitlines()) for name in names)
    assert "8, 16 samples each" in text
    assert "workers do not pay" in text
    assert "no --measured run has a noise scale" in text


def test_a_goal_has_a_choice_and_an_impossible_one_the_nearest(tmp_path: Path) -> None:
    _, text = plan(tmp_path, *SIZE, *priced(tmp_path), "--within", "10m", "--budget", "0.01")
    within, budget = text.splitlines()[-2:]
    assert within.startswith("within 10m: ")
    assert "global batch 128" in within
    assert budget.startswith("for 0.01: not possible; the nearest is ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), r"data: are not on this machine.*--data 1281167x1000"),
        (("--data", "50000"), "--data: must be SAMPLESxCLASSES"),
        ((*SIZE, "--within", "an hour"), "--within: must be a time, such as 90m"),
        ((*SIZE, "--budget", "3"), "--budget: needs price_per_node_hour"),
        ((*SIZE, "--cluster", "1x2xCPU"), "--cluster: CPUs have no public figures: .*--measured"),
    ],
)
def test_a_wrong_option_says_what_would_be_right(
    tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    code, text = plan(tmp_path, *options)
    assert code == 2
    assert re.search(message, text, re.DOTALL), text
