"""Which clusters may still grow, and what is asked of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain_opt import Job
from raytrain_opt.cluster.autoscaling import may_grow, worker_requests
from raytrain_opt.config.load import parse_job


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a driver that is not on Kubernetes."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_USAGE_STATS_KUBERAY_IN_USE", raising=False)
    return tmp_path


def job(workers: str) -> Job:
    text = "model: resnet8\ndata: digits\nepochs: 1\nglobal_batch_size: 64\n"
    return parse_job(f"{text}workers: {workers}\n", "test")


def test_a_cluster_that_nobody_described_does_not_grow(home: Path) -> None:
    assert not may_grow(1)


@pytest.mark.parametrize(("nodes", "grows"), [(1, True), (2, True), (3, False)])
def test_one_of_ray_up_grows_up_to_its_file(home: Path, nodes: int, grows: bool) -> None:
    (home / "ray_bootstrap_config.yaml").write_text("cluster_name: x\nmax_workers: 2\n")
    assert may_grow(nodes) is grows


def test_kuberay_may_bring_pods(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USAGE_STATS_KUBERAY_IN_USE", "1")
    assert may_grow(5)


@pytest.mark.parametrize(
    ("workers", "each"),
    [
        ("{count: 2}", {"CPU": 1.0}),
        ("{count: 2, use_gpu: true}", {"GPU": 1.0}),
        ("{count: 2, resources: {CPU: 3, GPU: 1}}", {"CPU": 3.0, "GPU": 1.0}),
    ],
)
def test_the_resources_of_the_workers_are_requested(workers: str, each: dict[str, float]) -> None:
    assert worker_requests(job(workers).workers) == [each, each]
