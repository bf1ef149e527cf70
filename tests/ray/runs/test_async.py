"""Asynchronous training on a real local Ray; with staleness: tests/unit/async_training."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import psutil
import pytest

from raytrain_opt import run
from tests.support.faults import injected
from tests.support.small_jobs import read_lines, small_job

pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.timeout(600)]


@pytest.mark.usefixtures("without_plots")
def test_workers_and_shards_die_and_no_sample_is_lost(tmp_path: Path) -> None:
    """A shard dies after the first epoch, a worker in the second, while the other continues."""
    fault = {"role": "worker", "index": 1, "epoch": 2, "phase": "main_train", "step": 3}
    stpt = {"policy": "stpt", "initial": 0.02, "candidates": [1.0, 0.01], "alpha": 5}
    section = {"mode": "async", "staleness_bound": 3}
    changes = {"learning_rate": stpt, "slots": {"count": 1}, "checkpoint": {"keep": "all"}}
    ended, killed = threading.Event(), list[int]()
    killer = threading.Thread(target=_kill_a_shard, args=(tmp_path / "async", ended, killed))
    killer.start()
    try:
        with injected([fault]):
            result = run(small_job(tmp_path / "async", parallel=section, **changes))
    finally:
        ended.set()
        killer.join()
    assert len(killed) == 1
    assert result.summary.restarts["worker"] <= 1  # not all workers
    epochs, rounds = (read_lines(result.run_dir, name) for name in ("epochs", "rounds"))
    assert [epoch["epoch"] for epoch in epochs] == [1, 2, 3]
    steps = result.summary.steps_per_epoch - 5  # of a round, which are kept
    per_step = [sum(epoch["staleness"].values()) / steps for epoch in epochs]
    assert per_step == [8, 8, 8]  # two workers with four micro-batches of eight samples each
    for epoch in epochs:
        assert epoch["samples"] == steps * 64
        assert max(map(int, epoch["staleness"])) <= 3
        assert epoch["test_samples"] == 359
    assert epochs[0]["workers"] == 2
    assert len(rounds) == 3
    assert epochs[-1]["train_loss"] < epochs[0]["train_loss"]


def _kill_a_shard(storage: Path, ended: threading.Event, killed: list[int]) -> None:
    """Kill a shard when the first epoch is recorded; append its process to `killed`."""
    while not ended.wait(0.05):
        for records in storage.glob("*/epochs.jsonl"):
            if records.read_text().count("\n") >= 1:
                for process in psutil.process_iter():
                    if process.name().startswith("ray::WeightShardActor") and _is_child(process):
                        os.kill(process.pid, signal.SIGKILL)
                        killed.append(process.pid)
                        return


def _is_child(process: psutil.Process) -> bool:
    return psutil.Process().pid in {parent.pid for parent in process.parents()}
