"""Balanced training on a real local Ray: a worker that dies costs the step that it died in."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain_opt import run
from tests.support.faults import injected
from tests.support.small_jobs import read_lines, small_job

pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.timeout(600)]


@pytest.mark.usefixtures("without_plots")
def test_a_worker_that_dies_costs_the_step_that_it_died_in(tmp_path: Path) -> None:
    """The last rank in the first epoch, the first one in the second."""
    faults = [
        {"role": "worker", "index": 1, "epoch": 1, "phase": "main_train", "step": 9},
        {"role": "worker", "index": 0, "epoch": 2, "phase": "main_train", "step": 4},
    ]
    schedule = {"policy": "schedule", "shape": "linear", "initial": 0.05}
    changes = {"learning_rate": schedule, "slots": {}, "optimizer": "SGD", "average": None}
    with injected(faults):
        result = run(small_job(tmp_path, parallel={"mode": "balanced"}, **changes))
    steps = result.summary["steps_per_epoch"]
    epochs, events = (read_lines(result.run_dir, name) for name in ("epochs", "events"))
    assert [e["text"] for e in events if e["kind"] == "continued"] == [
        f"epoch {epoch}: a worker died or was cut off; training continues after step {step} of "
        f"{steps}, which another worker still had"
        for epoch, step in ((1, 9), (2, 4))
    ]
    assert [e["samples"] for e in epochs] == [steps * 64] * 3
    assert [e["workers"] for e in epochs] == [2] * 3
    assert len(result.lrs) == 3 * steps
    losses = [e["train_loss"] for e in epochs]
    assert losses == sorted(losses, reverse=True)
