"""A training step may depend on the state and the batch only; anything else is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raytrain_opt.config.schema import LossSection
from raytrain_opt.data.base import Batch
from raytrain_opt.errors import DataError, JobError
from raytrain_opt.train.step_check import check_steps
from raytrain_opt.train.task import Classification

TRAIN, TEST = (
    Batch(torch.randn(2, 8, generator=torch.Generator().manual_seed(seed)), torch.tensor([0, 1]))
    for seed in (0, 1)
)


class Net(nn.Module):
    """A network with one more layer, which a test defines by `call`, and its own attributes."""

    def __init__(self, call: Callable[[Net, Tensor], Any], **attributes: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.out, self.call = nn.Linear(8, 4), call
        for name, value in attributes.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.out(self.call(self, x))
        return output


def activation_norm(net: Net, x: Tensor) -> Tensor:
    if not net.ready:
        with torch.no_grad():
            net.scale.data = 1 / x.std(0)
        net.ready = True if isinstance(net.ready, bool) else torch.tensor(True)
    return x * net.scale


def count_down(net: Net, x: Tensor) -> Tensor:
    net.steps += net.training
    return x if net.steps < 1000 else 2 * x


def anneal(net: Net, x: Tensor) -> Tensor:
    net.beta = 0.9 * net.beta + 0.1 * x.detach().mean().item()
    return x * net.beta


def prototypes(net: Net, x: Tensor) -> Tensor:
    if net.training:
        net.mean = x.detach().mean(0)
    return x if net.training else x - net.mean


def remember(net: Net, x: Tensor) -> Tensor:
    net.seen.append(x.detach())
    return x + torch.stack(net.seen).mean(0)


def reset(net: Net, x: Tensor) -> Tensor:
    net.cache, net.last, net.size = {"x": x}, x.detach(), len(x)
    net.logged.append(x.mean().item())
    net.average.mul_(0.9).add_(0.1 * x.detach().mean())
    return nn.functional.dropout(x, 0.5, net.training)


def grow(net: Net, x: Tensor) -> Tensor:
    net.memory = torch.cat([net.memory, x.detach()])
    return x


def create(net: Net, x: Tensor) -> Tensor:
    if net.late is None:
        net.late = nn.Linear(8, 8)
    output: Tensor = net.late(x)
    return output


def replace(net: Net, x: Tensor) -> Tensor:
    net.scale = nn.Parameter(net.scale.detach().clone())
    return x * net.scale


def scaled_by(net: Net, x: Tensor) -> Tensor:
    return x * net.others[0]


def fail_in_training(net: Net, x: Tensor) -> Tensor:
    if net.training:
        raise ValueError("no teacher")
    return x


def fail_in_evaluation(net: Net, x: Tensor) -> Tensor:
    if not net.training and len(TEST.x) and torch.equal(x, TEST.x):
        raise ValueError("no averages")
    return x


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (Net(activation_norm, ready=False, scale=nn.Parameter(torch.ones(8))), "depends on ready"),
        (Net(count_down, steps=0), "depends on steps .*register_buffer"),
        (Net(anneal, beta=1.0), "depends on beta"),
        (Net(prototypes, mean=torch.zeros(())), "replaces tensors, or their shapes: mean"),
        (Net(prototypes, mean=0.0), "an evaluation .* depends on mean"),
        (Net(remember, seen=[]), "depends on seen"),
        (Net(grow, memory=torch.zeros(0, 8)), "replaces tensors, or their shapes: memory"),
        (Net(create, late=None), "replaces tensors, or their shapes: late.bias"),
        (Net(replace, scale=nn.Parameter(torch.ones(8))), "replaces tensors, .*: scale"),
        (nn.Sequential(nn.Linear(8, 4), nn.Softmax(1), nn.Threshold(2, 0)), None),
        (Net(lambda net, x: net.other(x)[0], other=nn.LSTM(8, 8)), None),
        (Net(scaled_by, others=[nn.Parameter(torch.ones(8))]), r"outside the network; .* \[8\]"),
        (Net(fail_in_training), r"in training mode raised ValueError: no teacher \(at .* in fail"),
        (Net(fail_in_evaluation), "it cannot process .* no averages"),
        (Net(lambda _, x: x.no_such_method()), "no_such_method"),
        (nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Dropout()), None),
        (
            Net(lambda net, x: net.e((8 * x.abs()).long().clamp(max=9)).mean(2),
                e=nn.Embedding(10, 8, sparse=True)),
            "sparse gradients .*e.weight",
        ),
        (Net(reset, cache=None, last=None, size=0, logged=[], average=torch.zeros(())), None),
    ],
)  # fmt: skip
def test_a_network_whose_state_is_not_everything_is_refused(
    net: nn.Module, message: str | None
) -> None:
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    attributes, random = dict(vars(net)), torch.get_rng_state()
    if message is None:
        check_steps(Classification(LossSection()), net, TRAIN, TEST, 4)
    else:
        with pytest.raises((JobError, DataError), match=message):
            check_steps(Classification(LossSection()), net, TRAIN, TEST, 4)
    after = net.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert vars(net) == attributes
    assert torch.equal(torch.get_rng_state(), random)
    assert not getattr(net, "seen", [])
    assert not getattr(net, "logged", [])


def test_a_layer_with_its_flag_in_the_state_may_start_from_the_first_batch() -> None:
    scale = nn.Parameter(torch.ones(8))
    net = Net(activation_norm, ready=torch.tensor(False), scale=scale)
    check_steps(Classification(LossSection()), net, TRAIN, TEST, 4)
    assert torch.equal(scale, torch.ones(8))
    assert not net.ready


class Annealed:
    """A task that counts its steps."""

    metric, higher_is_better = "loss", False

    def __init__(self) -> None:
        self.step, self.history = 0, [0.0]

    def training_loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.step += 1
        loss: Tensor = model(batch[0]).square().mean()
        self.history.append(loss.item())
        return loss

    def validation_metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"loss": model(batch[0]).square().mean(1)}


def test_a_task_that_counts_is_refused_and_preserved() -> None:
    task = Annealed()
    with pytest.raises(JobError, match=r"task\.name: each training step depends on task\.step"):
        check_steps(task, nn.Linear(8, 4), TRAIN, TEST, 4)
    assert (task.step, task.history) == (0, [0.0])


@pytest.mark.parametrize(
    "loss", [lambda y: y.detach().mean(), lambda y: (y.argmax(1) == 0).float().mean()]
)
def test_a_loss_without_a_gradient_is_refused(loss: Callable[[Tensor], Tensor]) -> None:
    task = Annealed()
    task.training_loss = lambda model, batch: loss(model(batch[0]))  # type: ignore[method-assign]
    with pytest.raises(JobError, match="the training loss needs no gradient; remove no_grad"):
        check_steps(task, nn.Linear(8, 4), TRAIN, TEST, 4)


class Own(torch.optim.SGD):
    """An optimizer of a user: `act` is a part of its step."""

    def __init__(self, params: Any, act: Callable[[Own, Any], object]) -> None:
        super().__init__(params, 0.1)
        self.act = act

    def step(self, closure: Any = None) -> Any:
        super().step()
        self.act(self, closure)


def keep(value: Any) -> Callable[[Own, Any], object]:
    def act(optimizer: Own, _: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            optimizer.state[parameter]["kept"] = value() if callable(value) else value

    return act


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda _, closure: closure(), "its step.. raised TypeError: 'NoneType' object"),
        (lambda o, _: o.no_such_method(), "its step.. raised AttributeError"),
        (keep(lambda: iter([])), "hold builtins.iter, which a resume could not read"),
        (keep(lambda: lambda: None), "hold what cannot be saved .*a resume could not read"),
        (keep(Annealed), "hold .*Annealed, which a resume could not read"),
        (keep(lambda: torch.zeros(3).to_sparse()), "cannot be saved and loaded"),
        (keep(lambda: [torch.zeros(2), 1.0]), ""),
        (keep(3), ""),
    ],
)
def test_an_optimizer_that_cannot_take_or_save_its_first_step_is_refused(
    act: Callable[[Own, Any], object], message: str
) -> None:
    net = nn.Linear(8, 4)
    arguments = Classification(LossSection()), net, TRAIN, TEST, 4, [Own(net.parameters(), act)]
    if not message:
        check_steps(*arguments)
        return
    with pytest.raises(JobError, match=f"optimizer.name: .*({message})"):
        check_steps(*arguments)


class Matrices(torch.optim.SGD):
    """SGD by `data`, as older optimizers, that takes all parameters and trains no biases."""

    biases = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and (p.dim() > 1 or self.biases):
                    p.data = p.data - group["lr"] * p.grad


class Everything(Matrices):
    biases = True


@pytest.mark.parametrize(
    ("optimizer", "message"), [(Matrices, ": 1.weight, 1.bias; train"), (Everything, "")]
)
def test_an_optimizer_trains_every_parameter_with_a_gradient(
    optimizer: type[Matrices], message: str
) -> None:
    """The bias before the BatchNorm layer does not move."""
    net = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    batch = Batch(torch.randn(8, 8), torch.arange(8) % 4)
    own = [optimizer(net.parameters(), 0.1)]
    arguments = Classification(LossSection()), net, batch, TEST, 4, own
    if not message:
        check_steps(*arguments)
        return
    with pytest.raises(JobError, match=message):
        check_steps(*arguments)
