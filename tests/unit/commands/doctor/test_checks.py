"""How the doctor judges what nodes report."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raytrain_opt.commands.doctor.checks import (
    Finding,
    check_exchange,
    check_nodes,
    print_findings,
)
from raytrain_opt.commands.doctor.facts import NodeFacts, NodeInspector
from raytrain_opt.errors import ResourcesError
from raytrain_opt.monitoring.nvml import GpuState

VERSIONS = {"python": "3.11.7", "ray": "2.60.0", "torch": "2.15.0"}
HEAD = NodeFacts("head", VERSIONS, shm_mib=8000, object_store_mib=6000, ready_s=12.0)
NODE = replace(HEAD, host="node")
H100 = GpuState("NVIDIA H100", 81559, 4, ())
WITH_GPUS = replace(NODE, gpus=(H100, H100), driver="595.58", ray_gpus=2.0)


def findings_of(check: str, *nodes: NodeFacts) -> list[Finding]:
    return [finding for finding in check_nodes(nodes, 600.0) if finding.check == check]


def finding_of(check: str, *nodes: NodeFacts) -> Finding:
    (finding,) = findings_of(check, *nodes)
    return finding


def test_equal_healthy_nodes_pass_every_check() -> None:
    findings = check_nodes([HEAD, NODE], start_limit_s=600.0)
    assert {finding.level for finding in findings} == {"ok"}
    assert [f.check for f in findings] == [
        *("versions", "GPUs", "storage", "clocks", "memory", "start-up")
    ]


def test_a_package_of_another_version() -> None:
    other = replace(NODE, versions={**VERSIONS, "ray": "2.59.1"})
    finding = finding_of("versions", HEAD, other)
    assert finding.level == "error"
    assert finding.result == "ray 2.60.0 on head, 2.59.1 on node"
    assert "constraints.txt" in finding.remedy


def test_gpus_and_driver_of_each_node() -> None:
    finding = finding_of("GPUs", HEAD, WITH_GPUS)
    assert finding.level == "ok"
    assert finding.result == "node: 2 x NVIDIA H100, driver 595.58"


@pytest.mark.parametrize(
    ("ray_gpus", "level", "words"),
    [(3.0, "error", "Ray offers 3 GPUs, NVML sees 2"), (0.0, "warning", "of which Ray offers 0")],
)
def test_ray_and_nvml_count_gpus_differently(ray_gpus: float, level: str, words: str) -> None:
    finding = finding_of("GPUs", HEAD, replace(WITH_GPUS, ray_gpus=ray_gpus))
    assert finding.level == level
    assert words in finding.result


def test_gpus_that_cannot_be_read_do_not_hide_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> None:
        raise ResourcesError("NVML cannot read the GPUs: GPU is lost")

    monkeypatch.setattr("raytrain_opt.commands.doctor.facts.gpu_states", lost)
    node = replace(NodeInspector().facts(None), host="broken", ray_gpus=2.0)
    broken, healthy = findings_of("GPUs", HEAD, node, WITH_GPUS)
    assert broken.level == "error"
    assert broken.result == "broken: NVML cannot read the GPUs: GPU is lost"
    assert broken.remedy == "check nvidia-smi there"
    assert healthy.level == "ok"
    assert findings_of("GPU driver", HEAD, node, WITH_GPUS) == []


def test_drivers_that_differ() -> None:
    other = replace(WITH_GPUS, host="other", driver="580.10")
    finding = finding_of("GPU driver", HEAD, WITH_GPUS, other)
    assert finding.level == "warning"
    assert "595.58 on node, 580.10 on other" in finding.result


def test_a_foreign_process_on_a_gpu() -> None:
    assert finding_of("GPU processes", WITH_GPUS).level == "ok"
    busy = replace(H100, used_mib=30_000, processes=("python (process 42)",))
    finding = finding_of("GPU processes", replace(WITH_GPUS, gpus=(H100, busy)))
    assert finding.level == "warning"
    assert finding.result == "node: python (process 42) (30,000 of 81,559 MiB) on GPU 1"


def test_storage_that_the_driver_cannot_write() -> None:
    finding = finding_of("storage", replace(HEAD, storage_error="/x cannot be written"), NODE)
    assert finding.level == "error"
    assert "head: /x cannot be written" in finding.result


@pytest.mark.parametrize("changes", [{"sees_storage": False}, {"storage_seen": False}])
def test_storage_that_is_not_shared(changes: dict[str, bool]) -> None:
    finding = finding_of("storage", HEAD, replace(NODE, **changes))
    assert finding.level == "warning"
    assert finding.result == "node does not see the same files"
    assert "only the driver's node (head)" in finding.remedy


def test_storage_that_a_node_cannot_write() -> None:
    finding = finding_of("storage", HEAD, replace(NODE, storage_error="/x: read-only"))
    assert (finding.level, finding.result) == ("warning", "node /x: read-only")


def test_data_that_are_missing_on_one_node() -> None:
    assert findings_of("data", HEAD, NODE) == []
    finding = finding_of("data", HEAD, replace(NODE, data_problems=("data.root: no such folder",)))
    assert finding.level == "error"
    assert finding.result == "node: data.root: no such folder"


def test_a_clock_that_is_off_by_more_than_a_message_takes() -> None:
    slow = replace(NODE, clock_offset_s=-4.0, clock_uncertainty_s=3.5)
    assert finding_of("clocks", HEAD, slow).level == "ok"
    finding = finding_of("clocks", HEAD, replace(slow, clock_uncertainty_s=0.1))
    assert finding.level == "warning"
    assert finding.result == "node is 3.9 s off the clock of head"


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"shm_mib": 64}, "else Ray uses the disk"),
        ({"object_store_mib": 200}, "--object-store-memory"),
    ],
)
def test_little_shared_memory(sizes: dict[str, int], words: str) -> None:
    finding = finding_of("memory", HEAD, replace(NODE, **sizes))
    assert finding.level == "warning"
    assert finding.result.startswith("node: /dev/shm")
    assert words in finding.remedy


def test_a_slow_start() -> None:
    finding = finding_of("start-up", HEAD, replace(NODE, ready_s=200.0))
    assert finding.level == "warning"
    assert "after 200.0 s on node" in finding.result
    assert "timeouts.start_s" in finding.remedy


def test_the_rate_of_an_exchange_is_that_of_a_ring() -> None:
    finding = check_exchange(workers=4, nodes=2, backend="gloo", mib=1024, duration_s=1.5)
    assert finding.level == "ok"
    assert (
        "1024 MiB over 4 workers on 2 nodes with gloo: 1.500 s, 1.00 GiB/s each" in finding.result
    )


@pytest.mark.parametrize(("nodes", "level"), [(1, "ok"), (2, "warning")])
def test_a_slow_exchange_between_nodes_is_a_warning(nodes: int, level: str) -> None:
    finding = check_exchange(workers=2, nodes=nodes, backend="nccl", mib=32, duration_s=2.0)
    assert finding.level == level
    assert ("NCCL_SOCKET_IFNAME" in finding.remedy) == (nodes == 2)


def test_the_table_shows_every_part_of_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    print_findings([Finding("room", "error", "[7 CPU] do not fit", "add nodes")])
    output = capsys.readouterr().out
    assert all(word in output for word in ("error", "room", "[7 CPU] do not fit", "add nodes"))
