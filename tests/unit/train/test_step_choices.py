"""Compilation of a training step is chosen by measuring it, with compilers that do nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import raytrain_opt.train.step_choices as step_choices
from raytrain_opt.config.schema import Job
from raytrain_opt.data import load_shared_data
from raytrain_opt.train.compilation import BACKENDS
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.learner_config import LearnerConfig
from raytrain_opt.train.micro_batches import MicroBatches
from raytrain_opt.train.step_choices import StepChoices, describe_step, time_compiled

TWO = MicroBatches(range(2), 2)
LRS = (0.1, 0.05)


def net(num_classes: int, sample_shape: tuple[int, ...]) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(sample_shape[0], 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(4 * sample_shape[1] * sample_shape[2], num_classes),
    )


def learner(**changes: Any) -> Learner:
    values = {"model": net, "data": "digits", "epochs": 2, "global_batch_size": 16}
    job = Job.model_validate(values | {"optimizer": "SGD"} | changes)
    return Learner(LearnerConfig.from_job(job), load_shared_data(job.data), torch.device("cpu"))


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[list[Tensor]]:
    """The inputs of each graph that was compiled, by a compiler that changes nothing."""
    compiled = []

    def compile_graph(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        compiled.append(inputs)
        return graph

    monkeypatch.setitem(BACKENDS, "default", compile_graph)
    return compiled


def measured(monkeypatch: pytest.MonkeyPatch, compiled_s: float, eager_s: float) -> None:
    monkeypatch.setattr(step_choices, "time_compiled", lambda _: (compiled_s, eager_s))


def test_timing_a_compiled_model_compiles_nothing_new_and_keeps_the_state(
    graphs: list[list[Tensor]],
) -> None:
    trained = learner(compile="default", optimizer="AdamW")
    trained.train(1, 0, LRS, TWO)
    first, before = len(graphs), trained.state(copy=True).digest()
    times_s = time_compiled(trained)
    assert len(graphs) == first > 0
    assert trained.state(copy=False).digest() == before
    assert all(0 < value < math.inf for value in times_s)
    assert describe_step(trained) == {
        "precision": "fp32",
        "kernels": [],
        "memory_format": "channels_last",
        "compile": "default",
        "cuda_graphs": False,
        "optimizer": "fused AdamW",
        "loader_processes": 0,
    }


@pytest.mark.parametrize(
    ("eager_s", "kept", "recorded_s"),
    [(0.03, True, 0.03), (0.02, False, 0.02), (math.inf, True, None)],
)
def test_auto_keeps_what_is_faster_and_says_how_much(
    graphs: list[list[Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    eager_s: float,
    kept: bool,
    recorded_s: float | None,
) -> None:
    measured(monkeypatch, 0.02, eager_s)
    trained = learner()
    choice = StepChoices(trained, auto_compile=True, cuda_graphs=False)
    trained.train(1, 0, LRS, TWO)
    choice.after_phase(299.0)
    assert (trained.compiled, graphs, choice.measured) == ("off", [], {})
    choice.after_phase(1.0)
    assert trained.compiled == "default"
    trained.train(1, 2, LRS, TWO)
    choice.after_phase(1.0)
    assert trained.compiled == ("default" if kept else "off")
    assert choice.measured == {"compiled_s": 0.02, "eager_s": recorded_s}
    first = len(graphs)
    assert first > 0
    torch.compiler.reset()  # what is compiled is compiled again
    trained.train(1, 4, LRS, TWO)
    choice.after_phase(1000.0)
    assert (len(graphs) > first) == kept
    assert trained.compiled == ("default" if kept else "off")


def test_a_mode_that_the_job_names_is_measured_and_kept(
    graphs: list[list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(monkeypatch, 0.02, 0.01)
    trained = learner(compile="default")
    choice = StepChoices(trained, auto_compile=False, cuda_graphs=False)
    trained.train(1, 0, LRS, TWO)
    choice.after_phase(1.0)
    assert (trained.compiled, choice.measured["eager_s"]) == ("default", 0.01)


def test_a_network_that_cannot_be_compiled_stays_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def fail(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        tried.append(inputs)
        raise RuntimeError("planted failure")

    monkeypatch.setitem(BACKENDS, "default", fail)
    trained, eager = learner(), learner()
    choice = StepChoices(trained, auto_compile=True, cuda_graphs=False)
    choice.after_phase(300.0)
    with torch._dynamo.config.patch(suppress_errors=True):
        trained.train(1, 0, LRS, TWO)
    eager.train(1, 0, LRS, TWO)
    assert tried
    assert trained.state(copy=True).digest() == eager.state(copy=True).digest()
