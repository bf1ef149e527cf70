"""Two processes with DDP over gloo, against one that computes both micro-batches; all run once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raytrain_opt.config.schema import Job
from raytrain_opt.data import load_shared_data
from raytrain_opt.data.in_memory_sets import DatasetArrays
from raytrain_opt.results import Steps
from raytrain_opt.train.data_parallel import DataParallel, Parallel
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.learner_config import LearnerConfig
from raytrain_opt.train.micro_batches import MicroBatches
from tests.support.process_group import Results, run_ranks

CPU = torch.device("cpu")
WORKERS = 2
FIRST, SECOND = (0.1,) * 6, (0.05,) * 4
ODD_TEST_SIZE = 37
# Batches tracked before, more than float32 can count.
BATCHES_BEFORE = 2**24 + 1


def plain_net(num_classes: int, sample_shape: tuple[int, ...]) -> nn.Module:
    """Build a model without batch norm, in which micro-batches are independent."""
    features = 8 * sample_shape[1] * sample_shape[2] // 4
    return nn.Sequential(
        nn.Conv2d(sample_shape[0], 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(features, num_classes),
    )


AVERAGING: dict[str, dict[str, Any]] = {
    "ema": {"average": 0.5, "optimizer": "Muon"},
    "schedule_free": {
        "optimizer": "ScheduleFreeSGD",
        "learning_rate": {"policy": "schedule", "shape": "constant"},
    },
}

CLIPPED = {"name": "SGD", "clip_norm": 0.05}


def job(model: Any, batch: int = 32, workers: int = WORKERS, **changes: Any) -> Job:
    return Job.model_validate(
        {
            "model": model,
            "data": "digits",
            "epochs": 2,
            "global_batch_size": batch,
            "workers": {"count": workers},
            "evaluate": {"batch_size_per_worker": 5},
            "average": None,
            **changes,
        }
    )


def digits() -> DatasetArrays:
    """Load the digits, with an odd number of test samples."""
    full = load_shared_data(job("small_cnn").data)
    assert full is not None
    test_x, test_y = full.test_x[:ODD_TEST_SIZE], full.test_y[:ODD_TEST_SIZE]
    return DatasetArrays(full.train_x, full.train_y, test_x, test_y, full.num_classes)


def train_two_phases(
    model: Any, arrays: DatasetArrays, rank: int, world_size: int, **changes: Any
) -> dict[str, Any]:
    """Train two phases, the second one twice from the same state, and evaluate."""
    learner = Learner(
        LearnerConfig.from_job(job(model, **changes)),
        arrays,
        CPU,
        DataParallel if world_size > 1 else Parallel,
    )
    for buffer in learner.model.buffers():
        if not buffer.is_floating_point():
            buffer.fill_(BATCHES_BEFORE)
    micro_batches = MicroBatches.all(WORKERS)
    totals = learner.train(1, Steps(0, FIRST), micro_batches)
    learner.finish_phase()
    middle = learner.state(copy=True)
    end_digests = []
    for _ in range(2):
        learner.load(middle)
        learner.train(1, Steps(len(FIRST), SECOND), micro_batches)
        learner.finish_phase()
        end_digests.append(learner.state(copy=True).digest())
    return {
        "totals": {"samples": totals.samples, "losses": totals.losses},
        "middle": middle.digest(),
        "buffers": {name: value.clone() for name, value in learner.model.named_buffers()},
        "end_digests": end_digests,
        "weights": {name: p.detach().clone() for name, p in learner.model.named_parameters()},
    }


def train_to_the_end_of_an_epoch(
    arrays: DatasetArrays, rank: int, world_size: int, workers: int
) -> dict[str, Any]:
    """Train as `drop_last: false` does, with a micro-batch of 11 for each planned worker.

    The last update has the samples that do not fill a batch: of 33, 19 (6 + 6 and 7 on two
    processes), of 22, 8.
    """
    planned = job(plain_net, batch=11 * workers, workers=workers)
    learner = Learner(
        LearnerConfig.from_job(planned), arrays, CPU, DataParallel if world_size > 1 else Parallel
    )
    micro_batches = MicroBatches.all(workers)
    first_step = learner.info.train_size // (11 * workers) - len(FIRST) + 1
    totals = learner.train(1, Steps(first_step, FIRST), micro_batches)
    weights = {name: p.detach().clone() for name, p in learner.model.named_parameters()}
    return {"samples": totals.samples, "weights": weights}


def run_rank(rank: int, world_size: int, folder: Path) -> Results:
    arrays = digits()
    return {
        "plain": train_two_phases(plain_net, arrays, rank, world_size),
        "small_cnn": train_two_phases("small_cnn", arrays, rank, world_size),
        **{
            name: train_two_phases("small_cnn", arrays, rank, world_size, **changes)
            for name, changes in AVERAGING.items()
        },
        "clipped": train_two_phases(plain_net, arrays, rank, world_size, optimizer=CLIPPED),
        **{
            f"{workers} planned": train_to_the_end_of_an_epoch(arrays, rank, world_size, workers)
            for workers in (2, 3)
        },
    }


MODELS = ["plain", "small_cnn"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    return run_ranks(run_rank, 2, tmp_path_factory.mktemp("two") / "run")


@pytest.fixture(scope="module")
def single_process(tmp_path_factory: pytest.TempPathFactory) -> Results:
    [results] = run_ranks(run_rank, 1, tmp_path_factory.mktemp("one") / "run")
    return results


@pytest.mark.parametrize("case", [*MODELS, *AVERAGING, "clipped"])
def test_ranks_hold_the_state_of_one_process(
    ranks: list[Results], single_process: Results, case: str
) -> None:
    expected = single_process[case]
    assert expected["middle"] != expected["end_digests"][0]
    for results in ranks:
        for key in ("middle", "end_digests", "totals"):
            assert results[case][key] == expected[key]


@pytest.mark.parametrize("model", [*MODELS, *AVERAGING])
def test_a_phase_repeats_from_a_loaded_state(ranks: list[Results], model: str) -> None:
    """DDP continues with the parameters into which a state was copied."""
    once, again = ranks[0][model]["end_digests"]
    assert once == again


@pytest.mark.parametrize(("case", "samples"), [("2 planned", 118), ("3 planned", 184)])
def test_the_remainder_of_an_epoch_is_one_update_on_as_many_or_fewer_workers_than_planned(
    ranks: list[Results], single_process: Results, case: str, samples: int
) -> None:
    for results in ranks:
        assert results[case]["samples"] == samples
        for name, expected in single_process[case]["weights"].items():
            assert torch.equal(results[case]["weights"][name], expected)


def test_counters_stay_exact(ranks: list[Results]) -> None:
    for results in ranks:
        buffers = results["small_cnn"]["buffers"].values()
        counts = [buffer for buffer in buffers if not buffer.is_floating_point()]
        assert [int(count) for count in counts] == [2**24 + 1 + 6 + 4] * 3
