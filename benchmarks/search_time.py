"""Time of a search on the workers, beside the time of the training that follows it.

    python -m benchmarks.search_time [--workers 1 2] [--repetitions 3] [--search-on workers]

Each run is `raytrain-opt run` with policy stpt_horizon on a Ray of this machine: synthetic images,
ResNet-8, one thread per worker. From its timeline:

    search     from the first command of a candidate, without the run's first step, which makes
               connections and kernels, to the beginning of the main training: with scoring,
               decisions, and the pauses between commands
    training   from there to the end of the last command of a worker: with evaluation

`search_time_ratio` is (search / training in seconds) over (search / training in samples), the
median over the repetitions, by number of workers; 1 means that the search costs the same part of
the time as of the samples. Scoring is no sample of the search, but part of its time.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common import machine, synthetic_images
from raytrain_opt import Job, run
from raytrain_opt.recording.reader import read_lines
from raytrain_opt.recording.recorder import versions
from raytrain_opt.recording.spans import SpanRecord

SHAPE, CLASSES, TRAIN, TEST = (16, 16, 3), 20, 8192, 1024
SEARCH = ("pretrain", "send_candidate_state")


def make_job(folder: Path, workers: int, search_on: str) -> Job:
    """Return the job; its data are below `folder`."""
    return Job.model_validate(
        {
            "name": f"search-{workers}",
            "model": {"name": "resnet8", "args": {"width": 8}},
            "data": {
                "name": "arrays",
                "train": [str(folder / "train_x.npy"), str(folder / "train_y.npy")],
                "test": [str(folder / "test_x.npy"), str(folder / "test_y.npy")],
            },
            "epochs": 8,
            "global_batch_size": 128,
            "optimizer": "SGD",
            # Candidates of the usual 12 and 48 steps, in a training that is short.
            "learning_rate": {
                "policy": "stpt_horizon",
                "search_on": search_on,
                "max_search_cost": 0.5,
                "horizon": 1.0,
            },
            "workers": {"count": workers, "threads": 1},
            "storage_path": str(folder / "runs"),
        }
    )


def measure(job: Job) -> dict[str, Any]:
    """Run the job; return the times of its search and of its training."""
    result = run(job)
    spans = read_lines(result.run_dir, "timeline.jsonl", SpanRecord)
    searching = [span for span in spans if span.command in SEARCH]
    first_step_s = result.summary["parallel"]["first_step_s"]
    began_s = min(span.start_s for span in searching) + first_step_s
    middle_s = min(span.start_s for span in spans if span.command == "main_train")
    training = [span for span in spans if span.command in ("main_train", "evaluate")]
    ends = (span.start_s + span.duration_s for span in training)
    search_s, training_s = middle_s - began_s, max(ends) - middle_s
    parts_s: Counter[str] = Counter()
    for span in searching:
        if span.process.endswith(" 0"):
            parts_s.update({name: value or 0.0 for name, value in span.timings_s.items()})
    cost = result.summary["search"]
    fraction = cost["fraction_of_training"]
    return {
        "workers": job.workers.size,
        "search_s": search_s,
        "training_s": training_s,
        "search_samples": cost["samples"],
        "training_samples": cost["main_samples"],
        "rounds": cost["rounds"],
        "first_step_s": first_step_s,
        "search_parts_s": dict(parts_s),
        "training_compute_s": sum(
            span.timings_s.get("compute_s") or 0.0
            for span in spans
            if (span.process, span.command) == ("worker 0", "main_train")
        ),
        "search_time_ratio": search_s / training_s / fraction,
    }


def _medians(rows: Sequence[dict[str, Any]], name: str) -> dict[str, dict[int, Any]]:
    """Return median and spread of a column by number of workers."""
    values: dict[int, list[float]] = {}
    for row in rows:
        values.setdefault(row["workers"], []).append(row[name])
    return {
        name: {workers: median(column) for workers, column in values.items()},
        f"{name}_spread": {workers: [min(c), max(c)] for workers, c in values.items()},
    }


def compare(workers: Sequence[int], repetitions: int, search_on: str) -> dict[str, Any]:
    """Measure all numbers of workers in turn; return the medians."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for split, samples in (("train", TRAIN), ("test", TEST)):
            x, y = synthetic_images(samples, SHAPE, CLASSES)
            np.save(folder / f"{split}_x.npy", x)
            np.save(folder / f"{split}_y.npy", y)
        for _ in range(repetitions):
            for count in workers:
                rows.append(measure(make_job(folder, count, search_on)))
                print(json.dumps(rows[-1]), flush=True)
    return _medians(rows, "search_time_ratio")


def main() -> None:
    """Print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--search-on", choices=("workers", "slots"), default="workers")
    arguments = parser.parse_args()
    medians = compare(arguments.workers, arguments.repetitions, arguments.search_on)
    about = {"search_on": arguments.search_on, "machine": machine(), "versions": versions()}
    print(json.dumps({**medians, **about}))


if __name__ == "__main__":
    main()
