"""benchmarks/gpu_train.py on a CPU, at a tiny size: what it chooses, measures and reports."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TRIAL = ["--device", "cpu", "--quick", "--block-s", "0.005", "--rounds", "2"]
ON_CPU = ["plain_fp32", "plain_amp", "eager", "eager_lars", "eager_fp16"]

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def gpu_train(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """With a network in place of ResNet-50 that a CPU trains in milliseconds."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    steps = importlib.import_module("gpu_train_steps")
    tiny = steps.Case("resnet8", pixels=8, classes=10, batch_size=4, distinct=8, padding=1)
    monkeypatch.setitem(steps.CASES, "resnet50_32", tiny)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    return importlib.import_module("gpu_train")


def result(gpu_train: ModuleType, capsys: pytest.CaptureFixture[str], *options: str) -> Any:
    """Exit code and the JSON of the last line."""
    code = gpu_train.main([*TRIAL, *options])
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_trial_on_a_cpu(gpu_train: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = result(gpu_train, capsys, "--only", "resnet50_32")
    assert code == 0
    (run,) = report["runs"]
    assert (run["case"], run["batch_size"], run["rounds"]) == ("resnet50_32", 2, 2)
    states = {name: of["status"] for name, of in run["variants"].items()}
    graphs = ["compile", "graph", "compile_graph", "compile_graph_lars"]
    assert states == dict.fromkeys(ON_CPU, "ok") | dict.fromkeys(graphs, "skipped")
    for name in ON_CPU:
        of = run["variants"][name]
        parts = [of["ms"][key] for key in ("data", "forward", "backward", "update")]
        assert min(parts) > 0
        assert sum(parts) <= 1.5 * of["ms"]["step"]
        assert len(of["images_per_s_all"]) == 2
        assert 0 < of["loss"] < 10
    assert run["variants"]["plain_amp"]["ratio"] == 1
    assert run["lars_over_sgd"]["eager"] > 0
    assert run["lars_over_sgd"]["compile_graph"] is None


def test_no_memory_and_a_failure_cost_their_variant_only(
    gpu_train: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = gpu_train.Bench.step

    def step(self: Any, variant: Any) -> Any:
        if variant.optimizer == "lars":
            raise torch.OutOfMemoryError("CUDA out of memory.\nMore lines.")
        if variant.channels_last and variant.dtype == torch.float16:
            raise RuntimeError("no kernel")
        return whole(self, variant)

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


def test_nothing_begins_after_the_given_time(
    gpu_train: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    only = ["--only", "resnet50_32:eager", "--max-seconds", "-1"]
    code, report = result(gpu_train, capsys, *only)
    variants = report["runs"][0]["variants"]
    assert code == 0
    assert {of["status"] for of in variants.values()} == {"no_time"}


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
def test_the_runs_that_options_choose(
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
def test_the_variants_that_options_choose(
    gpu_train: ModuleType, only: list[str], variants: list[str]
) -> None:
    assert gpu_train.chosen_variants("vgg16_32", only) == variants


def test_minutes_of_compiling_are_never_chosen_unasked(gpu_train: ModuleType) -> None:
    for only in ([], ["vgg16_32"], ["*:*"], ["vgg16_32:*graph"]):
        assert "autotune_graph" not in gpu_train.chosen_variants("vgg16_32", only)


def test_the_script_refuses_what_it_cannot_measure(
    gpu_train: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for options, said in (
        ([], "needs an NVIDIA GPU"),
        (["--only", "resnet18"], "chooses nothing"),
        (["--batch-sizes", "vgg16_32=0"], "CASE=N"),
    ):
        with pytest.raises(SystemExit) as exit_:
            gpu_train.main(options)
        assert exit_.value.code == 2
        assert said in capsys.readouterr().err


def test_the_work_of_resnet50_and_its_share_of_the_limits(gpu_train: ModuleType) -> None:
    work = gpu_train.work_of(gpu_train.CASES["resnet50_224"])
    # 4.09 GMAC an image; the first convolution's input needs no gradient.
    assert work["gflop_per_image"] == pytest.approx(2 * (3 * 4.09 - 0.118), rel=0.01)
    limits = {"matmul_tflop_per_s": 800.0, "copy_tb_per_s": 4.8}
    shares = gpu_train.shares(13.9, work, limits)
    assert shares["matmul_share"] == pytest.approx(13_900 * 24.3e9 / 800e12, rel=0.01)
    assert shares["passes"] == pytest.approx(16, rel=0.05)


def test_a_ratio_is_the_median_of_those_of_the_rounds(gpu_train: ModuleType) -> None:
    upper, lower = (
        SimpleNamespace(status="ok", blocks=[{"step": ms} for ms in times])
        for times in ([2.0, 30.0, 9.0], [1.0, 10.0, 2.0])
    )
    assert gpu_train.median_ratio(upper, lower) == 3
