"""Optimizers by name train at the rate that is set, and wrong sections are explained."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import UnsupportedOperatorException

from raytrain_opt.config.updates import OptimizerSection
from raytrain_opt.errors import JobError
from raytrain_opt.optim import factory
from raytrain_opt.optim.factory import build_optimizer, check_optimizer
from raytrain_opt.optim.large_batch import RMSpropWarmup
from raytrain_opt.optim.muon import Muon
from raytrain_opt.optim.update import get_weight_decays, set_lr, set_weight_decays

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


class OwnSGD(torch.optim.SGD):
    """An optimizer of the user's own, which takes no rate of 0, as Lion and Prodigy."""

    def __init__(self, params: Any, lr: float, *, double: bool = False) -> None:
        assert lr > 0
        assert double in (True, False), "double is a flag"
        super().__init__(params, lr=2 * lr if double else lr)


class Scaled(torch.optim.SGD):
    """An optimizer of the user's own with an argument that has no default."""

    def __init__(self, params: Any, lr: float, scale: float) -> None:
        assert scale > 0, "scale must be positive"
        super().__init__(params, lr=scale * lr)


def not_an_optimizer() -> None: ...


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


def build(optimizer_section: OptimizerSection, *weights: nn.Parameter) -> torch.optim.Optimizer:
    return build_optimizer(optimizer_section, nn.ParameterList(weights), steps_per_epoch=7)


def new_weight() -> nn.Parameter:
    return nn.Parameter(torch.tensor([[1.0, -2.0], [3.0, 0.5]]))


@pytest.mark.parametrize("name", WORKING)
def test_every_class_trains_as_torchs_at_the_rate_that_is_set(name: str) -> None:
    assert check(name) == {}
    weight, reference = new_weight(), new_weight()
    train(build(section(name), weight), weight, [0.02, 0.02, 0.02])
    expected = getattr(torch.optim, name)([reference], lr=0.02)
    for _ in range(3):
        expected.zero_grad()
        (reference**2).sum().backward()
        expected.step()
    torch.testing.assert_close(weight, reference)
    assert weight.norm() < new_weight().norm()


@pytest.mark.parametrize(
    ("name", "args", "expected"),
    [
        ("SGD", {}, {"fused": True, "foreach": None}),
        ("SGD", {"foreach": False}, {"fused": None, "foreach": False}),
        ("SGD", {"fused": False}, {"fused": False, "foreach": None}),
        ("NAdam", {}, {"foreach": True}),
    ],
)
def test_the_fastest_implementation_is_the_default(
    name: str, args: dict[str, Any], expected: dict[str, Any]
) -> None:
    group = build(section(name, **args), new_weight()).param_groups[0]
    assert expected.items() <= group.items()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_on_a_cpu_is_not_updated_by_fused_kernels(dtype: torch.dtype) -> None:
    """Those of torch 2.11 leave it as it is."""
    weight = nn.Parameter(torch.ones(32, dtype=dtype))
    optimizer = build(section("SGD"), weight)
    assert optimizer.param_groups[0]["foreach"]
    assert not optimizer.param_groups[0]["fused"]


def test_parameters_with_gaps_in_memory_are_not_updated_by_fused_kernels() -> None:
    """Their gradients have no gaps, and the kernels ignore strides."""
    weight = nn.Parameter(torch.ones(4, 4)[:, :2])
    optimizer = build(section("SGD"), weight)
    assert optimizer.param_groups[0]["foreach"]
    train(optimizer, weight, [0.5])
    torch.testing.assert_close(weight, torch.full((4, 2), 0.0))


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_channels_last_weights_get_the_update_of_contiguous_ones(name: str) -> None:
    """torch's fused kernels go through memory in order, whatever the strides are."""
    updated = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).to(
            memory_format=memory_format
        )
        optimizer = build_optimizer(OptimizerSection(name=name), net, steps_per_epoch=1)
        assert optimizer.param_groups[0]["fused"]
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.ones(2, 3, 8, 8)).square().sum().backward()
            set_lr(optimizer, 0.01)
            optimizer.step()
        updated.append([p.detach() for p in net.parameters()])
    torch.testing.assert_close(*updated)


