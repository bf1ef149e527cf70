"""Training and evaluation of one process, against the same steps written out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from schedulefree import SGDScheduleFree
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from raytrain_opt.config.schema import Job
from raytrain_opt.data.base import Batch
from raytrain_opt.data.in_memory_sets import DatasetArrays
from raytrain_opt.errors import DataError
from raytrain_opt.results import Steps
from raytrain_opt.train.kernels import COMPILE_ARGUMENTS
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.learner_config import LearnerConfig
from raytrain_opt.train.micro_batches import MicroBatches

CPU = torch.device("cpu")
LRS = (0.1, 0.05, 0.02)
RAMP = [{"epoch": 2, "factor": 2}]
SIZE, TEST_SIZE, CLASSES = 80, 37, 7


def plain_net(num_classes: int, sample_shape: tuple[int, ...]) -> nn.Module:
    """Build a model without batch norm: micro-batches have the mean gradient of the batch."""
    features = 4 * sample_shape[1] * sample_shape[2]
    return nn.Sequential(
        nn.Conv2d(sample_shape[0], 4, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(features, num_classes),
    )


def net_with_norm(num_classes: int, sample_shape: tuple[int, ...]) -> nn.Module:
    net = plain_net(num_classes, sample_shape)
    assert isinstance(net, nn.Sequential)
    return nn.Sequential(net[0], nn.BatchNorm2d(4), nn.Dropout(0.3), *net[1:])


@cache
def arrays(classes: int = CLASSES) -> DatasetArrays:
    """Random greyscale images of 4 x 4."""
    random = np.random.default_rng(0)
    x = random.integers(0, 256, (SIZE + TEST_SIZE, 4, 4, 1), dtype=np.uint8)
    y = random.integers(0, classes, SIZE + TEST_SIZE)
    return DatasetArrays(x[:SIZE], y[:SIZE], x[SIZE:], y[SIZE:], classes)


def learner(
    model: Any = plain_net, data: DatasetArrays | None = None, workers: int = 1, **job: Any
) -> Learner:
    validated = Job.model_validate(
        {
            "model": model,
            "data": {"name": "digits", "augment": {"crop_padding": 1, "flip": True}},
            "epochs": 2,
            "global_batch_size": 16,
            "optimizer": "SGD",
            "workers": {"count": workers},
            **job,
        }
    )
    return Learner(LearnerConfig.from_job(validated), data or arrays(), CPU)


def all_of(count: int) -> MicroBatches:
    return MicroBatches(range(count), count)


def weights(trained: Learner) -> list[Tensor]:
    return [p.detach().clone() for p in trained.model.parameters()]


def assert_close(a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
    for left, right in zip(a, b, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-6)


# Training.


@pytest.mark.parametrize(
    ("count", "batch", "lrs", "samples"),
    [
        (2, 16, LRS, 48),
        (8, 16, LRS, 48),
        # 80 samples: the last update has 8, in parts of 2 and 3 or 1 and 2.
        (3, 24, (*LRS, 0.3), SIZE),
        (6, 24, (*LRS, 0.3), SIZE),
    ],
)
def test_several_micro_batches_are_one_update_of_the_batch(
    count: int, batch: int, lrs: tuple[float, ...], samples: int
) -> None:
    one, several = (learner(global_batch_size=batch) for _ in range(2))
    start = weights(one)
    a = one.train(1, Steps(0, lrs), all_of(1))
    b = several.train(1, Steps(0, lrs), all_of(count))
    assert_close(weights(one), weights(several))
    assert (start[0] - weights(one)[0]).abs().max() > 1e-3
    assert a.samples == b.samples == samples
    assert a.loss == pytest.approx(b.loss)


def reference_sgd(count: int, lrs: Sequence[float], clip_norm: float = math.inf) -> list[Tensor]:
    """Train with SGD, momentum and weight decay written out, on the mean of the gradients."""
    reference = learner()
    parameters = list(reference.model.parameters())
    velocity = [torch.zeros_like(p) for p in parameters]
    for step, lr in enumerate(lrs):
        gradients = [torch.zeros_like(p) for p in parameters]
        for batch in reference.data.train_batches(
            1, product(range(step, step + 1), range(count)), count, 16
        ):
            loss = nn.functional.cross_entropy(reference.model(batch.x), batch.y)
            for total, gradient in zip(
                gradients, torch.autograd.grad(loss, parameters), strict=True
            ):
                total += gradient / count
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
        assert clip_norm == math.inf or norm > 2 * clip_norm
        gradients = [g * min(1.0, clip_norm / norm) for g in gradients]
        with torch.no_grad():
            for p, v, g in zip(parameters, velocity, gradients, strict=True):
                v.mul_(0.9).add_(g + 1e-4 * p)
                p.sub_(lr * v)
    return weights(reference)


@pytest.mark.parametrize("clip_norm", [None, 0.2])
@pytest.mark.parametrize("count", [1, 4])
def test_training_follows_the_definition_of_sgd_and_clips_the_gradient_of_a_global_batch(
    count: int, clip_norm: float | None
) -> None:
    trained = learner(optimizer={"name": "SGD", "clip_norm": clip_norm})
    trained.train(1, Steps(0, LRS), all_of(count))
    assert_close(weights(trained), reference_sgd(count, LRS, clip_norm or math.inf))


@pytest.mark.parametrize("clip_norm", [0.2, 1e6])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_scaled_loss_is_not_clipped_for_its_scale(precision: str, clip_norm: float) -> None:
    args = {"momentum": 0.0, "weight_decay": 0.0}
    trained = learner(
        precision=precision, optimizer={"name": "SGD", "args": args, "clip_norm": clip_norm}
    )
    before = weights(trained)
    trained.train(1, Steps(0, (1.0,)), all_of(2))
    changes = [after - start for after, start in zip(weights(trained), before, strict=True)]
    norm = torch.nn.utils.get_total_norm(changes).item()
    assert norm == pytest.approx(0.2, rel=1e-3) if clip_norm == 0.2 else 0.4 < norm < 10


@pytest.mark.parametrize("workers", [1, 2])
def test_a_ramp_trains_at_the_larger_batch_from_its_epoch_on(workers: int) -> None:
    ramped = learner(workers=workers, batch_ramp=RAMP)
    before, after = learner(workers=workers), learner(workers=workers, global_batch_size=32)
    ramped.train(1, Steps(0, LRS), all_of(workers))
    before.train(1, Steps(0, LRS), all_of(workers))
    assert_close(weights(ramped), weights(before))
    after.load(before.state(copy=True))
    totals = ramped.train(2, Steps(0, LRS[:2]), all_of(workers))
    after.train(2, Steps(0, LRS[:2]), all_of(workers))
    assert_close(weights(ramped), weights(after))
    assert (totals.steps, totals.samples) == (2, 64)


@pytest.mark.parametrize(
    "job",
    [
        {},
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"optimizer": {"name": "AdamW"}},
        {"channels_last": False},
    ],
    ids=str,
)
def test_a_phase_from_the_same_state_repeats_bit_by_bit(job: dict[str, Any]) -> None:
    """Whatever ran before, dropout included; also in another process's learner."""
    first, second = learner(net_with_norm, **job), learner(net_with_norm, **job)
    first.train(1, Steps(0, LRS), all_of(2))
    start = first.state(copy=True)
    totals = first.train(1, Steps(2, LRS[:2]), all_of(2))
    end_digest = first.state(copy=True).digest()
    first.train(2, Steps(0, LRS), all_of(1))
    torch.manual_seed(99)
    for other in (first, second):
        other.load(start)
        again = other.train(1, Steps(2, LRS[:2]), all_of(2))
        assert other.state(copy=True).digest() == end_digest != start.digest()
        assert again.losses == totals.losses


