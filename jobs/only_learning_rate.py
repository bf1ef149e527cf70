"""From Python: search the learning rates during the training, at a fixed batch size.

    python jobs/only_learning_rate.py
    ray job submit --working-dir . -- python jobs/only_learning_rate.py

CPU only, no download. Expected on 2 cores: about a minute, at least 95 % test accuracy. The
learning rates are in RUN_DIR/schedule.jsonl; jobs/replay_schedule.py trains with them again.
"""

from __future__ import annotations

from raytrain_opt import Job, run


def make_job() -> Job:
    """Return a job on the digits with two candidates per round, in one slot."""
    return Job(
        name="only-learning-rate",
        model="small_cnn",
        data="digits",
        epochs=6,
        global_batch_size=64,
        learning_rate={
            "policy": "stpt",
            "initial": 0.1,
            "candidates": [1.0, 0.5],
            "alpha": 0.25,
        },
        workers={"count": 1},
        slots={"count": 1},
    )


if __name__ == "__main__":
    result = run(make_job())
    lrs = ", ".join(f"{lr:.3g}" for lr in dict.fromkeys(result.lrs))
    print(f"test accuracy {result.test_metric:.1%} with learning rates {lrs}")
    print(f"train with them again: python jobs/replay_schedule.py {result.run_dir}")
