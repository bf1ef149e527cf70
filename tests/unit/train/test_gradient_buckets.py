"""Plans of gradient buckets, the backward order they need, and the choice of a plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from raytrain_opt.config.updates import ParallelSection
from raytrain_opt.errors import JobError
from raytrain_opt.train.data_parallel import Parallel, begin_communicator_warmup, distribute
from raytrain_opt.train.gradient_buckets import (
    MIB,
    BackwardOrder,
    BucketPlan,
    Gradient,
    fastest,
    plan_buckets,
)

CPU = torch.device("cpu")


def layers(*sizes_mib: float) -> list[Gradient]:
    """Make layers of these sizes in the order of the backward pass, each with a bias."""
    bias = 1024
    return [
        Gradient(f"layer{index}.{name}", size)
        for index, layer_mib in enumerate(sizes_mib)
        for name, size in (("bias", bias), ("weight", int(layer_mib * MIB) - bias))
    ]


def mib(plan: BucketPlan) -> list[float]:
    return [size / MIB for size in plan.sizes]


@pytest.mark.parametrize(
    ("sizes_mib", "expected"),
    [
        # Targets 1, 2, 4, 8, 16, 32, 32 and what is left.
        ([1] * 100, [1, 2, 4, 8, 16, 32, 32, 5]),
        ([0.5] * 7, [1, 2, 0.5]),
        ([0.25], [0.25]),
        ([3, 3, 3, 3, 3], [3, 3, 6, 3]),
        ([0.75, 0.75, 400, 1, 1, 1, 1], [1.5, 400, 4]),
    ],
)
def test_growing_buckets_end_with_the_layer_that_fills_them(
    sizes_mib: list[float], expected: list[float]
) -> None:
    [plan] = plan_buckets("growing", layers(*sizes_mib))
    assert plan.name == "growing"
    assert mib(plan) == expected


def test_buckets_go_by_layer_and_not_by_parameter() -> None:
    """The weight alone would fill the first bucket."""
    gradients = [Gradient("a.weight", MIB), Gradient("a.bias", 64), Gradient("b.weight", MIB)]
    [plan] = plan_buckets("growing", gradients)
    assert plan.sizes == (MIB + 64, MIB)


def test_default_is_torchs_own() -> None:
    [plan] = plan_buckets("default", layers(*[1] * 60))
    assert mib(plan) == pytest.approx([1, 25, 25, 9])
    assert plan.ddp_arguments() == {}


def test_auto_tries_five_plans_of_all_gradients() -> None:
    plans = plan_buckets("auto", layers(*[1] * 100))
    assert {plan.name: mib(plan) for plan in plans} == {
        "default": [1, 25, 25, 25, 24],
        "growing": [1, 2, 4, 8, 16, 32, 32, 5],
        "growing_small": [1, 2, 4, *[8] * 11, 5],
        "growing_large": [4, 8, 16, 32, 40],
        "single": [100],
    }


def test_auto_omits_plans_with_equal_buckets() -> None:
    assert [plan.name for plan in plan_buckets("auto", layers(0.5))] == ["default"]
    plans = plan_buckets("auto", layers(*[1] * 7))
    assert [mib(plan) for plan in plans] == [[1, 6], [1, 2, 4], [4, 3], [7]]


def test_ddp_gets_the_exact_sizes_or_the_same_number_of_equal_ones() -> None:
    plan = BucketPlan("growing", (MIB + 4, 2 * MIB, 6 * MIB))
    listed = plan.ddp_arguments(takes_list=True)["bucket_cap_mb_list"]
    assert [int(cap * MIB) for cap in listed] == [MIB + 4, 2 * MIB, 6 * MIB]
    assert plan.ddp_arguments(takes_list=False) == {"bucket_cap_mb": 4}


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([[3, 3, 3], [2, 2, 2], [4, 4, 4]], 1),
        ([[3, 3, 3], [1, 9, 9]], 0),
        ([[2, 2, 90], [3, 3, 3]], 0),
        ([[2, 2], [2, 2]], 0),
    ],
)
def test_the_smallest_median_wins_and_of_equals_the_first(
    seconds: list[list[float]], expected: int
) -> None:
    assert fastest(seconds) == expected


class Crossed(nn.Module):
    """A model whose layers are registered in another order than they compute in."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(3, 2)
        self.unused = nn.Linear(1, 1)
        self.first = nn.Linear(4, 3)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.frozen(self.second(self.first(x)))
        return out


