"""Balanced sampling and class weights on a long-tailed training set: Fashion-MNIST.

    python -m benchmarks.imbalance --data-root FOLDER [--seeds 0 1 2]

The largest class has 500 training images, each next one 0.65 times as many, the smallest 10; every
seed has another order of the classes. ResNet-8, default optimizer and search, 20 epochs. The test
set has 200 images of each class. `tail` is the accuracy of the three smallest classes.
`--data-root` is laid out as benchmarks/comparison_tasks.py says. One process, no Ray. The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from benchmarks.common import machine
from benchmarks.comparison_tasks import Pair, read_fashion_mnist
from benchmarks.fine_tune import save
from raytrain_opt import Job, run
from raytrain_opt.recording.predictions import PredictionsRecord
from raytrain_opt.recording.reader import read_record
from raytrain_opt.recording.recorder import versions

CLASSES, LARGEST, SMALLEST, TAIL, TEST_PER_CLASS = 10, 500, 10, 3, 200
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "balanced_sampler": {"data": {"sampler": "balanced"}},
    "class_weights": {"loss": {"class_weights": "balanced"}},
}


def take(pair: Pair, counts: list[int]) -> Pair:
    """Return the first images of each class, as many as `counts` says."""
    x, y = pair
    chosen = np.concatenate([np.flatnonzero(y == k)[:count] for k, count in enumerate(counts)])
    return x[chosen], y[chosen]


def long_tail(order: list[int]) -> list[int]:
    """Return the number of images of each class; the first in `order` has most."""
    factor = (SMALLEST / LARGEST) ** (1 / (CLASSES - 1))
    return [round(LARGEST * factor ** order.index(label)) for label in range(CLASSES)]


def measure(train_set: Pair, test: Pair, seed: int, folder: Path) -> dict[str, Any]:
    """Train all variants with one seed; return their accuracies."""
    order = [int(label) for label in np.random.default_rng(seed).permutation(CLASSES)]
    section = save(folder / f"seed-{seed}", take(train_set, long_tail(order)), test)
    row: dict[str, Any] = {"seed": seed, "order": order}
    for name, changes in VARIANTS.items():
        job = {
            "model": {"name": "resnet8", "args": {"width": 8}},
            "data": {**section, **changes.get("data", {})},
            "loss": changes.get("loss", {}),
            "epochs": 20,
            "global_batch_size": 32,
            "seed": seed,
            "workers": {"count": 1, "threads": 1},
            "evaluate": {"every_epochs": 20},
            "storage_path": str(folder / "runs"),
        }
        result = run(Job.model_validate(job), in_process=True)
        record = read_record(result.run_dir, "predictions.json", PredictionsRecord)
        assert record is not None
        hits = {label: n for label, predicted, n in record.confusion if label == predicted}
        tail = mean(hits.get(label, 0) / TEST_PER_CLASS for label in order[-TAIL:])
        row[name] = {"accuracy": result.test_metric, "tail": tail}
    return row


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    train_set, test_set = read_fashion_mnist(arguments.data_root, 28)
    test = take(test_set, [TEST_PER_CLASS] * CLASSES)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in arguments.seeds:
            rows.append(measure(train_set, test, seed, Path(folder)))
            print(json.dumps(rows[-1]), flush=True)
    print(json.dumps({"rows": rows, "machine": machine(), "versions": versions()}))


if __name__ == "__main__":
    main()
