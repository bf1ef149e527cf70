"""The search of optimizer and rate for a loop outside this package."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset

from raytrain_opt import find_optimizer
from raytrain_opt.errors import DataError, JobError
from raytrain_opt.execution.optimizer_finder import LossTask


@pytest.fixture(scope="module")
def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 8, generator=generator)
    return TensorDataset(x, x[:, :3].argmax(1))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def test_the_choice_trains_a_plain_loop_and_leaves_the_model(data: TensorDataset) -> None:
    model, same = network(), network()
    loader = DataLoader(data, batch_size=32, drop_last=True, shuffle=True)
    best = find_optimizer(model, nn.CrossEntropyLoss(), loader, epochs=8)
    assert all(map(torch.equal, model.parameters(), same.parameters()))
    assert len(best.lrs) == 8 * 16
    assert best.lr == max(best.lrs)
    assert best.name in best.reason
    assert {rate.optimizer for rate in best.curve} >= {"SGD", "AdamW"}
    assert not any("ScheduleFree" in rate.optimizer for rate in best.curve)
    rates = []
    for _ in range(8):
        for x, y in loader:
            rates.append(best.scheduler.get_last_lr()[0])
            best.optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            best.optimizer.step()
            best.scheduler.step()
    assert rates == pytest.approx(best.lrs)
    assert best.scheduler.get_last_lr()[0] == 0.0
    x, y = data.tensors
    assert (model(x).argmax(1) == y).float().mean() > 0.8


def test_the_loss_of_each_sample_is_found() -> None:
    model, x, y = nn.Linear(8, 3), torch.randn(5, 8), torch.tensor([0, 1, 2, 0, 1])
    expected = cross_entropy(model(x), y, reduction="none")

    def own(output: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(output, y)

    for loss in (cross_entropy, nn.CrossEntropyLoss()):
        assert torch.equal(LossTask(loss).validation_metrics(model, (x, y))["loss"], expected)
        assert LossTask(loss).training_loss(model, (x, y)) == expected.mean()
    mean = LossTask(own).validation_metrics(model, (x, y))["loss"]
    assert torch.equal(mean, expected.mean().expand(5))
    images = LossTask(nn.MSELoss()).validation_metrics(nn.Identity(), (x, torch.zeros(5, 8)))
    assert images["loss"] == pytest.approx((x**2).mean(1))


class PaddedTask:
    """Mean of padded rows, in batches that are dicts."""

    def training_loss(self, model: nn.Module, batch: Any) -> Tensor:
        return self.validation_metrics(model, batch)["loss"].mean()

    def validation_metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"loss": cross_entropy(model(batch["x"]), batch["y"], reduction="none")}


def test_a_collate_function_and_a_task_are_used(data: TensorDataset) -> None:
    def collate(samples: list[Any]) -> dict[str, Tensor]:
        x, y = zip(*samples, strict=True)
        return {"x": torch.stack(x), "y": torch.stack(y)}

    loader = DataLoader(data, batch_size=32, collate_fn=collate)
    best = find_optimizer(network(), PaddedTask(), loader, epochs=3)
    assert min(rate.loss for rate in best.curve) < 1.0


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        yield torch.zeros(8), 0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"batch_sampler": [[0, 1]]}, JobError, "loader: must have a batch_size"),
        ({"batch_size": 1000}, JobError, "global_batch_size"),
        ({"sampler": SubsetRandomSampler([0, 1])}, JobError, "has a SubsetRandomSampler, but the"),
    ],
)
def test_what_the_search_cannot_read_is_refused(
    arguments: dict[str, Any], error: type[Exception], message: str, data: TensorDataset
) -> None:
    with pytest.raises(error, match=message):
        find_optimizer(network(), cross_entropy, DataLoader(data, **arguments), epochs=4)
    with pytest.raises(DataError, match="is an IterableDataset"):
        find_optimizer(network(), cross_entropy, DataLoader(Stream(), batch_size=4), epochs=4)
