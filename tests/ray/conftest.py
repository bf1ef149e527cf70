"""One local Ray per test file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray


@pytest.fixture(scope="session", autouse=True)
def environment() -> Iterator[None]:
    """Ray's processes find tests/support. It holds a secret, which nothing may write down; it is
    Ray's token too, the same for all files, because a process reads it only once.
    """
    support = str(Path(__file__).parents[1] / "support")
    given = os.environ.get("PYTHONPATH")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{support}:{given}" if given else support)
        patch.setenv("MY_SECRET_TOKEN", "hunter2-planted-secret")
        patch.setenv("RAY_AUTH_TOKEN", "hunter2-planted-secret")
        yield


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """Ray with two logical CPUs, however many there are."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()
