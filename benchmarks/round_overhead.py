"""The overhead of a round of candidates beside its computing.

    python -m benchmarks.round_overhead [--rounds 12]

ResNet-18 (11 M parameters, CIFAR form), 2 workers, 4 candidates in 4 slots, random images (the
time does not depend on their content), few and small batches so that computing is short.

`overhead_s_per_round` (median): the wall time of an epoch, from the end of the one before to
its own end, minus the compute of the slowest slot (steps and scoring), minus the compute of the
main training. It contains: posting commands, loading states in slots and workers, handing over
the winner's and the workers' state through the object store, both digests, averaging buffers,
choosing, and writing the records. Evaluation and checkpoint files are switched off. The first
round is left out (workers start beside it).

`*_all`: every round. A round as a new `Tuner.fit()` and a new `TorchTrainer.fit()` was measured
until 2026-11-25: results/throughput.md. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.common import machine
from raytrain_opt import Job, run
from raytrain_opt.recording.recorder import versions

MULTIPLIERS = [1.5, 1.0, 0.75, 0.5]
ALPHA_STEPS, STEPS, GLOBAL_BATCH, VALIDATION_SAMPLES = 1, 3, 8, 8


def make_job(folder: Path, epochs: int) -> Job:
    """Write the data and return the job whose rounds are timed."""
    rng = np.random.default_rng(0)
    samples = STEPS * GLOBAL_BATCH + VALIDATION_SAMPLES
    paths = []
    for name, count in (("train", samples), ("test", 8)):
        x, y = folder / f"{name}_x.npy", folder / f"{name}_y.npy"
        np.save(x, rng.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8))
        np.save(y, np.arange(count, dtype=np.int64) % 10)
        paths.append((str(x), str(y)))
    return Job.model_validate(
        {
            "name": "round-overhead",
            "model": "cifar_resnet18",
            "data": {
                "name": "arrays",
                "train": paths[0],
                "test": paths[1],
                "num_classes": 10,
                "validation_fraction": VALIDATION_SAMPLES / samples,
            },
            "epochs": epochs,
            "global_batch_size": GLOBAL_BATCH,
            "learning_rate": {
                "policy": "stpt",
                "initial": 0.01,
                "candidates": MULTIPLIERS,
                "alpha": ALPHA_STEPS,
            },
            "workers": {"count": 2, "threads": 1, "resources": {"CPU": 0.6}},
            "slots": {"count": 4, "resources": {"CPU": 0.2}},
            "storage_path": str(folder / "runs"),
            "evaluate": {"every_epochs": epochs},
            "checkpoint": {"every_epochs": epochs},
        }
    )


def resident_overheads(job: Job) -> list[float]:
    """Return the overhead in seconds of each round but the first and the last (it evaluates)."""
    result = run(job)
    lines = (Path(result.run_dir) / "epochs.jsonl").read_text().splitlines()
    epochs = [json.loads(line) for line in lines][1:-1]
    return [
        epoch["duration_s"]
        - epoch["timings_s"]["longest_slot_s"]
        - epoch["timings_s"]["main_compute_s"]
        for epoch in epochs
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        overheads_s = resident_overheads(make_job(Path(folder), args.rounds + 2))
    result = {"overhead_s_per_round": median(overheads_s), "overhead_s_all": overheads_s}
    print(json.dumps({**result, "machine": machine(), "versions": versions()}))


if __name__ == "__main__":
    main()
