"""What the doctor makes of what nodes tell."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raytrain_opt.doctor.checks import check_exchange, check_nodes
from raytrain_opt.doctor.facts import GpuFacts, NodeFacts
from raytrain_opt.doctor.finding import Finding, print_findings

VERSIONS = {"python": "3.11.7", "ray": "2.60.0", "torch": "2.15.0"}
HEAD = NodeFacts("head", VERSIONS, shm_mib=8000, object_store_mib=6000, ready_s=12.0)
NODE = replace(HEAD, host="node")
H100 = GpuFacts("NVIDIA H100", 81559, 4, ())
WITH_GPUS = replace(NODE, gpus=(H100, H100), driver="595.58", ray_gpus=2.0)


def found(about: str, *nodes: NodeFacts) -> list[Finding]:
    return [each for each in check_nodes(nodes, start_limit_s=600.0) if each.about == about]


def the_one(about: str, *nodes: NodeFacts) -> Finding:
    (finding,) = found(about, *nodes)
    return finding


def test_equal_healthy_nodes_are_all_right() -> None:
    findings = check_nodes([HEAD, NODE], start_limit_s=600.0)
    assert {finding.level for finding in findings} == {"ok"}
    assert [f.about for f in findings] == [
        *("versions", "GPUs", "storage", "clocks", "memory", "start-up")
    ]


def test_a_package_of_another_version() -> None:
    other = replace(NODE, versions={**VERSIONS, "ray": "2.59.1"})
    finding = the_one("versions", HEAD, other)
    assert finding.level == "error"
    assert finding.what == "ray 2.60.0 on head, 2.59.1 on node"
    assert "constraints.txt" in finding.remedy


def test_gpus_and_driver_of_each_node() -> None:
    finding = the_one("GPUs", HEAD, WITH_GPUS)
    assert finding.level == "ok"
    assert finding.what == "node: 2 x NVIDIA H100, driver 595.58"


@pytest.mark.parametrize(
    ("ray_gpus", "level", "words"),
    [(3.0, "error", "Ray offers 3 GPUs, NVML sees 2"), (0.0, "warning", "of which Ray offers 0")],
)
def test_ray_and_nvml_count_gpus_differently(ray_gpus: float, level: str, words: str) -> None:
    finding = the_one("GPUs", HEAD, replace(WITH_GPUS, ray_gpus=ray_gpus))
    assert finding.level == level
    assert words in finding.what


def test_drivers_that_differ() -> None:
    other = replace(WITH_GPUS, host="other", driver="580.10")
    finding = the_one("GPU driver", HEAD, WITH_GPUS, other)
    assert finding.level == "warning"
    assert "595.58 on node, 580.10 on other" in finding.what


def test_a_foreign_process_on_a_gpu() -> None:
    assert the_one("GPU processes", WITH_GPUS).level == "ok"
    taken = replace(H100, used_mib=30_000, processes=("python (process 42)",))
    finding = the_one("GPU processes", replace(WITH_GPUS, gpus=(H100, taken)))
    assert finding.level == "warning"
    assert finding.what == "node: python (process 42) (30,000 of 81,559 MiB) on GPU 1"


def test_storage_that_the_driver_cannot_write() -> None:
    finding = the_one("storage", replace(HEAD, storage_error="/x cannot be written"), NODE)
    assert finding.level == "error"
    assert "head: /x cannot be written" in finding.what


@pytest.mark.parametrize("changes", [{"sees_storage": False}, {"storage_seen": False}])
def test_storage_that_is_not_shared(changes: dict[str, bool]) -> None:
    finding = the_one("storage", HEAD, replace(NODE, **changes))
    assert finding.level == "warning"
    assert finding.what == "node does not see the same files"
    assert "driver's node only (head)" in finding.remedy


def test_storage_that_a_node_cannot_write() -> None:
    finding = the_one("storage", HEAD, replace(NODE, storage_error="/x: read-only"))
    assert (finding.level, finding.what) == ("warning", "node /x: read-only")


def test_data_that_are_missing_on_one_node() -> None:
    assert found("data", HEAD, NODE) == []
    finding = the_one("data", HEAD, replace(NODE, data_problems=("data.root: no such folder",)))
    assert finding.level == "error"
    assert finding.what == "node: data.root: no such folder"


def test_a_clock_that_is_off_by_more_than_the_way_of_a_message() -> None:
    slow = replace(NODE, clock_offset_s=-4.0, clock_uncertainty_s=3.5)
    assert the_one("clocks", HEAD, slow).level == "ok"
    finding = the_one("clocks", HEAD, replace(slow, clock_uncertainty_s=0.1))
    assert finding.level == "warning"
    assert finding.what == "node is 3.9 s off the clock of head"


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"shm_mib": 64}, "Ray falls back to the disk"),
        ({"object_store_mib": 200}, "--object-store-memory"),
    ],
)
def test_little_shared_memory(sizes: dict[str, int], words: str) -> None:
    finding = the_one("memory", HEAD, replace(NODE, **sizes))
    assert finding.level == "warning"
    assert finding.what.startswith("node: /dev/shm")
    assert words in finding.remedy


def test_a_slow_start() -> None:
    finding = the_one("start-up", HEAD, replace(NODE, ready_s=200.0))
    assert finding.level == "warning"
    assert "after 200.0 s on node" in finding.what
    assert "limits.start_s" in finding.remedy


def test_the_rate_of_an_exchange_is_that_of_a_ring() -> None:
    finding = check_exchange(workers=4, nodes=2, backend="gloo", mib=1024, seconds=1.5)
    assert finding.level == "ok"
    assert "1024 MiB over 4 workers on 2 nodes with gloo: 1.500 s, 1.00 GiB/s each" in finding.what


@pytest.mark.parametrize(("nodes", "level"), [(1, "ok"), (2, "warning")])
def test_a_slow_exchange_is_the_networks_fault(nodes: int, level: str) -> None:
    finding = check_exchange(workers=2, nodes=nodes, backend="nccl", mib=32, seconds=2.0)
    assert finding.level == level
    assert ("NCCL_SOCKET_IFNAME" in finding.remedy) == (nodes == 2)


def test_the_table_tells_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    print_findings([Finding("room", "error", "[7 CPU] do not fit", "add nodes")])
    output = capsys.readouterr().out
    assert all(word in output for word in ("error", "room", "[7 CPU] do not fit", "add nodes"))
