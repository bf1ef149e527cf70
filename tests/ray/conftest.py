"""One local Ray and one finished run for all files of a command.

`make test` runs two commands side by side, one for each folder, each with a Ray of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import ray
from ray._common.utils import reset_ray_address
from ray.cluster_utils import Cluster

from raytrain_opt import RunResult, run
from raytrain_opt.cluster import fork_client
from raytrain_opt.cluster.fork_server import fork_server
from raytrain_opt.cluster.ray_private import start_processes_with
from raytrain_opt.pools.launcher import environment as launcher_environment
from tests.support.s3_server import s3, s3_server  # noqa: F401 - fixtures
from tests.support.small_jobs import quickstart


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


@pytest.fixture(scope="session")
def local_ray(environment: None) -> Iterator[Cluster]:
    """Start Ray with two logical CPUs, whatever the machine has; tests may add nodes.

    Processes are forks, as those of a local Ray. A node counts as gone after five checks, not in
    20 s, but in 5 s; a check takes at most 2 s.
    """
    head = {
        "num_cpus": 2,
        "include_dashboard": False,
        "object_store_memory": 512 * 1024**2,
        "_system_config": {
            "health_check_period_ms": 1000,
            "health_check_timeout_ms": 2000,
            "prestart_worker_first_driver": False,
        },
    }
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        stack.enter_context(start_processes_with(fork_client.__file__))
        inherited = launcher_environment(local=True, start_s=120)
        for name, value in (inherited | stack.enter_context(fork_server())).items():
            patch.setenv(name, value)
        cluster = Cluster(initialize_head=True, head_node_args=head)
        stack.callback(cluster.shutdown)
        reset_ray_address()  # or other drivers on this machine would find it and join
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        stack.callback(ray.shutdown)
        yield cluster


@pytest.fixture(scope="session")
def finished(local_ray: Cluster, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """Train the quickstart; many tests examine this run or compare with it."""
    return run(quickstart(str(tmp_path_factory.mktemp("finished"))))
