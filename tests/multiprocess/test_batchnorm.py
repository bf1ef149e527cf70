"""BatchNorm statistics of two and of four processes, against one with the whole batch.

All cases run once for each number of processes, in `batchnorm_rank.py`; the tests read what
it left.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

RANK_PY = Path(__file__).with_name("batchnorm_rank.py")
LAYERS = ["flat", "row", "image", "after_conv", "volume"]
SAMPLES = 24
# One worker's values per channel in a batch of one sample, by hand from the net's shapes.
POSITIONS = {"flat": 1, "row": 8, "image": 64, "after_conv": 9, "volume": 64}

Found = dict[str, Any]


@pytest.fixture(scope="module", params=[2, 4], ids=["two", "four"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    return run_ranks(RANK_PY, request.param, tmp_path_factory.mktemp("ranks") / "run")


def statistics(buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in buffers.items() if "running" in name}


def assert_bit_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=name)


def each_to_double(found: list[Found], name: str) -> Tensor:
    """One buffer of all workers: [workers, channels]."""
    return torch.stack([one["own"][name].double() for one in found])


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
def test_one_batch_has_the_statistics_that_one_process_finds(
    ranks: list[Found], dtype: torch.dtype, around: int, rtol: float, momentum: float | None
) -> None:
    """Also where the mean is a hundred deviations, and differences of squares lose digits."""
    cases = [
        found["one_forward"][f"{dtype} momentum {momentum} around {around}"] for found in ranks
    ]
    whole = statistics(cases[0]["whole"])
    assert len(whole) == 2 * len(LAYERS)
    # Plain means over the workers do not give them.
    for name in LAYERS:
        own = each_to_double(cases, f"{name}.running_var")
        assert (own.mean(0) / whole[f"{name}.running_var"] - 1).abs().max() > 0.005
    for case in cases:
        for name, expected in whole.items():
            torch.testing.assert_close(case["pooled"][name], expected, rtol=rtol, atol=0, msg=name)


def test_layers_behind_one_another_have_the_statistics_of_the_values_they_had(
    ranks: list[Found],
) -> None:
    cases = [found["behind_one_another"] for found in ranks]
    assert len(cases[0]["values"]) == 3
    for name in cases[0]["values"]:
        values = torch.cat([case["values"][name] for case in cases]).double()
        mean, var = values.mean((0, 2, 3)), values.var((0, 2, 3))
        for case in cases:
            found_mean = case["pooled"][f"{name}.running_mean"].double()
            found_var = case["pooled"][f"{name}.running_var"].double()
            torch.testing.assert_close(found_mean, mean, rtol=0, atol=1e-6)
            torch.testing.assert_close(found_var, var, rtol=1e-5, atol=0)


def test_all_ranks_hold_the_same_bits(ranks: list[Found]) -> None:
    for case in ("behind_one_another", "by_chance", "frozen"):
        for found in ranks[1:]:
            assert_bit_equal(found[case]["pooled"], ranks[0][case]["pooled"])
    assert not torch.equal(
        ranks[0]["recalibrated"][1]["own"]["flat.running_mean"],
        ranks[1]["recalibrated"][1]["own"]["flat.running_mean"],
    )


def test_pooling_what_the_ranks_agree_on_changes_nothing(ranks: list[Found]) -> None:
    for found in ranks:
        assert_bit_equal(found["pooled_again"]["twice"], found["pooled_again"]["once"])


def test_moving_averages_of_random_shares_are_unbiased(ranks: list[Found]) -> None:
    """Unit variance over 4,096 channels, to about six times the error of the sample."""
    var = ranks[0]["by_chance"]["pooled"]["running_var"].double()
    error = float(var.std() / len(var) ** 0.5)
    assert error < 0.008
    assert float(var.mean()) == pytest.approx(1, abs=6 * error)


def test_one_batch_each_recalibrates_to_the_statistics_of_the_whole(ranks: list[Found]) -> None:
    cases = [found["recalibrated"][1] for found in ranks]
    for case in cases:
        for name, expected in statistics(case["whole"]).items():
            torch.testing.assert_close(case["pooled"][name], expected, rtol=2e-6, atol=0, msg=name)


def test_recalibration_takes_plain_means_over_its_batches(ranks: list[Found]) -> None:
    """The mean is that of all values; the variance follows the formula, values counted."""
    cases = [found["recalibrated"][3] for found in ranks]
    workers = len(cases)
    for name in LAYERS:
        n = 3 * SAMPLES // workers * POSITIONS[name]
        means = each_to_double(cases, f"{name}.running_mean")
        within = each_to_double(cases, f"{name}.running_var").mean(0)
        between = (means - means.mean(0)).square().mean(0)
        var = (workers * (n - 1) * within + workers * n * between) / (workers * n - 1)
        for case in cases:
            pooled = case["pooled"]
            torch.testing.assert_close(
                pooled[f"{name}.running_mean"],
                case["whole"][f"{name}.running_mean"],
                rtol=2e-6,
                atol=0,
            )
            torch.testing.assert_close(
                pooled[f"{name}.running_var"].double(), var, rtol=2e-6, atol=0
            )
            assert int(pooled[f"{name}.num_batches_tracked"]) == 3


def test_synchronised_layers_keep_every_bit_and_other_buffers_get_the_mean(
    ranks: list[Found],
) -> None:
    cases = [found["other_layers"] for found in ranks]
    for case in cases:
        own, pooled = case["own"], case["pooled"]
        for name in own:
            if name.startswith("sync") or not own[name].is_floating_point():
                assert torch.equal(pooled[name], own[name]), name
            elif not name.startswith("norm"):
                mean = each_to_double(cases, name).mean(0).to(own[name].dtype)
                torch.testing.assert_close(pooled[name], mean, msg=name)
                assert not torch.equal(pooled[name], own[name]), name


def test_statistics_that_no_batch_changed_count_as_exact(ranks: list[Found]) -> None:
    """Without new batches nothing of the spread is chance: v = mean(v_w) + B."""
    cases = [found["other_layers"] for found in ranks]
    means, variances = (each_to_double(cases, f"norm.running_{x}") for x in ("mean", "var"))
    expected = variances.mean(0) + (means - means.mean(0)).square().mean(0)
    for case in cases:
        torch.testing.assert_close(case["pooled"]["norm.running_var"].double(), expected)


def test_a_frozen_layer_keeps_its_statistics_however_often_it_is_pooled(
    ranks: list[Found],
) -> None:
    for found in ranks:
        before, pooled = found["frozen"]["before"], found["frozen"]["pooled"]
        for name in before:
            same = torch.equal(pooled[name], before[name])
            assert same == name.startswith("flat."), name
