"""BatchNorm statistics of two and of four processes, against one with the full batch.

All cases run once for each number of processes, in `batchnorm_rank.py`; the tests read its
results.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.process_group import run_ranks

RANKS = "tests.multiprocess.batchnorm_rank"
LAYERS = ["flat", "row", "image", "after_conv", "volume"]
SAMPLES = 24
# Values per channel of one sample, derived by hand from the layers' shapes.
VALUES_PER_CHANNEL = {"flat": 1, "row": 8, "image": 64, "after_conv": 9, "volume": 64}

RankResults = dict[str, Any]


@pytest.fixture(scope="module", params=[2, 4], ids=["two", "four"])
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[RankResults]:
    return run_ranks(RANKS, request.param, tmp_path_factory.mktemp("ranks") / "run")


def statistics(buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in buffers.items() if "running" in name}


def assert_bit_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=0, atol=0, msg=name)


def stack_own_buffers(cases: list[RankResults], name: str) -> Tensor:
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
    ranks: list[RankResults], dtype: torch.dtype, around: int, rtol: float, momentum: float | None
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
    ranks: list[RankResults],
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


def test_all_ranks_hold_the_same_bits(ranks: list[RankResults]) -> None:
    for case in ("stacked_layers", "random_micro_batches", "frozen"):
        for results in ranks[1:]:
            assert_bit_equal(results[case]["pooled"], ranks[0][case]["pooled"])
    assert not torch.equal(
        ranks[0]["recalibrated"][1]["own"]["flat.running_mean"],
        ranks[1]["recalibrated"][1]["own"]["flat.running_mean"],
    )


def test_pooling_equal_statistics_changes_nothing(ranks: list[RankResults]) -> None:
    for results in ranks:
        assert_bit_equal(results["pooled_again"]["twice"], results["pooled_again"]["once"])


def test_moving_averages_of_random_micro_batches_are_unbiased(ranks: list[RankResults]) -> None:
    """Unit variance over 4,096 channels, to about six times the error of the sample."""
    var = ranks[0]["random_micro_batches"]["pooled"]["running_var"].double()
    error = float(var.std() / len(var) ** 0.5)
    assert error < 0.008
    assert float(var.mean()) == pytest.approx(1, abs=6 * error)


def test_one_batch_per_worker_recalibrates_to_the_statistics_of_all(
    ranks: list[RankResults],
) -> None:
    cases = [results["recalibrated"][1] for results in ranks]
    for case in cases:
        for name, expected in statistics(case["reference"]).items():
            torch.testing.assert_close(case["pooled"][name], expected, rtol=2e-6, atol=0, msg=name)


def test_recalibration_computes_plain_means_over_its_batches(ranks: list[RankResults]) -> None:
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
    ranks: list[RankResults],
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


def test_statistics_without_new_batches_carry_no_noise(ranks: list[RankResults]) -> None:
    """Without new batches the spread has no sampling noise: v = mean(v_w) + B."""
    cases = [results["other_layers"] for results in ranks]
    means, variances = (stack_own_buffers(cases, f"norm.running_{x}") for x in ("mean", "var"))
    expected = variances.mean(0) + (means - means.mean(0)).square().mean(0)
    for case in cases:
        torch.testing.assert_close(case["pooled"]["norm.running_var"].double(), expected)


def test_a_frozen_layer_keeps_its_statistics_however_often_it_is_pooled(
    ranks: list[RankResults],
) -> None:
    for results in ranks:
        before, pooled = results["frozen"]["before"], results["frozen"]["pooled"]
        for name in before:
            same = torch.equal(pooled[name], before[name])
            assert same == name.startswith("flat."), name
