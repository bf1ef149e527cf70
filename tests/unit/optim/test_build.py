"""Optimizers by name: they train at the rate that is set, and wrong sections are explained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from raytrain_opt.config.schema import OptimizerSection
from raytrain_opt.errors import JobError
from raytrain_opt.optim.build import build_optimizer, check_optimizer, set_lr

WORKING = [
    "ASGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "SGD",
]


def section(name: str = "SGD", **args: Any) -> OptimizerSection:
    return OptimizerSection(name=name, args=args)


def check(name: str = "SGD", **args: Any) -> dict[str, str]:
    problems = check_optimizer(section(name, **args))
    return {problem.path: str(problem).partition(": ")[2] for problem in problems}


def train(optimizer: torch.optim.Optimizer, weight: nn.Parameter, lrs: list[float]) -> None:
    for lr in lrs:
        set_lr(optimizer, lr)
        optimizer.zero_grad()
        (weight**2).sum().backward()
        optimizer.step()


def new_weight() -> nn.Parameter:
    return nn.Parameter(torch.tensor([[1.0, -2.0], [3.0, 0.5]]))


@pytest.mark.parametrize("name", WORKING)
def test_every_class_trains_at_the_rate_that_is_set(name: str) -> None:
    assert check(name) == {}
    weight, reference = new_weight(), new_weight()
    train(build_optimizer(section(name), [weight]), weight, [0.02, 0.02, 0.02])
    theirs = getattr(torch.optim, name)([reference], lr=0.02)
    for _ in range(3):
        theirs.zero_grad()
        (reference**2).sum().backward()
        theirs.step()
    torch.testing.assert_close(weight, reference)
    assert weight.norm() < new_weight().norm()


def test_rate_is_zero_until_it_is_set() -> None:
    weight = new_weight()
    optimizer = build_optimizer(OptimizerSection(), [weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert torch.equal(weight, new_weight())


def test_rate_of_each_step_counts() -> None:
    weight = new_weight()
    train(build_optimizer(section("SGD"), [weight]), weight, [0.1, 0.25])
    torch.testing.assert_close(weight, new_weight() * 0.8 * 0.5)


def test_arguments_reach_the_class() -> None:
    optimizer = build_optimizer(section("AdamW", betas=[0.5, 0.9], eps=1e-3), [new_weight()])
    group = optimizer.param_groups[0]
    assert (list(group["betas"]), group["eps"]) == ([0.5, 0.9], 1e-3)


@pytest.mark.parametrize(
    ("args", "foreach"),
    [({}, True), ({"foreach": False}, False), ({"foreach": None}, None), ({"fused": True}, None)],
)
def test_foreach_unless_the_user_chose(args: dict[str, Any], foreach: bool | None) -> None:
    optimizer = build_optimizer(section("SGD", **args), [new_weight()])
    assert optimizer.param_groups[0]["foreach"] is foreach


def test_set_lr_fills_a_tensor_in_place_and_reaches_every_group() -> None:
    rate = torch.tensor(1.0)
    groups = [{"params": [new_weight()]}, {"params": [new_weight()], "lr": 3.0}]
    optimizer = torch.optim.SGD(groups, lr=rate)
    set_lr(optimizer, 0.25)
    assert optimizer.param_groups[0]["lr"] is rate
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.25, 0.25]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sgd", "did you mean SGD"),
        ("AdmaW", "did you mean AdamW"),
        ("Optimizer", "must be a class of torch.optim"),
        ("xyzzy", "these work: ASGD"),
        ("LBFGS", "closure"),
        ("SparseAdam", "sparse gradients"),
        ("Rprop", "first step only"),
        ("Muon", "matrices only"),
    ],
)
def test_unknown_and_unfit_classes_are_refused(name: str, message: str) -> None:
    problems = check(name)
    assert list(problems) == ["optimizer.name"]
    assert message in problems["optimizer.name"]


@pytest.mark.parametrize(
    ("args", "path", "message"),
    [
        ({"momentun": 0.9}, "optimizer.args.momentun", "did you mean momentum"),
        ({"xyzzy": 0.9}, "optimizer.args.xyzzy", "it takes momentum, dampening"),
        ({"params": []}, "optimizer.args.params", "no such argument"),
        ({"differentiable": True}, "optimizer.args.differentiable", "does not do"),
        ({"weight_decay": "1e-4"}, "optimizer.args.weight_decay", "write 0.0001"),
        ({"momentum": -1.0, "weight_decay": 0.1}, "optimizer.args.momentum", "-1.0"),
        ({"momentum": "much"}, "optimizer.args.momentum", "SGD refuses"),
        ({"nesterov": True, "dampening": 0.0}, "optimizer.args.nesterov", "momentum"),
        ({"foreach": True, "fused": True}, "optimizer.args", "fused"),
    ],
)
def test_wrong_argument_names_its_path(args: dict[str, Any], path: str, message: str) -> None:
    problems = check("SGD", **args)
    assert list(problems) == [path]
    assert message in problems[path]
    with pytest.raises(JobError, match=path):
        build_optimizer(section("SGD", **args), [new_weight()])


def test_all_unknown_arguments_come_at_once() -> None:
    assert set(check("Adam", beta=[0.9, 0.99], epsilon=1e-8)) == {
        "optimizer.args.beta",
        "optimizer.args.epsilon",
    }


def test_parameters_that_the_class_refuses() -> None:
    with pytest.raises(JobError, match=r"optimizer: SGD refuses this model's parameters"):
        build_optimizer(section("SGD"), [])