def test_weight_decays_of_excluded_groups_stay_zero() -> None:
    groups = [{"params": [new_weight()]}, {"params": [new_weight()], "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=0.1, weight_decay=0.25)
    weight_decays = get_weight_decays(optimizer)
    assert weight_decays == [0.25, 0.0]
    set_weight_decays(optimizer, [2 * weight_decay for weight_decay in weight_decays])
    assert get_weight_decays(optimizer) == [0.5, 0.0]


def norm_and_matrix() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


@pytest.mark.parametrize(
    ("name", "no_weight_decay", "sizes"),
    [
        ("LARS", "auto", [1, 3]),
        ("LARS", "none", [4]),
        ("SGD", "auto", [4]),
        ("SGD", "bias_and_norm", [1, 3]),
        ("RMSpropWarmup", "auto", [4]),
        ("RMSpropWarmup", "bias_and_norm", [1, 3]),
    ],
)
def test_biases_and_normalization_are_excluded_as_the_job_says(
    name: str, no_weight_decay: Any, sizes: list[int]
) -> None:
    decaying = OptimizerSection(
        name=name, args={"weight_decay": 0.25}, no_weight_decay=no_weight_decay
    )
    optimizer = build_optimizer(decaying, norm_and_matrix(), steps_per_epoch=7)
    groups = optimizer.param_groups
    assert [len(group["params"]) for group in groups] == sizes
    assert [group["weight_decay"] for group in groups] == [0.25, 0.0][: len(groups)]
    if name == "LARS":
        assert [group["adapt"] for group in groups] == [True, False][: len(groups)]


@pytest.mark.parametrize("name", [f"{__name__}:OwnSGD", OwnSGD])
def test_an_optimizer_of_ones_own_is_named_by_module_and_class(name: Any) -> None:
    own = OptimizerSection(name=name, args={"double": True})
    assert check_optimizer(own) == []
    weight = new_weight()
    optimizer = build(own, weight)
    assert isinstance(optimizer, OwnSGD)
    train(optimizer, weight, [0.25])
    torch.testing.assert_close(weight, new_weight() * 0.5)
    assert str(OptimizerSection(name=name).model_dump()["name"]).endswith("test_factory:OwnSGD")


@pytest.mark.parametrize(
    ("function", "args", "message"),
    [
        ("not_an_optimizer", {}, "optimizer.name: must be a class derived from torch.optim"),
        ("OwnSDG", {}, "optimizer.name: .* has no 'OwnSDG'.*OwnSGD"),
        ("OwnSGD", {"twice": 1}, "optimizer.args.twice: OwnSGD has no such argument"),
        ("OwnSGD", {"double": 3}, "optimizer.args: OwnSGD rejects it: double is a flag"),
        ("Scaled", {"scale": -1}, "optimizer.args: Scaled rejects it: scale must be positive"),
    ],
)
def test_mistakes_in_an_optimizer_of_ones_own_are_explained(
    function: str, args: dict[str, Any], message: str
) -> None:
    own = OptimizerSection(name=f"{__name__}:{function}", args=args)
    with pytest.raises(JobError, match=message):
        build(own, new_weight())


@pytest.mark.parametrize("name", ["ScheduleFreeSGD", "ScheduleFreeAdamW"])
def test_schedule_free_optimizers_are_those_of_the_package(name: str) -> None:
    assert check(name, weight_decay=0.1) == {}
    assert "learning_rate" in check(name, warmup_steps=5)["optimizer.args.warmup_steps"]
    assert type(build(section(name), new_weight())).__module__.startswith("schedulefree.")


def test_muon_is_the_packages_own_class_with_the_groups_it_needs() -> None:
    assert check("Muon", momentum=0.9, aux="adamw", aux_lr_multiplier=0.02) == {}
    muon = OptimizerSection(name="Muon", args={"weight_decay": 0.1, "aux_lr_multiplier": 0.5})
    optimizer = build_optimizer(muon, norm_and_matrix(), steps_per_epoch=7)
    assert isinstance(optimizer, Muon)
    assert not optimizer.distributed
    set_lr(optimizer, 0.3)
    summary = [
        (len(g["params"]), g["use_muon"], g["weight_decay"], g["lr"])
        for g in optimizer.param_groups
    ]
    assert summary == [(1, True, 0.1, 0.3), (3, False, 0.0, 0.15)]


def test_any_optimizer_has_rates_by_parameter_name() -> None:
    section = OptimizerSection(name="AdamW", lr_multipliers={"0.bias": 4.0, "0.*": 2.0})
    optimizer = build_optimizer(section, norm_and_matrix(), steps_per_epoch=7)
    for lr in (0.5, 0.25):
        set_lr(optimizer, lr)
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == [2.0 * lr, 4.0 * lr, lr]


def test_a_tied_weight_has_the_rate_of_any_of_its_names() -> None:
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    second.weight = first.weight
    section, model = OptimizerSection(lr_multipliers={"1.*": 2.0}), nn.Sequential(first, second)
    [group] = build_optimizer(section, model, steps_per_epoch=7).param_groups
    assert group["lr_multiplier"] == 2.0


def test_a_pattern_that_matches_no_parameter_is_an_error() -> None:
    section = OptimizerSection(name="SGD", lr_multipliers={"head.*": 2.0})
    with pytest.raises(JobError, match=r"'head.\*' matches no parameter.*0\.weight"):
        build_optimizer(section, norm_and_matrix(), steps_per_epoch=7)


@pytest.mark.parametrize(
    ("args", "steps"),
    [({}, (70.0, 35.0)), ({"center_epochs": 2, "period_epochs": 0.5}, (14.0, 3.5))],
)
def test_a_job_writes_the_times_of_rmsprop_warmup_in_epochs(
    args: dict[str, Any], steps: tuple[float, float]
) -> None:
    assert check("RMSpropWarmup", **args) == {}
    optimizer = build(section("RMSpropWarmup", **args), new_weight())
    assert isinstance(optimizer, RMSpropWarmup)
    group = optimizer.param_groups[0]
    assert (group["center_steps"], group["period_steps"]) == steps


@pytest.mark.parametrize("name", ["LARS", "Muon", "RMSpropWarmup"])
def test_the_packages_classes_call_a_closure_and_take_dense_real_gradients(name: str) -> None:
    weight = new_weight()
    optimizer = build(section(name), weight)

    def closure() -> float:
        loss = weight.square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 14.25
    for gradient in (torch.ones(2, 2).to_sparse(), torch.ones(2, 2, dtype=torch.complex64)):
        weight = nn.Parameter(torch.ones(2, 2, dtype=gradient.dtype))
        weight.grad = gradient
        with pytest.raises(RuntimeError, match="dense real"):
            build(section(name), weight).step()


@pytest.mark.parametrize(
    ("name", "args", "path", "message"),
    [
        ("LARS", {"momentum": -1.0}, "", "momentum must be at least 0"),
        ("LARS", {"trust_coeff": 0.01}, "trust_coeff", "did you mean 'trust_coefficient'"),
        ("LARS", {"adapt": False}, "adapt", "no such argument"),
        ("Muon", {"aux": "lion"}, "", "one of"),
        ("Muon", {"distributed": True}, "distributed", "follows from the job"),
        ("RMSpropWarmup", {"center_steps": 5}, "center_steps", "did you mean 'center_epochs'"),
        ("RMSpropWarmup", {"period_epochs": 0}, "", "period_epochs must be above 0"),
        ("RMSpropWarmup", {"center_epochs": "ten"}, "", "rejects"),
    ],
)
def test_wrong_arguments_of_the_packages_classes_are_named(
    name: str, args: dict[str, Any], path: str, message: str
) -> None:
    problems = check(name, **args)
    assert list(problems) == [".".join(filter(None, ("optimizer.args", path)))]
    assert message in next(iter(problems.values()))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lars", "did you mean 'LARS'"),
        ("sgd", "did you mean 'SGD'"),
        ("AdmaW", "did you mean 'AdamW'"),
        ("Optimizer", "must be a class of torch.optim"),
        ("xyzzy", "valid: ASGD"),
        ("LBFGS", "closure"),
        ("SparseAdam", "not Rprop or SparseAdam"),
        ("Rprop", "not Rprop or SparseAdam"),
    ],
)
def test_unknown_and_unsupported_classes_are_errors(name: str, message: str) -> None:
    problems = check(name)
    assert list(problems) == ["optimizer.name"]
    assert message in problems["optimizer.name"]


