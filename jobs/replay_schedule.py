"""From Python: train again with the learning rates that an earlier run found.

    python jobs/replay_schedule.py RUN_DIR
    ray job submit --working-dir . -- python jobs/replay_schedule.py RUN_DIR

RUN_DIR is the directory of that run, as a path on the cluster. Data, batch size and epochs are
the same; there are no candidates, so it takes about half the time.
"""

from __future__ import annotations

import sys
from pathlib import Path

from raytrain_opt import Job, load_job, run


def make_job(run_dir: str) -> Job:
    """Return the job of that run with its learning rates replayed instead of searched."""
    directory = Path(run_dir).expanduser()
    replay = f"learning_rate={{policy: replay, schedule: '{directory / 'schedule.json'}'}}"
    hold_out = load_job(directory / "job.yaml").hold_out
    held_out = 0.0 if hold_out.only_in_search else hold_out.fraction
    overrides = [replay, "name=replay", f"data.validation_fraction={held_out}"]
    return load_job(directory / "job.yaml", overrides)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    result = run(make_job(sys.argv[1]))
    print(f"test accuracy {result.test_accuracy:.1%}, results in {result.run_dir}")
