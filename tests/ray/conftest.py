"""One local Ray per test file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray


@pytest.fixture(scope="session", autouse=True)
def environment() -> Iterator[None]:
    """Let Ray's processes find tests/support, and plant a secret that no record may contain.

    The secret is also Ray's token, the same for all files: a process reads it only once.
    """
    root = str(Path(__file__).parents[2])
    path = os.environ.get("PYTHONPATH")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{root}:{path}" if path else root)
        patch.setenv("MY_SECRET_TOKEN", "hunter2-planted-secret")
        patch.setenv("RAY_AUTH_TOKEN", "hunter2-planted-secret")
        yield


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """Start Ray with two logical CPUs, whatever the machine has."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()