def test_the_weight_decay_factor_lasts_one_phase_and_keeps_zeros() -> None:
    trained = learner(net_with_norm, optimizer={"name": "LARS", "args": {"weight_decay": 0.01}})
    start = trained.state(copy=True)

    def decays() -> list[float]:
        return [group["weight_decay"] for group in trained.optimizer.param_groups]

    initial_decays = decays()
    assert 0.0 in initial_decays
    trained.train(1, Steps(0, LRS, weight_decay_factor=10.0), all_of(1))
    high = trained.state(copy=True)
    assert decays() == pytest.approx([10 * decay for decay in initial_decays])
    trained.load(start)
    trained.train(1, Steps(0, LRS), all_of(1))
    assert decays() == initial_decays
    trained.load(high)
    trained.train(1, Steps(0, LRS), all_of(1))
    assert decays() == initial_decays


class CountReads(TorchDispatchMode):
    """Counts how often the CPU reads a number from a tensor, which would wait for a GPU."""

    count = 0

    def __init__(self, on_cpu: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._on_cpu = {tensor.data_ptr() for tensor in on_cpu}  # beside a GPU, too

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.count += args[0].data_ptr() not in self._on_cpu
        return func(*args, **(kwargs or {}))


def muon(aux: str) -> dict[str, Any]:
    return {"name": "Muon", "args": {"aux": aux}}


CLIPPED = {"name": "SGD", "clip_norm": 0.1}


@pytest.mark.parametrize("average", [None, "auto"])
@pytest.mark.parametrize(
    ("optimizer", "precision"),
    [
        *product(["SGD", "AdamW", CLIPPED], ["fp32", "fp16"]),
        # With fp16, torch's scaler reads for optimizers without fused kernels.
        *product(["LARS", *(muon(aux) for aux in ("sgd", "adamw"))], ["fp32"]),
    ],
    ids=str,
)
def test_no_step_waits_for_the_device(optimizer: Any, average: Any, precision: str) -> None:
    trained = learner(net_with_norm, optimizer=optimizer, average=average, precision=precision)
    trained.train(1, Steps(0, LRS), all_of(2))
    steps = []
    if optimizer == muon("adamw"):  # AdamW, for its other parameters, counts steps on the CPU
        steps = [s["step"] for s in trained.optimizer.state.values() if "step" in s]
        assert steps
    with CountReads(steps) as reads:
        trained.train(2, Steps(0, LRS), all_of(2))
    assert reads.count == 0


def test_a_compiled_model_survives_other_states_rates_and_optimizers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first phase and the first evaluation compile; later ones must find that code."""
    graphs = []

    def count_graphs(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(inputs)
        return graph

    def run(trained: Learner) -> None:
        state = trained.state(copy=True)
        for epoch, lrs, optimizer in ((1, LRS, 0), (2, LRS[:1], 1), (1, LRS[1:], 0)):
            trained.load(state)
            trained.train(epoch, Steps(1, lrs, optimizer=optimizer), all_of(2))
            trained.finish_phase()
            trained.evaluate("test")

    monkeypatch.setitem(COMPILE_ARGUMENTS, "default", {"backend": count_graphs})
    job = {"optimizer": {"name": "auto", "candidates": ["SGD", "AdamW"]}, "average": "auto"}
    compiled, eager = (learner(net_with_norm, compile=c, **job) for c in ("default", "none"))
    assert not graphs
    for trained in (compiled, eager):
        trained.train(1, Steps(0, LRS), all_of(2))
        trained.evaluate("test")
    first = len(graphs)
    assert first > 0
    for trained in (compiled, eager):
        run(trained)
    assert len(graphs) == first
    assert compiled.state(copy=False).digest() == eager.state(copy=False).digest()


def test_statistics_are_recomputed_from_training_batches() -> None:
    trained = learner(net_with_norm, batch_norm={"recalibrate_batches": 2}, batch_ramp=RAMP)
    trained.train(2, Steps(0, LRS[:1]), all_of(1))
    trained.finish_phase()
    convolution, norm = trained.model[0], trained.model[1]  # type: ignore[index]
    batches = trained.data.train_batches(2, product(range(2), range(2)), 2, 32)
    means = [convolution(batch.x).mean((0, 2, 3)) for batch in batches]
    assert_close([norm.running_mean], [torch.stack(means).mean(0)])
    assert norm.momentum == 0.1


CONSTANT = {"policy": "schedule", "shape": "constant"}


@pytest.mark.parametrize(
    "job",
    [{"average": 0.5}, {"optimizer": "ScheduleFreeSGD", "learning_rate": CONSTANT}],
    ids=["ema", "schedule-free"],
)
def test_averaged_weights_have_the_statistics_that_belong_to_them(job: dict[str, Any]) -> None:
    trained = learner(net_with_norm, **job)
    training: list[Tensor] = []
    trained.train(1, Steps(0, LRS), all_of(1), lambda _: training.append(weights(trained)[0]))
    assert not torch.equal(weights(trained)[0], training[-1])
    averaged = weights(trained)
    trained.finish_phase()
    assert_close(averaged, weights(trained))
    convolution, norm = trained.model[0], trained.model[1]  # type: ignore[index]
    batches = list(trained.data.train_batches(1, product(range(5), range(1)), 1, 16))
    means = [convolution(batch.x).mean((0, 2, 3)) for batch in batches]
    assert_close([norm.running_mean], [torch.stack(means).mean(0)])


class OwnScheduleFree(SGDScheduleFree):
    """A schedule-free optimizer that the job cannot tell by its name."""


def test_no_average_is_added_to_that_of_an_optimizer_of_ones_own() -> None:
    digests = set()
    for average in (None, 0.5):
        trained = learner(optimizer=OwnScheduleFree, learning_rate=CONSTANT, average=average)
        for epoch in (1, 2):
            trained.train(epoch, Steps(0, LRS), all_of(1))
        digests.add(trained.state(copy=True).digest())
    assert len(digests) == 1


def test_a_phase_that_was_stopped_leaves_nothing_behind_a_loaded_state() -> None:
    once, again = (learner(net_with_norm, average=0.5) for _ in range(2))
    for trained in (once, again):
        trained.train(1, Steps(0, LRS), all_of(1))
    state = again.state(copy=True)

    def stop(step: int) -> None:
        if step == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        again.train(2, Steps(0, LRS), all_of(1), stop)
    again.load(state)
    for trained in (once, again):
        trained.train(1, Steps(2, LRS[:2]), all_of(1))
        trained.finish_phase()
    assert once.state(copy=True).digest() == again.state(copy=True).digest()


def net_with_spectral_norm(num_classes: int, sample_shape: tuple[int, ...]) -> nn.Module:
    """Build a network whose spectral norm has a vector that each pass in training changes."""
    normalized = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 8))
    return nn.Sequential(nn.Flatten(), normalized, nn.BatchNorm1d(8), nn.Linear(8, num_classes))


class NetWithCache(nn.Module):
    """Caches something of the size of a batch in a buffer that is not saved."""

    def __init__(self, num_classes: int, sample_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = net_with_spectral_norm(num_classes, sample_shape)
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Any:
        self.cache = torch.ones(len(x))
        return self.layers(x)


@pytest.mark.parametrize("build", [net_with_spectral_norm, NetWithCache])
def test_a_phase_that_was_stopped_continues_with_the_buffers_of_its_last_step(build: Any) -> None:
    once, stopped, resumed = (learner(build, average=0.5) for _ in range(3))
    once.train(1, Steps(0, LRS), all_of(1))
    stopped.begin(1, Steps(0, LRS), all_of(1))
    stopped.advance(1)
    assert stopped.take_totals().steps == 1
    resumed.load(stopped.state(copy=True))
    resumed.train(1, Steps(1, LRS[1:]), all_of(1))
    stopped.advance(len(LRS) - 1)
    assert stopped.end().steps == len(LRS) - 1
    for trained in (once, stopped, resumed):
        trained.finish_phase()
    digests = {trained.state(copy=True).digest() for trained in (once, stopped, resumed)}
    assert len(digests) == 1


def test_a_readable_sample_does_not_weigh_more_for_an_unreadable_one() -> None:
    """Of four samples, two are unreadable: the gradient is half that of a batch of the two."""
    trained = learner()
    x, y = torch.randn(2, 1, 4, 4), torch.tensor([1, 2])
    gradients = []
    for skipped in (0, 2):
        trained.optimizer.zero_grad()
        trained.begin_micro_batches(1, 1)
        trained.add_gradient(Batch(x, y, skipped), (0, 0))
        gradients.append(
            [p.grad.clone() for p in trained.model.parameters() if p.grad is not None]
        )
    for whole, half in zip(*gradients, strict=True):
        torch.testing.assert_close(half, whole / 2)


class NumpyMetrics:
    metric, training_loss = "error", None

    def validation_metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return dict.fromkeys(("loss", "error"), torch.from_numpy(model(batch[0]).numpy()).mean(1))


def test_an_evaluation_is_tried_in_the_precision_of_the_training() -> None:
    assert learner(task={"name": NumpyMetrics}).metric_names == ("loss", "error")
    with pytest.raises(DataError, match="BFloat16"):
        learner(task={"name": NumpyMetrics}, precision="bf16")
