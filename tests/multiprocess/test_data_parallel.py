"""Two processes with DDP over gloo, against one process that computes both micro-batches.

All phases run once; the tests read the results.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from raytrain_opt.commands.shard import write_shards
from raytrain_opt.config.schema import Job
from raytrain_opt.data import load_shared_data
from raytrain_opt.data.in_memory_sets import DatasetArrays
from raytrain_opt.execution.resolve import Placement, settle
from raytrain_opt.optim.epoch_steps import epoch_steps, length_of
from raytrain_opt.results import Steps
from raytrain_opt.search.factory import build_policy
from raytrain_opt.search.policy import History, TrainEpoch
from raytrain_opt.train.data_parallel import DataParallel, Parallel
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.learner_config import LearnerConfig
from raytrain_opt.train.micro_batches import MicroBatches
from tests.support.process_group import Results, run_ranks
from tests.support.small_jobs import large_batch_job

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


def evaluate_test_split(learner: Learner, rank: int, world_size: int) -> dict[str, Any]:
    part = learner.evaluate("test", rank, world_size)
    return {
        name: [totals.samples, *(totals.sums[key] for key in ("accuracy", "top5", "loss"))]
        for name, totals in (("part", part), ("sum", learner.add_ranks(part)))
    }


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
        "evaluated": evaluate_test_split(learner, rank, world_size),
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
        LearnerConfig.from_job(planned),
        arrays,
        CPU,
        DataParallel if world_size > 1 else Parallel,
    )
    micro_batches = MicroBatches.all(workers)
    first_step = learner.info.train_size // (11 * workers) - len(FIRST) + 1
    totals = learner.train(1, Steps(first_step, FIRST), micro_batches)
    weights = {name: p.detach().clone() for name, p in learner.model.named_parameters()}
    return {"samples": totals.samples, "weights": weights}


def train_from_shards(folder: Path, rank: int, world_size: int) -> dict[str, Any]:
    """Train an epoch of 3 updates of 8 samples and one of 6 from shards; again, with a stop.

    Who continues has read the shards anew, as a resumed run does.
    """
    random = np.random.default_rng(0)
    for split, count in (("train", 30), ("val", 2)):
        for i in range(count):
            file = folder / f"images-{rank}" / split / "ab"[i % 2] / f"{i}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(random.integers(0, 256, (16, 16, 3), np.uint8)).save(file)
    patterns = write_shards(
        folder / f"images-{rank}", str(folder / f"shards-{rank}"), 5000, lambda _: None
    )
    data = {"name": "shards", "train": patterns[0], "test": patterns[1], "image_size": 8}
    data |= {"cache": str(folder / "cache"), "loader_workers": 1}
    schedule = {"policy": "schedule", "shape": "constant"}
    planned = job(plain_net, 8, data=data | {"drop_last": False}, learning_rate=schedule)
    samples, states = [], []
    for first, stop in ((0, 4), (0, 2), (2, 4)):
        connect = DataParallel if world_size > 1 else Parallel
        learner = Learner(
            LearnerConfig.from_job(planned), load_shared_data(planned.data), CPU, connect
        )
        if first:
            learner.load(states[-1])
        micro_batches = MicroBatches.all(WORKERS)
        learner.begin(1, Steps(first, (0.1,) * (4 - first)), micro_batches)
        learner.advance(stop - first)
        samples.append(learner.take_totals().samples)
        states.append(learner.state(copy=True))
        learner.close()
    return {
        "digests": [state.digest() for state in states],
        "samples": samples,
        "weights": {name: p.detach().clone() for name, p in learner.model.named_parameters()},
    }


def train_large_batch(arrays: DatasetArrays, rank: int, world_size: int) -> dict[str, Any]:
    """Train three epochs with all parts for large batches together, and evaluate."""
    large = large_batch_job(Path())
    large = settle(large, Placement.from_job(large), large.global_batch_size)
    connect = DataParallel if world_size > 1 else Parallel
    learner = Learner(LearnerConfig.from_job(large), arrays, CPU, connect)
    steps = epoch_steps(learner.info.train_size, large.global_batch_size, large.batch_ramp)
    policy = build_policy(large, length_of(large), steps)
    for epoch in range(1, large.epochs + 1):
        plan = policy.next(epoch, History())
        assert isinstance(plan, TrainEpoch)
        learner.train(epoch, plan.steps, MicroBatches.all(WORKERS))
        learner.finish_phase()
    return {
        "digest": learner.state(copy=True).digest(),
        "evaluated": evaluate_test_split(learner, rank, world_size),
    }


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
        "shards": train_from_shards(folder, rank, world_size),
        "large_batch": train_large_batch(arrays, rank, world_size),
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


def test_gradients_are_clipped(single_process: Results) -> None:
    for name, expected in single_process["clipped"]["weights"].items():
        assert (single_process["plain"]["weights"][name] - expected).abs().max() > 1e-3


@pytest.mark.parametrize(("case", "samples"), [("2 planned", 118), ("3 planned", 184)])
def test_the_remainder_of_an_epoch_is_one_update_on_as_many_or_fewer_workers_than_planned(
    ranks: list[Results], single_process: Results, case: str, samples: int
) -> None:
    for results in ranks:
        assert results[case]["samples"] == samples
        for name, expected in single_process[case]["weights"].items():
            assert torch.equal(results[case]["weights"][name], expected)


def test_a_stop_within_an_epoch_of_shards_changes_no_bit(
    ranks: list[Results], single_process: Results
) -> None:
    """The epoch ends with a smaller update, as `drop_last: false` wants."""
    for results in (*ranks, single_process):
        undisturbed, stopped, resumed = results["shards"]["digests"]
        assert undisturbed == resumed != stopped
        assert results["shards"]["samples"] == [30, 16, 14]
        assert results["shards"]["digests"] == single_process["shards"]["digests"]


def test_counters_stay_exact(ranks: list[Results]) -> None:
    for results in ranks:
        buffers = results["small_cnn"]["buffers"].values()
        counts = [buffer for buffer in buffers if not buffer.is_floating_point()]
        assert [int(count) for count in counts] == [2**24 + 1 + 6 + 4] * 3


@pytest.mark.parametrize("model", MODELS)
def test_every_test_sample_counts_once(
    ranks: list[Results], single_process: Results, model: str
) -> None:
    parts = [results[model]["evaluated"]["part"] for results in ranks]
    sums = [results[model]["evaluated"]["sum"] for results in ranks]
    assert [part[0] for part in parts] == [16, 21]  # one block, and two
    assert sums[0] == sums[1] == pytest.approx([a + b for a, b in zip(*parts, strict=True)])
    samples, correct, top5, _ = sums[0]
    assert samples == 37
    assert 0 < correct < top5 <= 37


def test_two_ranks_count_what_one_process_counts(
    ranks: list[Results], single_process: Results
) -> None:
    expected = single_process["plain"]["evaluated"]["sum"]
    sums = ranks[0]["plain"]["evaluated"]["sum"]
    assert sums[:3] == expected[:3]
    assert sums[3] == pytest.approx(expected[3], rel=1e-4)


def test_the_parts_for_large_batches_train_together(ranks: list[Results]) -> None:
    first, second = (results["large_batch"] for results in ranks)
    assert first["digest"] == second["digest"]
    samples, correct, *_ = first["evaluated"]["sum"]
    assert correct > 0.8 * samples
