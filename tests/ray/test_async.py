"""Asynchronous training on a real local Ray.

It counts every sample once, whatever dies; without staleness it is the synchronous training.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import psutil
import pytest
import torch

from raytrain_opt import run
from raytrain_opt.data import load_shared_arrays
from raytrain_opt.pools.faults import VARIABLE
from raytrain_opt.train.checkpoint import read_weights
from raytrain_opt.train.learner import Learner, MicroBatches
from raytrain_opt.train.learner_config import LearnerConfig
from tests.support.small_jobs import read_lines, small_job

pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.timeout(600)]


def test_workers_and_shards_die_and_no_sample_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker dies in the middle of an epoch, while the other continues; a shard dies later."""
    fault = {"role": "worker", "index": 1, "epoch": 2, "phase": "main_train", "step": 3}
    monkeypatch.setenv(VARIABLE, json.dumps([fault]))
    parallel = {"mode": "async", "staleness_bound": 1, "shards": 2, "snapshot_every": 4}
    job = small_job(tmp_path, epochs=4, parallel=parallel)
    ended, killed = threading.Event(), list[int]()
    killer = threading.Thread(target=_kill_a_shard, args=(tmp_path, ended, killed))
    killer.start()
    try:
        result = run(job)
    finally:
        ended.set()
        killer.join()
    assert len(killed) == 1
    assert result.summary["restarts"]["worker"] <= 1  # not all workers
    epochs, rounds = (read_lines(result.run_dir, name) for name in ("epochs", "rounds"))
    assert [epoch["epoch"] for epoch in epochs] == [1, 2, 3, 4]
    steps = result.summary["steps_per_epoch"] - 5  # of a round, which are kept
    for epoch in epochs:
        assert epoch["samples"] == steps * 64
        counts = epoch["staleness"]["counts"]
        assert len(counts) <= 2
        assert sum(counts) == steps * 2
        assert epoch["test_samples"] == 359
    assert epochs[0]["workers"] == 2
    for line in rounds:
        assert line["loaded_sha256"] == [line["winner_sha256"]]
    assert result.summary["parallel"]["lost_gradients"] == 0
    assert epochs[-1]["train_loss"] < epochs[0]["train_loss"]


def _kill_a_shard(storage: Path, ended: threading.Event, killed: list[int]) -> None:
    """Kill a shard when the third epoch is recorded; append its process to `killed`."""
    while not ended.wait(0.05):
        for records in storage.glob("*/epochs.jsonl"):
            if records.read_text().count("\n") >= 3:
                for process in psutil.process_iter():
                    if process.name().startswith("ray::WeightShardActor") and _is_child(process):
                        os.kill(process.pid, signal.SIGKILL)
                        killed.append(process.pid)
                        return


def _is_child(process: psutil.Process) -> bool:
    return psutil.Process().pid in {parent.pid for parent in process.parents()}


def test_without_staleness_it_is_the_synchronous_training(tmp_path: Path) -> None:
    """Compare with one process that computes the micro-batches of both workers."""
    plain = {"policy": "schedule", "initial": 0.05, "shape": "linear"}
    parallel = {"mode": "async", "staleness_bound": 0}
    job = small_job(tmp_path, epochs=2, learning_rate=plain, parallel=parallel)
    result = run(job)
    steps = result.summary["steps_per_epoch"]
    learner = Learner(
        LearnerConfig.from_job(job), load_shared_arrays(job.data), torch.device("cpu")
    )
    for epoch in (1, 2):
        lrs = result.lrs[(epoch - 1) * steps : epoch * steps]
        learner.train(epoch, 0, lrs, MicroBatches(range(2), 2))
    weights = read_weights(Path(result.run_dir) / "checkpoints" / "epoch-0002")
    for name, expected in learner.model.named_parameters():
        torch.testing.assert_close(weights[name], expected.detach(), rtol=1e-3, atol=1e-4)
    for line in read_lines(result.run_dir, "epochs"):
        assert line["staleness"] == {"counts": [steps * 2], "mean": 0.0, "max": 0}
