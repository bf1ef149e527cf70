"""CUDA graphs of the network on a GPU, against the same training without. No Ray.

make test-gpu      or, in an environment with torch and without Ray:
python -m pytest -m gpu tests/gpu
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from raytrain_opt.config.schema import Job
from raytrain_opt.data import load_shared_data
from raytrain_opt.train import step_choices
from raytrain_opt.train.data_parallel import Parallel, distribute
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.learner_config import LearnerConfig
from raytrain_opt.train.micro_batches import MicroBatches
from raytrain_opt.train.step_choices import StepChoices

# The compiler and the debug mode warn about themselves, each version of torch differently.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

CUDA = torch.device("cuda", 0)
TWO = MicroBatches(range(2), 2)
LRS = [0.02] * 6


class Net(nn.Module):
    """Convolutions, BatchNorm, dropout; with `waits`, reads a value of the device."""

    waits = False

    def __init__(self, num_classes: int, sample_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(sample_shape[0], 16, 3, padding=1)
        self.norm, self.dropout = nn.BatchNorm2d(16), nn.Dropout(0.3)
        self.last = nn.Linear(16 * sample_shape[1] * sample_shape[2], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.norm(self.convolution(x)).relu())
        output: Tensor = self.last(x.flatten(1))
        return output if not self.waits or output.sum().item() > 0 else -output


class Waiting(Net):
    waits = True


def learner(parallel: Any = Parallel, **changes: Any) -> Learner:
    values = {"model": Net, "data": "digits", "epochs": 4, "global_batch_size": 64}
    job = Job.model_validate(values | {"cuda_graphs": True} | changes)
    return Learner(LearnerConfig.from_job(job), load_shared_data(job.data), CUDA, parallel)


@pytest.fixture
def _kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep graphs even where they are not faster: other programs may use the GPU."""
    monkeypatch.setattr(step_choices, "reduce_max", lambda values, _: [0.0, *values[1:]])


def train(trained: Learner, *, graphs: bool) -> list[float]:
    choices = StepChoices(trained, auto_compile=False, cuda_graphs=graphs)
    losses = []
    for epoch in (1, 2, 3):
        losses.append(trained.train(epoch, 0, LRS, TWO).loss)
        trained.sync_batch_norm_stats()
        choices.after_phase(1.0)
    assert (trained.network_graph is not None) == graphs, choices.measured
    return [*losses, trained.evaluate("test").loss]


@pytest.mark.usefixtures("_kept")
@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "SGD", "precision": "fp32_strict"},
        {"optimizer": {"name": "SGD", "clip_norm": 0.1}, "precision": "bf16"},
        {"optimizer": "AdamW", "precision": "fp16"},
        {"optimizer": "LARS"},
        {"optimizer": "Muon", "average": {"decay": "auto"}},
        {"optimizer": "SGD", "compile": "default"},
    ],
    ids=str,
)
def test_the_losses_are_those_without_graphs(changes: dict[str, Any]) -> None:
    """Dropout included: a graph draws the random numbers of the micro-batch's seed."""
    without, with_graphs = (train(learner(**changes), graphs=graphs) for graphs in (False, True))
    assert with_graphs == pytest.approx(without, rel=1e-2)


@pytest.mark.usefixtures("_kept")
def test_gradients_are_exchanged_over_nccl(tmp_path: Path) -> None:
    meeting = f"file://{tmp_path}/meeting-point"
    dist.init_process_group("nccl", init_method=meeting, rank=0, world_size=1, device_id=CUDA)
    try:
        alone, exchanged = (
            train(learner(parallel, optimizer="SGD"), graphs=True)
            for parallel in (Parallel, distribute)
        )
    finally:
        dist.destroy_process_group()
    assert exchanged == pytest.approx(alone, rel=1e-2)


def test_what_is_kept_is_faster() -> None:
    trained = learner()
    choices = StepChoices(trained, auto_compile=False, cuda_graphs=True)
    choices.after_phase(1.0)
    graph_s, no_graph_s = choices.measured["graph_s"], choices.measured["no_graph_s"]
    assert isinstance(graph_s, float)
    assert isinstance(no_graph_s, float)
    assert (trained.network_graph is not None) == (graph_s < no_graph_s)


def test_a_network_that_waits_for_the_device_trains_without() -> None:
    losses = train(learner(model=Waiting), graphs=False)
    trained = learner(model=Waiting)
    choices = StepChoices(trained, auto_compile=False, cuda_graphs=True)
    choices.after_phase(1.0)
    assert trained.network_graph is None
    assert choices.measured["graph_refused"]
    assert train(trained, graphs=False) == pytest.approx(losses, rel=1e-2)
