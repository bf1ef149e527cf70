"""Which clusters may still grow, and what is asked of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain_opt import Job
from raytrain_opt.cluster import resources
from raytrain_opt.cluster.resources import expected_resources, may_grow, plan_when_there_is_room
from raytrain_opt.config.load import parse_job
from raytrain_opt.errors import ResourcesError


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a driver that is not on Kubernetes."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_USAGE_STATS_KUBERAY_IN_USE", raising=False)
    return tmp_path


def job(workers: str, more: str = "") -> Job:
    text = "model: resnet8\ndata: digits\nepochs: 1\nglobal_batch_size: 64\n"
    return parse_job(f"{text}timeouts: {{start_s: 60}}\nworkers: {workers}\n{more}", "test")


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
    assert expected_resources(job(workers), 0) == [each, each]


def test_a_slot_is_requested_beside_the_workers_where_slots_train_the_candidates() -> None:
    policy = "learning_rate: {policy: stpt}\n"
    two = job("{count: 2, use_gpu: true}", policy)
    own = job("{count: 2, use_gpu: true}", f"{policy}slots: {{resources: {{GPU: 1}}}}\n")
    assert expected_resources(two, 4) == [{"GPU": 0.6}, {"GPU": 0.6}, {"GPU": 0.4}]
    assert expected_resources(own, 4) == [{"GPU": 0.6}, {"GPU": 0.6}, {"GPU": 1.0}]


class Cluster:
    """One node of four CPUs; each look shows the next number of free ones, the last one again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *free: float) -> None:
        self.free, self.now_s = list(free), 0.0
        monkeypatch.setattr(resources, "total_resources", lambda: [{"CPU": 4.0}])
        monkeypatch.setattr(resources, "free_resources", self.look)
        monkeypatch.setattr(resources, "alive_nodes", lambda: [{}])
        monkeypatch.setattr(resources, "monotonic_s", lambda: self.now_s)
        monkeypatch.setattr(resources.time, "sleep", self.sleep)

    def look(self) -> list[dict[str, float]]:
        return [{"CPU": self.free.pop(0) if len(self.free) > 1 else self.free[0]}]

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


TWO = job("{count: 2, resources: {CPU: 1.5}}")


def test_what_has_just_been_released_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run before in this driver has ended, and Ray gives back what it held."""
    cluster, notes = Cluster(monkeypatch, 0, 0, 2, 4), list[str]()
    assert plan_when_there_is_room(TWO, 0, notes.append).workers == 2
    assert (notes, cluster.now_s) == ([], pytest.approx(0.6))


def test_what_other_jobs_hold_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, notes = Cluster(monkeypatch, *[2] * 30, 4), list[str]()
    assert plan_when_there_is_room(TWO, 0, notes.append).workers == 2
    assert cluster.now_s > resources._RELEASE_S
    assert "waiting up to 60 s (timeouts.start_s) for room" in notes[0]
    assert "2 workers of 1.5 CPU each do not fit: room for 1" in notes[0]


def test_gpus_that_other_jobs_hold_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the job would fit on the CPU, and `use_gpu` is `auto`."""
    cluster, notes = Cluster(monkeypatch, 4), list[str]()
    monkeypatch.setattr(resources, "total_resources", lambda: [{"CPU": 4.0, "GPU": 1.0}])
    free = [[{"CPU": 4.0}]] * 30 + [[{"CPU": 4.0, "GPU": 1.0}]]
    monkeypatch.setattr(
        resources, "free_resources", lambda: free.pop(0) if len(free) > 1 else free[0]
    )
    assert plan_when_there_is_room(job("{count: 1}"), 0, notes.append).use_gpu
    assert cluster.now_s > resources._RELEASE_S
    assert "no node has a free one (1 node (4 CPU))" in notes[0]


def test_others_may_hold_it_too_long(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, notes = Cluster(monkeypatch, 2), list[str]()
    with pytest.raises(ResourcesError, match="room for 1 on .* no room within 60 s"):
        plan_when_there_is_room(TWO, 0, notes.append)
    assert cluster.now_s >= 60


def test_what_never_fits_is_refused_at_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, notes = Cluster(monkeypatch, 4), list[str]()
    four = job("{count: 4, resources: {CPU: 1.5}}")
    with pytest.raises(ResourcesError, match="4 workers of 1.5 CPU each do not fit"):
        plan_when_there_is_room(four, 0, notes.append)
    assert (notes, cluster.now_s) == ([], 0)


class GrowingCluster(Cluster):
    """Nodes of two CPUs, the first `held` by others, the second from 20 s of a request on."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch, held: float) -> None:
        super().__init__(monkeypatch, 0)
        (home / "ray_bootstrap_config.yaml").write_text("cluster_name: x\nmax_workers: 1\n")
        self.held, self.requested_s, self.requests = held, 0.0, list[GrowingCluster]()
        monkeypatch.setattr(resources, "alive_nodes", self.total)
        monkeypatch.setattr(resources, "total_resources", self.total)
        monkeypatch.setattr(resources.ray.util, "placement_group", self.request)
        monkeypatch.setattr(resources.ray.util, "remove_placement_group", self.requests.remove)

    def total(self) -> list[dict[str, float]]:
        return [{"CPU": 2.0}] * (2 if self.requested_s >= 20 else 1)

    def look(self) -> list[dict[str, float]]:
        if self.requests:  # what it gets is not free
            return [{"CPU": 0.5} for _ in self.total()]
        return [{"CPU": 2.0 - self.held}, *self.total()[1:]]

    def request(self, resources: list[dict[str, float]]) -> GrowingCluster:
        assert resources == [{"CPU": 1.5}] * len(resources)
        self.requests.append(self)
        return self

    def wait(self, seconds: int) -> bool:
        assert isinstance(seconds, int), "Ray takes whole seconds"
        self.sleep(seconds)
        return len(self.total()) == 2

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self.requested_s += seconds if self.requests else 0


@pytest.mark.parametrize(("workers", "held"), [(2, 0.0), (1, 1.0)], ids=["never fits", "held"])
def test_nodes_are_requested_and_the_request_does_not_hold_what_the_run_needs(
    home: Path, monkeypatch: pytest.MonkeyPatch, workers: int, held: float
) -> None:
    cluster, notes = GrowingCluster(home, monkeypatch, held), list[str]()
    request = job(f"{{count: {workers}, resources: {{CPU: 1.5}}}}")
    assert plan_when_there_is_room(request, 0, notes.append).workers == workers
    assert (cluster.requests, cluster.requested_s) == ([], pytest.approx(20))
    assert len(notes) == 1
    assert "waiting up to 60 s (timeouts.start_s) for room: " in notes[0]
