"""From Python: train again with the learning rates that an earlier run found.

    python jobs/replay_schedule.py RUN_DIR
    ray job submit --working-dir . -- python jobs/replay_schedule.py RUN_DIR

RUN_DIR is the directory of that run, as a path on the cluster. Data, batch size and epochs are
the same; there are no candidates, so it takes about half the time.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from raytrain_opt import Job, load_job, run


def make_job(run_dir: str) -> Job:
    """Return the job of that run with its learning rates replayed instead of searched."""
    directory = Path(run_dir).expanduser()
    schedule = directory / "schedule.jsonl"
    searched = load_job(directory / "job.yaml")
    epochs = [json.loads(line) for line in schedule.read_text().split("\n")[:-1]]
    optimizer = next(o for o in searched.optimizers if o.name == epochs[0]["optimizer"])
    hold_out = searched.hold_out
    values = searched.model_dump()
    values["data"]["validation_fraction"] = 0 if hold_out.only_in_search else hold_out.fraction
    values |= {
        "name": "replay",
        "learning_rate": {"policy": "replay", "schedule": str(schedule)},
        "optimizer": optimizer.model_dump(),
        "epochs": len(epochs),  # the run may have ended early
        "train_for": None,
        "stop": None,
    }
    return Job.model_validate(values)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    result = run(make_job(sys.argv[1]))
    print(f"test accuracy {result.test_metric:.1%}, results in {result.run_dir}")
