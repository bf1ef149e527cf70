"""Norms of gradients: those of each share and of their mean, against gradients by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from raytrain_opt.config.optimizer import ParallelSection
from raytrain_opt.train import noise
from raytrain_opt.train.group import distribute
from raytrain_opt.train.noise import NormMeter

SHARES = 3


def same(one: Tensor) -> Tensor:
    return one


class Net(nn.Module):
    """With a weight that is used twice, and one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Linear(6, 5)
        self.twice = nn.Linear(5, 5)
        self.last = nn.Linear(5, 3)
        for parameter in self.frozen.parameters():
            parameter.requires_grad = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(torch.relu(self.twice(torch.relu(self.frozen(x)))))
        out: Tensor = self.last(x)
        return out


def batch(share: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(share)
    return torch.randn(8, 6, generator=random), torch.randint(3, (8,), generator=random)


def loss(model: nn.Module, share: int) -> Tensor:
    x, y = batch(share)
    return cross_entropy(model(x), y)


def by_hand(model: nn.Module, shares: range) -> tuple[float, float]:
    """Mean of the squared norms, and that of the mean gradient."""
    trained = [p for p in model.parameters() if p.requires_grad]
    flat = [
        torch.cat([g.flatten() for g in torch.autograd.grad(loss(model, share), trained)])
        for share in shares
    ]
    mean = torch.stack(flat).mean(dim=0)
    own = sum(float(one.double().square().sum()) for one in flat) / len(flat)
    return own, float(mean.double().square().sum())


def accumulate(model: nn.Module, meter: NormMeter, scale: Callable[[Tensor], Tensor]) -> None:
    for share in range(SHARES):
        with meter.share():
            scale(loss(model, share) / SHARES).backward()


@pytest.mark.parametrize("factor", [1.0, 1024.0])
def test_norms_are_those_of_the_shares_and_of_their_mean(factor: float) -> None:
    model = Net()
    meter = NormMeter(model)

    def scale(value: Tensor) -> Tensor:
        return value * factor

    for _ in range(2):  # nothing of an update is left for the next one
        model.zero_grad()
        accumulate(model, meter, scale)
        found = meter.finish(SHARES, scale)
        assert found.dtype == torch.float64
        assert found.tolist() == pytest.approx(by_hand(model, range(SHARES)), rel=1e-5)


def test_gradients_are_left_alone_and_nothing_watches_afterwards() -> None:
    watched, plain = Net(), Net()
    accumulate(watched, NormMeter(watched), same)
    for share in range(SHARES):
        (loss(plain, share) / SHARES).backward()
    for one, other in zip(watched.parameters(), plain.parameters(), strict=True):
        assert one.grad is None if other.grad is None else torch.equal(one.grad, other.grad)
        assert not one._backward_hooks


def test_nothing_watches_after_an_error() -> None:
    model = Net()
    with pytest.raises(ValueError, match="planted"), NormMeter(model).share():
        raise ValueError("planted")
    assert not any(p._backward_hooks for p in model.parameters())


@pytest.fixture
def group() -> Iterator[None]:
    """One process that is a group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def phase(model: nn.Module, shares: int, updates: int, **section: bool) -> list[list[float]]:
    parallel = distribute(model, ParallelSection(**section))
    parallel.begin(shares, same)
    for _ in range(updates):
        model.zero_grad()
        for share in range(shares):
            with parallel.accumulate(last=share == shares - 1):
                (loss(parallel.forward, share) / shares).backward()
        parallel.after_step()
    return [list(pair) for pair in parallel.finish()]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(("updates", "seen"), [(1, 1), (10, 1), (11, 2), (21, 3)])
def test_one_update_of_some_is_looked_at(updates: int, seen: int) -> None:
    assert noise.EVERY == 10
    expected = pytest.approx(by_hand(Net(), range(SHARES)), rel=1e-5)
    assert phase(Net(), SHARES, updates) == [expected] * seen


@pytest.mark.usefixtures("group")
def test_one_share_alone_is_compared_with_nothing() -> None:
    assert phase(Net(), 1, 3) == []


@pytest.mark.usefixtures("group")
def test_it_can_be_switched_off() -> None:
    assert phase(Net(), SHARES, 3, noise_scale=False) == []


@pytest.mark.usefixtures("group")
def test_what_a_broken_off_phase_left_is_forgotten() -> None:
    model = Net()
    parallel = distribute(model, ParallelSection())
    parallel.begin(SHARES, same)
    with parallel.accumulate(last=False):
        (loss(parallel.forward, 0) / SHARES).backward()
    parallel.begin(SHARES, same)
    model.zero_grad()
    for share in range(SHARES):
        with parallel.accumulate(last=share == SHARES - 1):
            (loss(parallel.forward, share) / SHARES).backward()
    assert parallel.finish() == (pytest.approx(by_hand(model, range(SHARES)), rel=1e-5),)
    assert parallel.finish() == ()