def test_the_order_is_that_of_the_backward_pass() -> None:
    model = Crossed()
    order = BackwardOrder(model)
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
    gradients = order.gradients(order.finish())
    backward_layers = list(dict.fromkeys(g.name.rpartition(".")[0] for g in gradients))
    assert backward_layers == ["second", "first", "unused"]
    assert {g.name: g.size for g in gradients}["first.weight"] == 3 * 4 * 4


def test_no_hook_is_left_at_the_end() -> None:
    model = nn.Linear(2, 2)
    order = BackwardOrder(model)
    assert order.finish() == [0, 1]
    model(torch.ones(1, 2)).sum().backward()
    assert order.finish() == [0, 1]
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def section(**values: Any) -> ParallelSection:
    return ParallelSection.model_validate(values)


def step(parallel: Parallel) -> None:
    with parallel.accumulate(last=True):
        parallel.forward(torch.ones(2, 4)).sum().backward()
    parallel.after_step()


def test_a_single_process_uses_the_bare_model() -> None:
    model = nn.Linear(4, 2)
    parallel = Parallel(model, section())
    step(parallel)
    assert parallel.forward is model
    assert model.weight.grad is not None
    assert parallel.report() == {}


@pytest.mark.usefixtures("group")
def test_default_buckets_are_wrapped_once() -> None:
    parallel = distribute(nn.Linear(4, 2), section())
    first = parallel.forward
    assert isinstance(first, DistributedDataParallel)
    for _ in range(3):
        step(parallel)
    assert parallel.forward is first
    assert parallel.report() == {
        "mode": "sync",
        "speeds": None,
        "buckets": "default",
        "buckets_mib": None,
        "compression": "none",
        "tried": [],
        "wrap_s": [],
    }


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("buckets", ["default", "growing"])
def test_parameters_without_a_gradient_must_be_frozen(buckets: str) -> None:
    with pytest.raises(JobError, match=r"model\.freeze: .*\(unused\.weight, unused\.bias\)"):
        step(distribute(Crossed(), section(gradient_buckets=buckets)))


@pytest.mark.usefixtures("group")
def test_auto_does_not_time_equal_plans() -> None:
    parallel = distribute(nn.Linear(4, 2), section(gradient_buckets="auto"))
    first = parallel.forward
    for _ in range(3):
        step(parallel)
    assert parallel.forward is first
    assert parallel.report()["tried"] == []


@pytest.mark.usefixtures("group")
def test_growing_buckets_are_used_after_the_first_step() -> None:
    model = nn.Linear(4, 2)
    parallel = distribute(model, section(gradient_buckets="growing"))
    step(parallel)
    assert parallel.forward.bucket_bytes_cap_list == [10 * 4]
    assert all(parameter.grad is None for parameter in model.parameters())
    wrapped = parallel.forward
    for _ in range(3):
        step(parallel)
    assert parallel.forward is wrapped
    report = parallel.report()
    assert report["buckets"] == "growing"
    assert len(report["wrap_s"]) == 1


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("compression", ["bf16", "fp16"])
def test_a_group_that_cannot_add_the_compressed_dtype_is_refused(
    monkeypatch: pytest.MonkeyPatch, compression: str
) -> None:
    def refuse(tensor: Tensor) -> None:
        raise RuntimeError("Invalid scalar type")

    monkeypatch.setattr(dist, "all_reduce", refuse)
    with pytest.raises(JobError, match="gloo cannot add .* on cpu: Invalid scalar") as caught:
        distribute(nn.Linear(4, 2), section(compression=compression))
    [problem] = caught.value.problems
    assert (problem.path, problem.value) == ("parallel.compression", compression)


def test_the_error_of_an_early_connection_is_raised_by_wait() -> None:
    connection = begin_communicator_warmup(CPU)
    with pytest.raises(ValueError, match="process group has not been initialized"):
        connection.result()


@pytest.mark.usefixtures("group")
def test_an_early_connection_returns_its_duration() -> None:
    connection = begin_communicator_warmup(CPU)
    assert 0 < connection.result() < 60
