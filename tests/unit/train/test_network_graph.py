"""CUDA graphs of the network, with graphs that a CPU replays (`tests.support.fake_graphs`)."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raytrain_opt.config.schema import Job
from raytrain_opt.data import load_shared_data
from raytrain_opt.train import step_choices
from raytrain_opt.train.compilation import BACKENDS
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.learner_config import LearnerConfig
from raytrain_opt.train.micro_batches import MicroBatches
from raytrain_opt.train.network_graph import NetworkGraph
from raytrain_opt.train.step_choices import StepChoices, describe_step
from tests.support.fake_graphs import FakeGraphs

TWO = MicroBatches(range(2), 2)
LRS = (0.1, 0.05)


class Net(nn.Module):
    """With everything that a pass changes or may leave out: BatchNorm, dropout, unused weights."""

    def __init__(self, num_classes: int, sample_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(sample_shape[0], 4, 3, padding=1)
        self.norm, self.dropout = nn.BatchNorm2d(4), nn.Dropout(0.3)
        self.last = nn.Linear(4 * sample_shape[1] * sample_shape[2], num_classes)
        self.unused = nn.Parameter(torch.ones(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.norm(self.convolution(x)).relu())
        output: Tensor = self.last(x.flatten(1))
        return output


def learner(**changes: Any) -> Learner:
    values = {"model": Net, "data": "digits", "epochs": 4, "global_batch_size": 16}
    job = Job.model_validate(values | {"optimizer": "SGD"} | changes)
    return Learner(LearnerConfig.from_job(job), load_shared_data(job.data), torch.device("cpu"))


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> FakeGraphs:
    fakes = FakeGraphs()
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", fakes.make_graphed_callables)
    monkeypatch.setattr(step_choices, "monotonic_s", fakes.clock())
    return fakes


def with_graphs(**changes: Any) -> tuple[Learner, StepChoices]:
    trained = learner(**changes)
    return trained, StepChoices(trained, auto_compile=False, cuda_graphs=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": {"name": "SGD", "args": {"momentum": 0.9}, "clip_norm": 0.1}},
        {"optimizer": "LARS"},
        {"optimizer": "Muon", "average": {"decay": "auto"}},
        {"optimizer": "ScheduleFreeAdamW"},
        {"optimizer": "SGD", "precision": "bf16"},
        {"data": {"name": "digits", "drop_last": False}, "global_batch_size": 1000},
    ],
    ids=str,
)
def test_the_weights_are_those_without_graphs(graphs: FakeGraphs, changes: dict[str, Any]) -> None:
    eager = learner(**changes)
    trained, choices = with_graphs(**changes)
    for epoch in (1, 2, 3):
        for one in (eager, trained):
            one.train(epoch, 0, LRS, TWO)
            one.sync_batch_norm_stats()
        assert trained.state(copy=True).digest() == eager.state(copy=True).digest()
        choices.after_phase(1.0)
        assert trained.state(copy=True).digest() == eager.state(copy=True).digest()
    assert graphs.captured == 1
    assert trained.network_graph is not None
    assert describe_step(trained)["cuda_graphs"] is True
    assert choices.measured == {"graph_s": 0.5, "no_graph_s": 1.0, "graph_refused": None}


def test_every_pass_of_a_phase_is_a_graph_and_no_other_one(graphs: FakeGraphs) -> None:
    trained, choices = with_graphs(batch_norm={"recalibrate_batches": 2})
    trained.train(1, 0, LRS, TWO)
    assert graphs.replayed == 0
    choices.after_phase(1.0)
    before = graphs.replayed
    trained.train(2, 0, LRS, TWO)
    assert graphs.replayed - before == len(LRS) * TWO.count
    trained.sync_batch_norm_stats()
    trained.evaluate("test")
    assert graphs.replayed - before == len(LRS) * TWO.count


def test_graphs_take_the_place_of_compiled_code_in_phases_only(
    graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def compile_graph(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        def run(*args: Any) -> Any:
            calls.append(args)
            return graph(*args)

        return run

    monkeypatch.setitem(BACKENDS, "default", compile_graph)
    trained, choices = with_graphs(compile="default")
    trained.train(1, 0, LRS, TWO)
    assert calls
    choices.after_phase(1.0)
    assert choices.measured["compiled_s"] is not None
    calls.clear()
    trained.train(2, 0, LRS, TWO)
    assert (graphs.captured, calls) == (1, [])
    trained.evaluate("test")
    assert calls


def test_a_state_of_another_training_continues_as_without(graphs: FakeGraphs) -> None:
    eager, other = learner(optimizer="AdamW"), learner(optimizer="AdamW", seed=1)
    trained, choices = with_graphs(optimizer="AdamW")
    other.train(1, 0, LRS, TWO)
    trained.train(1, 0, LRS, TWO)
    choices.after_phase(1.0)
    for one in (eager, trained):
        one.load(other.state(copy=True))
        one.train(2, 0, LRS, TWO)
    assert graphs.captured == 1
    assert trained.state(copy=True).digest() == eager.state(copy=True).digest()


def test_graphs_can_be_measured_before_the_first_phase(graphs: FakeGraphs) -> None:
    trained, choices = with_graphs()
    choices.after_phase(1.0)
    assert (graphs.captured, choices.measured["graph_refused"]) == (1, None)
    assert trained.network_graph is not None


def test_graphs_that_are_not_faster_are_dropped(
    graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_choices, "monotonic_s", graphs.clock(graph_s=1.0))
    trained, choices = with_graphs()
    for epoch in (1, 2):
        trained.train(epoch, 0, LRS, TWO)
        choices.after_phase(1.0)
    assert (graphs.captured, trained.network_graph) == (1, None)
    assert choices.measured == {"graph_s": 1.0, "no_graph_s": 1.0, "graph_refused": "not faster"}


@pytest.mark.parametrize(("exchange_s", "refused"), [(0.9, False), (1.1, True)])
def test_what_graphs_gain_must_exceed_the_exchange_that_they_delay(
    graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch, exchange_s: float, *, refused: bool
) -> None:
    """Two passes take 2 s, in the second of which gradients are exchanged, or 1 s as graphs."""
    trained, choices = with_graphs()
    monkeypatch.setattr(trained.parallel, "exchange_s", lambda: exchange_s)
    trained.train(1, 0, LRS, TWO)
    choices.after_phase(1.0)
    assert graphs.captured == 1
    assert (trained.network_graph is None) is refused
    assert ("the exchange" in str(choices.measured["graph_refused"])) is refused


def test_a_network_whose_graph_computes_something_else_is_refused(graphs: FakeGraphs) -> None:
    graphs.factor = 1.1
    trained, choices = with_graphs()
    choices.after_phase(1.0)
    assert trained.network_graph is None
    assert choices.measured["graph_refused"] == "its gradients differ"


def loss_of_two_calls(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x) + model(x), y)


def test_a_task_that_calls_the_network_twice_is_refused(graphs: FakeGraphs) -> None:
    trained, choices = with_graphs()
    trained.task.training_loss = loss_of_two_calls  # type: ignore[assignment, method-assign]
    choices.after_phase(1.0)
    assert graphs.captured == 0
    assert "calls the network twice" in str(choices.measured["graph_refused"])


def test_a_failing_capture_leaves_the_training_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", fail)
    eager, (trained, choices) = learner(), with_graphs()
    choices.after_phase(1.0)
    for one in (eager, trained):
        one.train(1, 0, LRS, TWO)
    refused = "RuntimeError: operation not permitted when stream is capturing"
    assert choices.measured["graph_refused"] == refused
    assert choices.measured["graph_s"] is None
    assert trained.state(copy=True).digest() == eager.state(copy=True).digest()


class Centered(Net):
    """Replaces a buffer in each pass, as the centering of self-distillation does."""

    def __init__(self, num_classes: int, sample_shape: tuple[int, ...]) -> None:
        super().__init__(num_classes, sample_shape)
        self.register_buffer("center", torch.zeros(num_classes))

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        self.center = 0.9 * self.center + 0.1 * output.detach().mean(0)
        return output


def test_a_network_that_replaces_buffers_is_refused_and_keeps_them(graphs: FakeGraphs) -> None:
    trained, choices = with_graphs(model=Centered)
    trained.train(1, 0, LRS, TWO)
    before = trained.state(copy=True).digest()
    choices.after_phase(1.0)
    assert graphs.captured == 0
    assert "replaces a buffer" in str(choices.measured["graph_refused"])
    assert trained.state(copy=True).digest() == before


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        return self.weight * sum(x.values())


def test_inputs_of_another_shape_or_nesting_run_without_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def replay(inputs: dict[str, Tensor]) -> Tensor:
        return torch.zeros(0)

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", lambda *_, **__: replay)
    model, whole, row = Sum(), torch.ones(2, 3), torch.ones(1, 3)
    graph = NetworkGraph(model, ({"a": whole, "b": whole},), [model.weight], nullcontext())
    assert graph.forward({"a": -whole, "b": whole}).numel() == 0
    for other in ({"a": whole, "b": row}, {"a": whole}, {"a": whole.double(), "b": whole}):
        assert graph.forward(other).shape == (2, 3)
