"""BatchNorm statistics of two and of four processes, against one with the full batch.

All cases run once for each number of processes; the tests read the results. In the result of a
case, "own" are the buffers of this worker, "pooled" those after pooling, and "reference" those of
one process that computes the full batch.
"""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raytrain_opt.config.updates import BatchNormSection
from raytrain_opt.models.networks import small_cnn
from raytrain_opt.train.batch_norm import (
    count_tracked_batches,
    count_values_per_channel,
    pool_statistics,
    prepare_batch_norm,
    recalibrate,
)
from tests.support.process_group import Results, run_ranks

SAMPLES = 24  # of all workers together, in one batch
STEPS = 5


class SideBySide(nn.Module):
    """Parallel BatchNorm layers with 1 to 64 values per channel and sample.

    No layer's input depends on another's normalization: the inputs of stacked layers would be
    normalized with one worker's micro-batch.
    """

    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        self.flat = nn.BatchNorm1d(3 * 8 * 8, momentum=momentum)
        self.row = nn.BatchNorm1d(3, momentum=momentum)
        self.image = nn.BatchNorm2d(3, momentum=momentum)
        self.conv = nn.Conv2d(3, 6, 3, stride=2)
        self.after_conv = nn.BatchNorm2d(6, momentum=momentum, affine=False)
        self.volume = nn.BatchNorm3d(3, momentum=momentum)

    def forward(self, x: Tensor) -> Tensor:
        outputs = (
            self.flat(x.flatten(1)),
            self.row(x[:, :, 0]),
            self.image(x),
            self.after_conv(self.conv(x)),
            self.volume(x.reshape(len(x), 3, 2, 4, 8)),
        )
        return torch.cat([output.flatten(1) for output in outputs], 1)


