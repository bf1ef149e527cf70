"""gpu_train on CPU at a tiny size: what it chooses, measures and reports."""

from __future__ import annotations

import json
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu_train as benchmark
from benchmarks import gpu_train_steps as steps

TRIAL = ["--device", "cpu", "--quick", "--block-s", "0.005", "--rounds", "2"]
ON_CPU = ["plain_fp32", "plain_amp", "eager", "eager_lars", "eager_fp16"]


@pytest.fixture
def gpu_train(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark, with a network that a CPU trains in milliseconds in place of ResNet-50."""
    tiny = steps.Case("resnet8", pixels=8, classes=10, batch_size=4, distinct=8, padding=1)
    monkeypatch.setitem(steps.CASES, "resnet50_32", tiny)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    return benchmark


def result(gpu_train: ModuleType, capsys: pytest.CaptureFixture[str], *options: str) -> Any:
    """Return the exit code and the JSON object of the last line."""
    code = gpu_train.main([*TRIAL, *options])
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_trial_on_a_cpu(gpu_train: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = result(gpu_train, capsys, "--only", "resnet50_32")
    assert code == 0
    (run,) = report["runs"]
    assert (run["case"], run["batch_size"], run["rounds"]) == ("resnet50_32", 2, 2)
    statuses = {name: variant["status"] for name, variant in run["variants"].items()}
    graphs = ["compile", "graph", "compile_graph", "compile_graph_lars"]
    assert statuses == dict.fromkeys(ON_CPU, "ok") | dict.fromkeys(graphs, "skipped")
    for name in ON_CPU:
        variant = run["variants"][name]
        parts = [variant["ms"][key] for key in ("data", "forward", "backward", "update")]
        assert min(parts) > 0
        assert sum(parts) <= 1.5 * variant["ms"]["step"]
        assert len(variant["images_per_s_all"]) == 2
        assert 0 < variant["loss"] < 10
    assert run["variants"]["plain_amp"]["ratio"] == 1
    assert run["lars_over_sgd"]["eager"] > 0
    assert run["lars_over_sgd"]["compile_graph"] is None


def test_out_of_memory_and_a_failure_affect_one_variant_only(
    gpu_train: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = gpu_train.Bench.step

    def step(self: Any, variant: Any) -> Any:
        if variant.optimizer == "lars":
            raise torch.OutOfMemoryError("CUDA out of memory.\nMore lines.")
        if variant.channels_last and variant.dtype == torch.float16:
            raise RuntimeError("no kernel")
        return original(self, variant)

    monkeypatch.setattr(gpu_train.Bench, "step", step)
    code, report = result(gpu_train, capsys, "--only", "resnet50_32:eager*")
    variants = report["runs"][0]["variants"]
    assert code == 1
    assert list(variants) == ["plain_amp", "eager", "eager_lars", "eager_fp16"]
    assert variants["eager"]["ratio"] > 0
    assert variants["eager_lars"] == {
        "status": "out_of_memory",
        "why": "CUDA out of memory.",
    }
    assert variants["eager_fp16"] == {"status": "failed", "why": "RuntimeError: no kernel"}
    assert report["runs"][0]["lars_over_sgd"] == {"eager": None}


def test_no_variant_starts_after_the_time_limit(
    gpu_train: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    only = ["--only", "resnet50_32:eager", "--max-seconds", "-1"]
    code, report = result(gpu_train, capsys, *only)
    variants = report["runs"][0]["variants"]
    assert code == 0
    assert {variant["status"] for variant in variants.values()} == {"no_time"}


@pytest.mark.parametrize(
    ("options", "runs"),
    [
        (
            [],
            [("resnet50_224", 256), ("vgg16_224", 128), ("resnet50_32", 4), ("vgg16_32", 1024)],
        ),
        (["--quick"], [("resnet50_224", 256), ("vgg16_32", 1024)]),
        (["--quick", "--only", "*_224:graph"], [("resnet50_224", 256), ("vgg16_224", 128)]),
        (
            ["--only", "vgg16_32", "--batch-sizes", "vgg16_32=64", "vgg16_32=96"],
            [("vgg16_32", 64), ("vgg16_32", 96)],
        ),
    ],
)
def test_options_select_the_runs(
    gpu_train: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    runs: list[tuple[str, int]],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert gpu_train.chosen_runs(gpu_train.arguments(options)) == runs


@pytest.mark.parametrize(
    ("only", "variants"),
    [
        (["*:compile_graph"], ["plain_amp", "compile_graph"]),
        (["vgg16_32:autotune_graph"], ["plain_amp", "autotune_graph"]),
        (["resnet50_224", "*:graph"], ["plain_amp", "graph"]),
        (["resnet50_224"], []),
    ],
)
def test_options_select_the_variants(
    gpu_train: ModuleType, only: list[str], variants: list[str]
) -> None:
    assert gpu_train.chosen_variants("vgg16_32", only) == variants


def test_the_variant_that_compiles_for_minutes_runs_only_by_name(gpu_train: ModuleType) -> None:
    for only in ([], ["vgg16_32"], ["*:*"], ["vgg16_32:*graph"]):
        assert "autotune_graph" not in gpu_train.chosen_variants("vgg16_32", only)


def test_impossible_options_are_refused(
    gpu_train: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for options, message in (
        ([], "needs an NVIDIA GPU"),
        (["--only", "resnet18"], "matches nothing"),
        (["--batch-sizes", "vgg16_32=0"], "CASE=N"),
    ):
        with pytest.raises(SystemExit) as exit_:
            gpu_train.main(options)
        assert exit_.value.code == 2
        assert message in capsys.readouterr().err


def test_the_work_of_resnet50_and_its_fraction_of_the_limits(gpu_train: ModuleType) -> None:
    work = gpu_train.work_of(gpu_train.CASES["resnet50_224"])
    # 4.09 GMAC an image; the first convolution's input needs no gradient.
    assert work["gflop_per_image"] == pytest.approx(2 * (3 * 4.09 - 0.118), rel=0.01)
    limits = {"matmul_tflop_per_s": 800.0, "copy_tb_per_s": 4.8}
    fractions = gpu_train.limit_fractions(13.9, work, limits)
    assert fractions["matmul_fraction"] == pytest.approx(13_900 * 24.3e9 / 800e12, rel=0.01)
    assert fractions["passes"] == pytest.approx(16, rel=0.05)


def test_a_ratio_is_the_median_over_the_rounds(gpu_train: ModuleType) -> None:
    upper, lower = (
        SimpleNamespace(status="ok", blocks=[{"step": ms} for ms in times])
        for times in ([2.0, 30.0, 9.0], [1.0, 10.0, 2.0])
    )
    assert gpu_train.median_ratio(upper, lower) == 3