@pytest.mark.parametrize(
    ("args", "path", "message"),
    [
        ({"momentun": 0.9}, "optimizer.args.momentun", "did you mean 'momentum'"),
        ({"xyzzy": 0.9}, "optimizer.args.xyzzy", "valid arguments: momentum, dampening"),
        ({"params": []}, "optimizer.args.params", "no such argument"),
        ({"momentum": -1.0, "weight_decay": 0.1}, "optimizer.args", "-1.0"),
        ({"momentum": "much"}, "optimizer.args", "SGD rejects"),
        ({"nesterov": True, "dampening": 0.0}, "optimizer.args", "momentum"),
    ],
)
def test_a_wrong_argument_names_its_path(args: dict[str, Any], path: str, message: str) -> None:
    problems = check("SGD", **args)
    assert list(problems) == [path]
    assert message in problems[path]
    with pytest.raises(JobError, match=path):
        build(section("SGD", **args), new_weight())


def test_parameters_that_the_class_rejects_are_an_error() -> None:
    with pytest.raises(JobError, match=r"optimizer: SGD rejects this model's parameters"):
        build(section("SGD"))


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
@pytest.mark.parametrize("args", [{}, {"weight_decay": 0.1}])
def test_fused_optimizers_update_parameters_of_a_gpu(name: str, args: dict[str, Any]) -> None:
    """Fake tensors meet all of torch's checks before a kernel; some kernels have no fake form."""
    if name == "SGD":
        args = {**args, "momentum": 0.9}
    with FakeTensorMode(allow_fallback_kernels=False), suppress(UnsupportedOperatorException):
        model = nn.Sequential(nn.Linear(3, 2, device="cuda"), nn.BatchNorm1d(2, device="cuda"))
        optimizer = build_optimizer(section(name, **args), model, steps_per_epoch=7)
        assert optimizer.defaults["fused"] or name == "Adagrad"  # all that the factory fuses
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()


def test_kernels_on_a_gpu_are_those_that_exist_and_do_not_wait() -> None:
    """torch 2.11 refuses fused Adagrad there; ASGD reads its steps, unless it is capturable."""
    with FakeTensorMode():
        model = nn.Linear(2, 2, device="cuda")
        adagrad = factory._default_implementation(torch.optim.Adagrad, {}, model)
        assert adagrad == {"foreach": True}
        implied = factory._default_implementation(torch.optim.ASGD, {}, model)
    assert implied == {"foreach": True, "capturable": True}
    assert factory._default_implementation(torch.optim.ASGD, {}, nn.Linear(2, 2)) == {
        "foreach": True
    }
