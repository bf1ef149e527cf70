"""What a node finds about itself, and how the findings of many become one table."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain_opt import storage
from raytrain_opt.commands import doctor
from raytrain_opt.commands.doctor import Finding, look_at_node, merged
from raytrain_opt.config.schema import Job
from raytrain_opt.errors import ResourcesError
from raytrain_opt.recording.recorder import versions

H100 = "NVIDIA H100"


def look(path: Path, check: str, ray_gpus: float = 0.0, **expected: str) -> Finding:
    """Return the finding of one check, on a node with the files of the driver in `path`."""
    data = {"name": "image_folder", "root": "/none"}
    values = {"model": "resnet18", "data": data, "epochs": 1, "global_batch_size": 8}
    job = Job.model_validate(values)
    found = look_at_node({**versions(), **expected}, ray_gpus, job, str(path), "file")
    (finding,) = (finding for finding in found if finding.check == check)
    return finding


@pytest.mark.parametrize(
    ("check", "level", "result", "remedy"),
    [
        ("versions", "ok", "torch", ""),
        ("GPUs", "ok", "none", ""),
        ("storage", "ok", "reads", ""),
        ("data", "error", "data.root: no such file or folder", "same path on every node"),
    ],
)
def test_a_node_looks_at_itself(
    tmp_path: Path, check: str, level: str, result: str, remedy: str
) -> None:
    storage.write(str(tmp_path), "file", b"")
    finding = look(tmp_path, check)
    assert (finding.level, result in finding.result) == (level, True)
    assert remedy in finding.remedy


def test_other_versions_and_files_are_named(tmp_path: Path) -> None:
    finding = look(tmp_path, "versions", ray="2.59.1")
    assert (finding.level, f"ray {versions()['ray']}, not 2.59.1") == ("error", finding.result)
    finding = look(tmp_path, "storage")
    assert (finding.level, "does not see" in finding.result) == ("warning", True)


@pytest.mark.parametrize(
    ("names", "ray_gpus", "level", "result"),
    [
        ([H100, H100], 2.0, "ok", "2 x NVIDIA H100"),
        ([H100, H100], 3.0, "error", "2 x NVIDIA H100, and Ray offers 3"),
        ([H100, H100], 0.0, "warning", "2 x NVIDIA H100, and Ray offers 0"),
        (None, 1.0, "error", "GPU is lost"),
    ],
)
def test_gpus_are_compared_with_what_ray_offers(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    names: list[str] | None,
    ray_gpus: float,
    level: str,
    result: str,
) -> None:
    def gpu_names() -> list[str]:
        if names is None:
            raise ResourcesError("GPU is lost")
        return names

    monkeypatch.setattr(doctor, "gpu_names", gpu_names)
    finding = look(tmp_path, "GPUs", ray_gpus)
    assert (finding.level, finding.result) == (level, result)
    assert ("nvidia-smi" in finding.remedy) == (level != "ok")


def test_equal_findings_of_nodes_are_one() -> None:
    good, bad = Finding("storage", "ok", "reads"), Finding("GPUs", "error", "none")
    findings = merged([("a", good), ("b", bad), ("c", good)])
    assert [finding.result for finding in findings] == ["b: none", "a, c: reads"]
