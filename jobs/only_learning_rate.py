"""From Python: find the learning rates while training, at a batch size that is given.

    python jobs/only_learning_rate.py
    ray job submit --working-dir . -- python jobs/only_learning_rate.py

CPU only, no download. Expected on 2 cores: about a minute, at least 95 % test accuracy. What was
found is in RUN_DIR/schedule.json; jobs/replay_schedule.py trains with it, without searching.
"""

from __future__ import annotations

from raytrain_opt import Job, run


def make_job() -> Job:
    """Digits; two candidates a round, in one slot."""
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
    rates = list(dict.fromkeys(result.lrs))
    print(f"test accuracy {result.test_accuracy:.1%} with {', '.join(f'{r:.3g}' for r in rates)}")
    print(f"train with them again: python jobs/replay_schedule.py {result.run_dir}")
