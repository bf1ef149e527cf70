"""gpu_train on CPU at a tiny size: what it measures and reports."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks import gpu_train as benchmark
from benchmarks.gpu_train import CASES, PARTS, VARIANTS, Case

TRIAL = ["--device", "cpu", "--quick", "--block-s", "0.005", "--cases", "resnet18_32"]


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use a network that a CPU trains in milliseconds, and restore the kernels' settings."""
    cudnn, precision = torch.backends.cudnn, torch.get_float32_matmul_precision()
    before = cudnn.allow_tf32, cudnn.benchmark
    monkeypatch.setitem(CASES, "resnet18_32", Case("resnet8", 32, 10, 4))
    yield
    torch.set_float32_matmul_precision(precision)
    cudnn.allow_tf32, cudnn.benchmark = before


def trial(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    """Return the variants of the JSON object of the last line."""
    benchmark.main([*TRIAL, *options])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    variants: dict[str, Any] = report["cases"]["resnet18_32"]["variants"]
    return variants


def test_a_trial_on_a_cpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    variants = trial(capsys)
    measured = ["plain", "plain_tuned", "learner", "learner_lars", "learner_muon"]
    assert [name for name, entry in variants.items() if entry["status"] == "ok"] == measured
    assert {variants[name]["status"] for name in VARIANTS.keys() - measured} == {"skipped"}
    for name in measured:
        ms = variants[name]["ms"]
        assert min(ms.values()) > 0
        assert sum(ms[part] for part in PARTS) <= 1.01 * ms["step"] + 0.01
        assert len(variants[name]["images_per_s_all"]) == 2
    assert 1 in (variants["plain"]["ratio"], variants["plain_tuned"]["ratio"])
