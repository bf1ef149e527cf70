"""From Python: train once more with the learning rates that an earlier run found.

    python jobs/replay_schedule.py RUN_DIR
    ray job submit --working-dir . -- python jobs/replay_schedule.py RUN_DIR

RUN_DIR is that run's directory, as the cluster sees it. Data, split, batch size and epochs stay as
they were; there are no candidates, so it takes about half the time.
"""

from __future__ import annotations

import sys
from pathlib import Path

from raytrain_opt import Job, load_job, run


def make_job(run_dir: str) -> Job:
    """The job of that run, with its rates written down instead of searched for."""
    found = Path(run_dir).expanduser()
    replay = f"learning_rate={{policy: replay, schedule: '{found / 'schedule.json'}'}}"
    return load_job(found / "job.yaml", [replay, "name=replay"])


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    result = run(make_job(sys.argv[1]))
    print(f"test accuracy {result.test_accuracy:.1%}, written to {result.run_dir}")
