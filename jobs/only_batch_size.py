"""From Python: search the batch size without training.

    python jobs/only_batch_size.py
    ray job submit --working-dir . -- python jobs/only_batch_size.py

Runs on CPU, no download. Expected on 2 cores: about a minute.
"""

from __future__ import annotations

from raytrain_opt import Job, find_batch_size


def make_job() -> Job:
    """Return a job on the digits.

    Its learning rate is meant for `global_batch_size`; the search scales it from there and
    begins at `initial`.
    """
    return Job(
        name="only-batch-size",
        model="small_cnn",
        data="digits",
        epochs=8,
        global_batch_size=32,
        batch_size_search={
            "strategy": "throughput_knee",
            "initial": 16,
            "max_batch_size": 128,
            "min_updates_per_epoch": 10,  # of 1,438 samples; by default 20, and 500 in all
            "min_updates": 80,
            "lr_rule": "sqrt",
        },
        learning_rate={"policy": "schedule", "shape": "cosine", "initial": 0.05},
        workers={"count": 1, "threads": 1},
    )


if __name__ == "__main__":
    result = find_batch_size(make_job())
    lr = result.job.learning_rate.initial
    print(f"global batch size {result.job.global_batch_size}, learning rate {lr:.3g}")
    print(f"train with them: raytrain-opt run {result.run_dir}/job.yaml")
