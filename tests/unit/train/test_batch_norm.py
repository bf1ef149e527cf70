"""BatchNorm in one process: its settings, averages that move once per step, recomputed ones."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raytrain_opt.train.batch_norm import StepBuffers, recalibrate, set_momentum


class Net(nn.Module):
    """Takes images [N, 3, 8, 8]; one layer in a block, one called by keyword, one for vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4))
        self.norm = nn.BatchNorm2d(4, momentum=0.3)
        self.dropout = nn.Dropout(0.5)
        self.last = nn.BatchNorm1d(36)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(input=self.block(x))
        out: Tensor = self.last(self.dropout(x.flatten(1)))
        return out


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


def images(seed: int, count: int = 6) -> Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def momenta(model: nn.Module) -> list[float | None]:
    norms = (nn.BatchNorm1d, nn.BatchNorm2d)
    return [module.momentum for module in model.modules() if isinstance(module, norms)]


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


@pytest.mark.parametrize(
    ("momentum", "expected"), [(None, [0.1, 0.3, 0.1]), (0.02, [0.02, 0.02, 0.02])]
)
def test_momentum_is_that_of_the_model_by_default(
    net: Net, momentum: float | None, expected: list[float]
) -> None:
    set_momentum(net, momentum)
    assert momenta(net) == expected


def step(buffers: StepBuffers, model: nn.Module, batches: list[Tensor]) -> None:
    """Compute the micro-batches of a step."""
    for number, x in enumerate(batches):
        buffers.begin(number)
        model(x)
        buffers.take(number)
    buffers.end_step(lambda _: None)


def test_running_averages_move_once_per_step_by_the_mean_over_its_micro_batches() -> None:
    layer = nn.BatchNorm2d(3, momentum=0.1)
    batches = [images(seed) * (1 + seed) + seed for seed in range(3)]
    buffers = StepBuffers(layer)
    buffers.begin_phase(range(3), 3)
    mean, var = torch.zeros(3), torch.ones(3)
    for _ in range(2):
        step(buffers, layer, batches)
        mean = 0.9 * mean + 0.1 * torch.stack([x.mean((0, 2, 3)) for x in batches]).mean(0)
        var = 0.9 * var + 0.1 * torch.stack([x.var((0, 2, 3)) for x in batches]).mean(0)
    torch.testing.assert_close(layer.running_mean, mean)
    torch.testing.assert_close(layer.running_var, var)
    assert int(layer.num_batches_tracked) == 2


class Counter(nn.Module):
    """Changes buffers of its own, saved ones and a cache, in each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("calls", torch.tensor(2**50 + 1))
        self.register_buffer("fixed", torch.tensor(0.1, dtype=torch.float64))
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.total = self.total + x.sum()
        self.calls -= 3
        self.cache = x
        return x


def test_other_buffers_become_means_and_integers_those_of_the_first_micro_batch() -> None:
    counter = Counter()
    buffers = StepBuffers(counter)
    buffers.begin_phase(range(3), 3)
    for _ in range(2):
        step(buffers, counter, [torch.ones(n) for n in (1, 2, 3)])
    assert counter.total.tolist() == [4.0, 4.0]
    assert int(counter.calls) == 2**50 - 5
    assert float(counter.fixed) == 0.1
    assert len(counter.cache) == 3


def test_one_micro_batch_per_step_is_what_torch_computes() -> None:
    layer, plain = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    step(StepBuffers(layer), layer, [images(1)])
    plain(images(1))
    assert_same(tensors(layer), tensors(plain))


def passes(model: nn.Module, *batches: Tensor) -> list[Any]:
    return [partial(model.forward, x) for x in batches]


def test_recalibration_computes_plain_means_over_its_batches() -> None:
    layer = nn.BatchNorm2d(3, momentum=0.1)
    layer(40 + images(9))
    batches = [images(seed) * (1 + seed) + seed for seed in range(4)]
    recalibrate(layer, passes(layer, *batches))
    means = torch.stack([x.mean((0, 2, 3)) for x in batches])
    variances = torch.stack([x.var((0, 2, 3)) for x in batches])
    torch.testing.assert_close(layer.running_mean, means.mean(0))
    torch.testing.assert_close(layer.running_var, variances.mean(0))


def test_recalibration_uses_the_activations_of_training(net: Net) -> None:
    """All other layers are in training mode: a dropout of one half doubles the square."""
    batches = [images(seed, 200) for seed in range(3)]
    recalibrate(net.eval(), passes(net, *batches))
    assert net.last.running_var is not None
    # The inputs have unit variance; half of them are dropped and the others are doubled.
    assert float(net.last.running_var.mean()) == pytest.approx(2, rel=0.05)


def test_recalibration_changes_statistics_only(net: Net) -> None:
    net(images(1)).sum().backward()
    net.dropout.eval()
    weights = {name: value.clone() for name, value in net.named_parameters()}
    gradients = [value.grad for value in net.parameters()]
    modes = [module.training for module in net.modules()]
    before = tensors(net)
    recalibrate(net, passes(net, images(2), images(3)))
    assert_same(dict(net.named_parameters()), weights)
    assert all(p.grad is g for p, g in zip(net.parameters(), gradients, strict=True))
    assert [module.training for module in net.modules()] == modes
    assert momenta(net) == [0.1, 0.3, 0.1]
    assert not torch.equal(net.state_dict()["last.running_var"], before["last.running_var"])


class Frozen(nn.BatchNorm2d):
    """The usual way to freeze a layer of a trained model."""

    def train(self, mode: bool = True) -> Frozen:
        return super().train(False)


def test_recalibration_does_not_change_frozen_layers(net: Net) -> None:
    frozen = Frozen(3)
    assert frozen.running_mean is not None
    frozen.running_mean.fill_(7)
    frozen.eval()
    model = nn.Sequential(frozen, net)
    before = tensors(frozen)
    recalibrate(model, passes(model, images(2)))
    assert_same(tensors(frozen), before)
    assert int(net.last.num_batches_tracked) == 1


def test_modes_and_momenta_are_restored_after_a_failed_recalibration(net: Net) -> None:
    net.eval()
    with pytest.raises(RuntimeError):
        recalibrate(net, passes(net, images(2), torch.zeros(2, 5, 8, 8)))
    assert not any(module.training for module in net.modules())
    assert momenta(net) == [0.1, 0.3, 0.1]
