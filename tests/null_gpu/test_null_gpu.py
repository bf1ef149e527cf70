"""The CUDA branches on a device whose kernels compute nothing; needs torch's CUDA build, gcc, nm.

    make test-null-gpu

It shows exceptions, waits for the device, memory that is not given back, and what Ray makes of one
GPU. A new version of torch may need another function in special.cpp.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
FUSED = ("SGD", "Adam", "AdamW")
OTHERS = (
    *("Adagrad", "RMSprop", "LARS", "Muon", "RMSpropWarmup", "ScheduleFreeSGD"),
    *("ScheduleFreeAdamW", "NAdam", "RAdam", "Adadelta", "Adamax", "ASGD"),
)

Run = Callable[..., str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return what runs Python on the device and returns its output."""
    device = tmp_path_factory.mktemp("device")
    build = ["bash", str(HERE / "build.sh"), sys.executable, str(device)]
    subprocess.run(build, check=True)

    def run(*arguments: str, **variables: str) -> str:
        environment = {
            **os.environ,
            "NULL_CUDA": str(device),
            "LD_LIBRARY_PATH": f"{device}:{os.environ.get('LD_LIBRARY_PATH', '')}",
            "LD_PRELOAD": f"{device}/libcuda.so.1",
            "PYTHONPATH": f"{HERE / 'site'}:{ROOT}",
            **variables,
        }
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
        return done.stdout + done.stderr

    return run


def ask(run: Run, check: str, *arguments: str, **variables: str) -> Any:
    """Return the answer of a function of `checks`."""
    code = f"from tests.null_gpu import checks; checks.{check}(*{arguments!r})"
    output = run("-W", "ignore", "-c", code, **variables)
    return next(json.loads(line) for line in output.splitlines() if line[:1] in "[{")


@pytest.mark.parametrize(
    ("precision", "optimizers"), [("auto", (*FUSED, *OTHERS)), ("fp16", FUSED)]
)
def test_no_step_waits_for_the_device(
    run: Run, precision: str, optimizers: tuple[str, ...]
) -> None:
    """With fp16, GradScaler reads on the host whether others than the fused ones overflow."""
    found = ask(run, "steps", precision, *optimizers)
    assert found == {name: {"waits": 0, "pageable": 0} for name in optimizers}


def test_a_probe_that_runs_out_of_memory_gives_it_back(run: Run) -> None:
    found = ask(run, "memory", NULL_GPU_MIB="256")
    assert [status for status, _ in found] == ["ok", "out_of_memory"] * 2 + ["ok"]
    assert max(mib for _, mib in found[1:]) <= found[0][1]


def test_the_fork_server_leaves_cuda_alone(run: Run) -> None:
    """Forks of a process that has initialized CUDA cannot use it."""
    assert ask(run, "fork_server") == []


@pytest.mark.parametrize(
    "settings",
    [
        ["workers.count=1"],
        ["workers.count=2", "workers.resources={CPU: 0.5, GPU: 0.3}", "parallel.mode=async"],
    ],
    ids=["a worker and a slot on one GPU", "two asynchronous workers on one GPU"],
)
def test_ray_runs_on_one_gpu(run: Run, settings: list[str], tmp_path: Path) -> None:
    values = [f"storage_path={tmp_path}", "epochs=2", *settings]
    options = [option for value in values for option in ("--set", value)]
    command = ("-m", "raytrain_opt", "run", "jobs/quickstart.yaml", *options)
    assert "epoch 2/2" in run(*command, NULL_GPU_NUMBERS="1")


def test_the_doctor_finds_the_gpu(run: Run) -> None:
    assert "Null H100" in run("-m", "raytrain_opt", "doctor")
