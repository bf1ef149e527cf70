"""A task of time_to_accuracy.py on Ray with two workers, beside the same job in one process.

    python -m benchmarks.on_ray --data-root FOLDER [--seeds 0 1 2] [--task cifar100_coarse_16]

Both are `raytrain_opt.run` with the default optimizer and search, 16 epochs, one thread per
process. Two workers compute half of each batch: their BatchNorm normalizes 16 images in place of
32, so the numbers differ, but the search should choose alike. `trainings`: samples trained, those
of the search included, in units of one training. `seconds`: from the first command of the run to
the end of its last, without the start of processes. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import machine
from benchmarks.comparison_tasks import OTHER_NETWORKS, TASKS, Task
from raytrain_opt import Job, run
from raytrain_opt.recording.reader import read_lines
from raytrain_opt.recording.recorder import versions
from raytrain_opt.recording.records import EpochRecord
from raytrain_opt.recording.spans import SpanRecord

EPOCHS = 16


def measure(task: Task, data: dict[str, Any], seed: int, workers: int, folder: Path) -> Any:
    """Train on Ray, or in one process with one worker; return what came of it."""
    job = Job.model_validate(
        {
            **task.job(data, EPOCHS, seed, {"policy": "stpt_horizon"}, "auto"),
            "workers": {"count": workers, "threads": 1},
            "evaluate": {"every_epochs": EPOCHS},
            "storage_path": str(folder),
        }
    )
    result = run(job, in_process=workers == 1)
    spans = read_lines(result.run_dir, "timeline.jsonl", SpanRecord)
    epochs = read_lines(result.run_dir, "epochs.jsonl", EpochRecord)
    first_s = min(span.start_s for span in spans)
    last_s = max(span.start_s + span.duration_s for span in spans)
    return {
        "workers": workers,
        "accuracy": result.test_metric,
        "optimizer": epochs[-1].optimizer,
        "peak_lr": max(result.lrs),
        "trainings": 1 + result.summary["search"]["fraction_of_training"],
        "seconds": round(last_s - first_s, 1),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--task", choices=[*TASKS, *OTHER_NETWORKS], default="cifar100_coarse_16")
    arguments = parser.parse_args()
    task = {**TASKS, **OTHER_NETWORKS}[arguments.task]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        data = task.prepare(arguments.data_root, Path(folder))
        for seed in arguments.seeds:
            for workers in (1, 2):
                row = measure(task, data, seed, workers, Path(folder) / "runs")
                rows.append({"seed": seed, **row})
                print(json.dumps(rows[-1]), flush=True)
    print(
        json.dumps({"task": task.name, "rows": rows, "machine": machine(), "versions": versions()})
    )


if __name__ == "__main__":
    main()
