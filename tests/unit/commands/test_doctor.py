"""How the doctor judges what nodes report."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raytrain_opt import storage
from raytrain_opt.commands import doctor
from raytrain_opt.commands.doctor import Finding, NodeFacts, NodeInspector, check_nodes
from raytrain_opt.errors import ResourcesError

VERSIONS = {"python": "3.11.7", "ray": "2.60.0", "torch": "2.15.0"}
HEAD, NODE = NodeFacts("head", VERSIONS), NodeFacts("node", VERSIONS)
WITH_GPUS = replace(NODE, gpus=("NVIDIA H100",) * 2, ray_gpus=2.0)
LOST = "NVML cannot read the GPUs: GPU is lost"


def findings_of(check: str, *nodes: NodeFacts) -> list[Finding]:
    return [finding for finding in check_nodes(nodes) if finding.check == check]


def test_equal_healthy_nodes_pass_every_check() -> None:
    findings = check_nodes([HEAD, NODE])
    assert [(f.check, f.level) for f in findings] == [
        ("versions", "ok"),
        ("GPUs", "ok"),
        ("storage", "ok"),
    ]


@pytest.mark.parametrize(
    ("check", "node", "level", "result", "remedy"),
    [
        (
            "versions",
            replace(NODE, versions={**VERSIONS, "ray": "2.59.1"}),
            *("error", "ray 2.60.0 on head, 2.59.1 on node", "constraints.txt"),
        ),
        ("GPUs", WITH_GPUS, "ok", "node: 2 x NVIDIA H100", ""),
        (
            "GPUs",
            replace(WITH_GPUS, ray_gpus=3.0),
            *("error", "node: Ray offers 3 GPUs, NVML sees 2", "nvidia-smi"),
        ),
        (
            "GPUs",
            replace(WITH_GPUS, ray_gpus=0.0),
            *("warning", "node: 2 x NVIDIA H100, of which Ray offers 0", "CUDA_VISIBLE_DEVICES"),
        ),
        ("GPUs", replace(NODE, gpu_error=LOST), "error", f"node: {LOST}", "nvidia-smi"),
        (
            "storage",
            replace(NODE, storage_error="does not see the same files"),
            *("warning", "node does not see the same files", "only the driver's node (head)"),
        ),
        (
            "data",
            replace(NODE, data_problems=("data.root: no such folder",)),
            *("error", "node: data.root: no such folder", "same path on every node"),
        ),
    ],
)
def test_a_node_that_differs(
    check: str, node: NodeFacts, level: str, result: str, remedy: str
) -> None:
    (finding,) = findings_of(check, HEAD, node)
    assert (finding.level, finding.result) == (level, result)
    assert remedy in finding.remedy


def test_a_node_whose_gpus_cannot_be_read_reports_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    def lost() -> None:
        raise ResourcesError(LOST)

    monkeypatch.setattr(doctor, "gpu_names", lost)
    shared, other = (str(tmp_path_factory.mktemp(name)) for name in ("shared", "other"))
    storage.write(shared, "file", b"")
    facts = NodeInspector().facts(None, shared, "file")
    assert (facts.gpu_error, facts.storage_error) == (LOST, None)
    assert NodeInspector().facts(None, other, "file").storage_error is not None


@pytest.mark.parametrize(
    ("nodes", "duration_s", "level", "figures"),
    [
        (1, 2.0, "ok", "0.017 GB/s"),
        (2, 2.0, "warning", "0.017 GB/s"),
        (2, 0.035, "ok", "0.96 GB/s"),
    ],
)
def test_an_exchange_is_judged_as_a_ring(
    nodes: int, duration_s: float, level: str, figures: str
) -> None:
    finding = doctor.judge_exchange(2, nodes, "nccl", duration_s)
    assert finding.level == level
    assert f"over 2 workers on {nodes} node" in finding.result
    assert figures in finding.result
    assert ("NCCL_SOCKET_IFNAME" in finding.remedy) == (level == "warning")
