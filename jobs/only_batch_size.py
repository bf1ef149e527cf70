"""From Python: choose the batch size, and nothing else.

    python jobs/only_batch_size.py
    ray job submit --working-dir . -- python jobs/only_batch_size.py

CPU only, no download. Expected on 2 cores: about a minute.
"""

from __future__ import annotations

from raytrain_opt import Job, find_batch_size


def make_job() -> Job:
    """Digits. `global_batch_size` is where the learning rate belongs to, not where the search
    begins.
    """
    return Job(
        name="only-batch-size",
        model="small_cnn",
        data="digits",
        epochs=8,
        global_batch_size=32,
        batch_size_search={
            "strategy": "throughput_knee",
            "start": 16,
            "max_batch_size": 128,
            "lr_rule": "sqrt",
        },
        learning_rate={"policy": "schedule", "shape": "cosine", "initial": 0.05},
        workers={"count": 1, "threads": 1},
    )


if __name__ == "__main__":
    found = find_batch_size(make_job())
    print(f"{found.job.global_batch_size} samples, at {found.job.learning_rate.initial:.3g}")
    print(f"train with it: raytrain-opt run {found.run_dir}/job.yaml")