def batch(seed: int, dtype: torch.dtype = torch.float32, around: float = 3.0) -> Tensor:
    """Return SAMPLES images, each with its own mean, so that the workers' statistics differ."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(SAMPLES, 3, 8, 8, dtype=torch.float64, generator=random)
    offsets = 2 * torch.randn(SAMPLES, 1, 1, 1, dtype=torch.float64, generator=random)
    return (around + x + offsets).to(dtype)


def micro_batch(x: Tensor, rank: int, world_size: int) -> Tensor:
    return x.chunk(world_size)[rank]


def net(momentum: float | None, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return SideBySide(momentum).to(dtype)


def measure_values_per_channel(model: nn.Module, sample: Tensor) -> dict[str, float]:
    model.eval()
    with count_values_per_channel(model) as values_per_channel, torch.no_grad():
        model(sample)
    model.train()
    return values_per_channel


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.named_buffers()}


def train_forward(
    model: nn.Module, batches: list[Tensor], rank: int, world_size: int
) -> dict[str, Any]:
    """Run forward passes in training mode; return own, pooled and reference buffers."""
    reference = deepcopy(model)
    values_per_channel = measure_values_per_channel(model, batches[0][:2])
    tracked_before = count_tracked_batches(model)
    with torch.no_grad():
        for x in batches:
            model(micro_batch(x, rank, world_size))
            reference(x)
    own_buffers = buffers(model)
    pool_statistics(model, SAMPLES // world_size, values_per_channel, tracked_before)
    return {"own": own_buffers, "pooled": buffers(model), "reference": buffers(reference)}


def one_forward(rank: int, world_size: int) -> dict[str, Any]:
    return {
        f"{dtype} momentum {momentum} around {around:g}": train_forward(
            net(momentum, dtype), [batch(2, dtype, around)], rank, world_size
        )
        for dtype in (torch.float32, torch.float64)
        for momentum in (1.0, None)
        for around in (3.0, 300.0)
    }


def stacked_layers(rank: int, world_size: int) -> dict[str, Any]:
    """Run a network with stacked layers; return the input of each BatchNorm layer too."""
    torch.manual_seed(3)
    model = small_cnn(num_classes=10, sample_shape=(3, 8, 8))
    model = prepare_batch_norm(model, BatchNormSection(momentum=1.0), world_size=world_size)
    values: dict[str, Tensor] = {}
    values_per_channel = measure_values_per_channel(model, batch(2)[:2])
    tracked_before = count_tracked_batches(model)
    for name, layer in model.named_modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.register_forward_pre_hook(lambda _, x, name=name: values.update({name: x[0]}))
    with torch.no_grad():
        model(micro_batch(batch(2), rank, world_size))
    pool_statistics(model, SAMPLES // world_size, values_per_channel, tracked_before)
    return {"values": values, "pooled": buffers(model)}


def pooled_again(rank: int, world_size: int) -> dict[str, Any]:
    """Pool a second time without new batches: the workers agree already."""
    model = net(0.1)
    values_per_channel = measure_values_per_channel(model, batch(2)[:2])
    results = train_forward(model, [batch(2)], rank, world_size)
    tracked_before = count_tracked_batches(model)
    pool_statistics(model, SAMPLES // world_size, values_per_channel, tracked_before)
    return {"once": results["pooled"], "twice": buffers(model)}


def random_micro_batches(rank: int, world_size: int) -> dict[str, Any]:
    """Pool every few steps, with standard normal values: many channels, small batches."""
    model, rounds, samples = nn.BatchNorm1d(4096, momentum=0.3), 4, 4
    random = torch.Generator().manual_seed(100 + rank)
    values_per_channel = measure_values_per_channel(model, torch.zeros(2, 4096))
    for _ in range(rounds):
        tracked_before = count_tracked_batches(model)
        for _ in range(STEPS):
            model(torch.randn(samples, 4096, generator=random))
        pool_statistics(model, samples, values_per_channel, tracked_before)
    return {"pooled": buffers(model)}


def recalibrated(count: int, rank: int, world_size: int) -> dict[str, Any]:
    """Recalibrate a model that was trained on other data."""
    model = net(0.1)
    values_per_channel = measure_values_per_channel(model, batch(2)[:2])
    with torch.no_grad():
        model(micro_batch(batch(5, around=-4), rank, world_size))
    batches = [batch(10 + index) for index in range(count)]
    parts = [micro_batch(x, rank, world_size) for x in batches]
    passes = [(len(x), partial(model.forward, x)) for x in parts]
    recalibrate(model, passes, values_per_channel)
    reference, worker = net(None), net(None)
    with torch.no_grad():
        for x in batches:
            reference(x)
            worker(micro_batch(x, rank, world_size))
    return {"own": buffers(worker), "pooled": buffers(model), "reference": buffers(reference)}


def other_layers(rank: int, world_size: int) -> dict[str, Any]:
    """Pool a model with buffers of other layers, which differ between the workers."""
    model = nn.ModuleDict(
        {
            "norm": nn.BatchNorm1d(3),
            "sync": nn.SyncBatchNorm(3),
            "instance": nn.InstanceNorm1d(3, track_running_stats=True),
        }
    )
    model.register_buffer("low_precision", torch.tensor([rank, 1.0], dtype=torch.bfloat16))
    model.register_buffer("counter", torch.tensor([rank]))
    random = torch.Generator().manual_seed(rank)
    for name, value in model.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            value.copy_(torch.rand(3, generator=random))
    own_buffers = buffers(model)
    pool_statistics(model, 8, {"norm": 1.0, "sync": 1.0}, count_tracked_batches(model))
    return {"own": own_buffers, "pooled": buffers(model)}


def frozen(rank: int, world_size: int) -> dict[str, Any]:
    """Pool repeatedly a model with one layer in evaluation mode."""
    model = net(0.1)
    before = buffers(model)
    values_per_channel = measure_values_per_channel(model, batch(2)[:2])
    for _ in range(STEPS):
        tracked_before = count_tracked_batches(model)
        model.get_submodule("flat").eval()
        with torch.no_grad():
            model(micro_batch(batch(2), rank, world_size))
        pool_statistics(model, SAMPLES // world_size, values_per_channel, tracked_before)
    return {"before": before, "pooled": buffers(model)}


def run_rank(rank: int, world_size: int, folder: Path) -> Results:
    return {
        "one_forward": one_forward(rank, world_size),
        "stacked_layers": stacked_layers(rank, world_size),
        "pooled_again": pooled_again(rank, world_size),
        "random_micro_batches": random_micro_batches(rank, world_size),
        "recalibrated": {count: recalibrated(count, rank, world_size) for count in (1, 3)},
        "other_layers": other_layers(rank, world_size),
        "frozen": frozen(rank, world_size),
    }


LAYERS = ["flat", "row", "image", "after_conv", "volume"]
# Values per channel of one sample, derived by hand from the layers' shapes.
VALUES_PER_CHANNEL = {"flat": 1, "row": 8, "image": 64, "after_conv": 9, "volume": 64}


@pytest.fixture(scope="module", params=[2, 4], ids=["two", "four"])
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[Results]:
    return run_ranks(run_rank, request.param, tmp_path_factory.mktemp("ranks") / "run")


def statistics(buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in buffers.items() if "running" in name}


def assert_bit_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=0, atol=0, msg=name)


def stack_own_buffers(cases: list[Results], name: str) -> Tensor:
    """Return one buffer of all workers in double precision: [workers, channels]."""
    return torch.stack([case["own"][name].double() for case in cases])


@pytest.mark.parametrize("momentum", [1.0, None])
@pytest.mark.parametrize(
    ("dtype", "around", "rtol"),
    [
        (torch.float32, 3, 1e-6),
        (torch.float32, 300, 1e-5),
        (torch.float64, 3, 1e-13),
        (torch.float64, 300, 1e-10),
    ],
)
def test_one_batch_has_the_statistics_of_one_process(
    ranks: list[Results], dtype: torch.dtype, around: int, rtol: float, momentum: float | None
) -> None:
    """Even if the mean is a hundred standard deviations, where squares lose digits."""
    cases = [
        results["one_forward"][f"{dtype} momentum {momentum} around {around}"] for results in ranks
    ]
    reference = statistics(cases[0]["reference"])
    assert len(reference) == 2 * len(LAYERS)
    # The mean of the workers' variances is no substitute.
    for name in LAYERS:
        variances = stack_own_buffers(cases, f"{name}.running_var")
        assert (variances.mean(0) / reference[f"{name}.running_var"] - 1).abs().max() > 0.005
    for case in cases:
        for name, expected in reference.items():
            torch.testing.assert_close(case["pooled"][name], expected, rtol=rtol, atol=0, msg=name)


def test_stacked_layers_have_the_statistics_of_their_own_inputs(
    ranks: list[Results],
) -> None:
    cases = [results["stacked_layers"] for results in ranks]
    assert len(cases[0]["values"]) == 3
    for name in cases[0]["values"]:
        values = torch.cat([case["values"][name] for case in cases]).double()
        mean, var = values.mean((0, 2, 3)), values.var((0, 2, 3))
        for case in cases:
            pooled_mean = case["pooled"][f"{name}.running_mean"].double()
            pooled_var = case["pooled"][f"{name}.running_var"].double()
            torch.testing.assert_close(pooled_mean, mean, rtol=0, atol=1e-6)
            torch.testing.assert_close(pooled_var, var, rtol=1e-5, atol=0)


def test_all_ranks_hold_the_same_bits(ranks: list[Results]) -> None:
    for case in ("stacked_layers", "random_micro_batches", "frozen"):
        for results in ranks[1:]:
            assert_bit_equal(results[case]["pooled"], ranks[0][case]["pooled"])
    assert not torch.equal(
        ranks[0]["recalibrated"][1]["own"]["flat.running_mean"],
        ranks[1]["recalibrated"][1]["own"]["flat.running_mean"],
    )


def test_pooling_equal_statistics_changes_nothing(ranks: list[Results]) -> None:
    for results in ranks:
        assert_bit_equal(results["pooled_again"]["twice"], results["pooled_again"]["once"])


def test_moving_averages_of_random_micro_batches_are_unbiased(ranks: list[Results]) -> None:
    """Unit variance over 4,096 channels, to about six times the error of the sample."""
    var = ranks[0]["random_micro_batches"]["pooled"]["running_var"].double()
    error = float(var.std() / len(var) ** 0.5)
    assert error < 0.008
    assert float(var.mean()) == pytest.approx(1, abs=6 * error)


def test_one_batch_per_worker_recalibrates_to_the_statistics_of_all(
    ranks: list[Results],
) -> None:
    cases = [results["recalibrated"][1] for results in ranks]
    for case in cases:
        for name, expected in statistics(case["reference"]).items():
            torch.testing.assert_close(case["pooled"][name], expected, rtol=2e-6, atol=0, msg=name)


def test_recalibration_computes_plain_means_over_its_batches(ranks: list[Results]) -> None:
    """The mean is that of all values; the variance follows the formula, values counted."""
    cases = [results["recalibrated"][3] for results in ranks]
    workers = len(cases)
    for name in LAYERS:
        n = 3 * SAMPLES // workers * VALUES_PER_CHANNEL[name]
        means = stack_own_buffers(cases, f"{name}.running_mean")
        within = stack_own_buffers(cases, f"{name}.running_var").mean(0)
        between = (means - means.mean(0)).square().mean(0)
        var = (workers * (n - 1) * within + workers * n * between) / (workers * n - 1)
        for case in cases:
            pooled = case["pooled"]
            torch.testing.assert_close(
                pooled[f"{name}.running_mean"],
                case["reference"][f"{name}.running_mean"],
                rtol=2e-6,
                atol=0,
            )
            torch.testing.assert_close(
                pooled[f"{name}.running_var"].double(), var, rtol=2e-6, atol=0
            )
            assert int(pooled[f"{name}.num_batches_tracked"]) == 3


def test_synchronized_layers_keep_every_bit_and_other_buffers_get_the_mean(
    ranks: list[Results],
) -> None:
    cases = [results["other_layers"] for results in ranks]
    for case in cases:
        own, pooled = case["own"], case["pooled"]
        for name in own:
            if name.startswith("sync"):
                assert torch.equal(pooled[name], own[name]), name
            elif not own[name].is_floating_point():
                assert torch.equal(pooled[name], cases[0]["own"][name]), name
            elif not name.startswith("norm"):
                mean = stack_own_buffers(cases, name).mean(0).to(own[name].dtype)
                torch.testing.assert_close(pooled[name], mean, msg=name)
                assert not torch.equal(pooled[name], own[name]), name


def test_statistics_without_new_batches_carry_no_noise(ranks: list[Results]) -> None:
    """Without new batches the spread has no sampling noise: v = mean(v_w) + B."""
    cases = [results["other_layers"] for results in ranks]
    means, variances = (stack_own_buffers(cases, f"norm.running_{x}") for x in ("mean", "var"))
    expected = variances.mean(0) + (means - means.mean(0)).square().mean(0)
    for case in cases:
        torch.testing.assert_close(case["pooled"]["norm.running_var"].double(), expected)


def test_a_frozen_layer_keeps_its_statistics_however_often_it_is_pooled(
    ranks: list[Results],
) -> None:
    for results in ranks:
        before, pooled = results["frozen"]["before"], results["frozen"]["pooled"]
        for name in before:
            same = torch.equal(pooled[name], before[name])
            assert same == name.startswith("flat."), name
