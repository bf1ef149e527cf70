"""Fine-tuning against training from scratch: two halves of the classes of CIFAR-100.

    python -m benchmarks.fine_tune --data-root FOLDER [--seeds 0] [--per-class 10 40]

torchvision's ResNet-18 is trained on 200 images of each of the first 50 classes (alphabetical
order), then on few images of each of the other 50, from these weights and from scratch, with the
same job: default optimizer and search, `--epochs` epochs. `head_10` trains the new last layer at
ten times the rate, `frozen` trains neither the first convolution nor the first stage. Accuracies
are fractions of 2,500 test images of the second half; `--data-root` is laid out as
benchmarks/comparison_tasks.py says. One process, no Ray. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import machine
from benchmarks.comparison_tasks import Pair, read_cifar100
from raytrain_opt import Job, RunResult, run
from raytrain_opt.recording.recorder import versions

HALF, TEST_PER_CLASS, PRETRAIN_PER_CLASS = 50, 50, 200
VARIANTS: dict[str, dict[str, Any]] = {
    "scratch": {},
    "fine_tuned": {"model": {}},
    "head_10": {"model": {}, "optimizer": {"name": "auto", "lr_multipliers": {"fc.*": 10}}},
    "frozen": {"model": {"freeze": ["conv1.*", "bn1.*", "layer1.*"]}},
}


def take(pair: Pair, first_class: int, per_class: int) -> Pair:
    """Return the first images of each class of a half, with labels from 0."""
    x, y = pair
    classes = range(first_class, first_class + HALF)
    chosen = np.concatenate([np.flatnonzero(y == label)[:per_class] for label in classes])
    return x[chosen], y[chosen] - first_class


def save(folder: Path, train: Pair, test: Pair) -> dict[str, Any]:
    """Write the arrays; return the `data` section that names them."""
    folder.mkdir()
    section: dict[str, Any] = {"name": "arrays", "augment": {"crop_padding": 4, "flip": True}}
    for split, pair in (("train", train), ("test", test)):
        section[split] = [str(folder / f"{split}_{name}.npy") for name in "xy"]
        np.save(section[split][0], pair[0])
        np.save(section[split][1], pair[1])
    return section


def train(folder: Path, data: dict[str, Any], epochs: int, seed: int, **changes: Any) -> RunResult:
    """Train one network; `changes` are added to the job."""
    model = {"name": "resnet18", **changes.pop("model", {})}
    job = {
        "model": model,
        "data": data,
        "epochs": epochs,
        "global_batch_size": 32,
        "seed": seed,
        "workers": {"count": 1, "threads": 1},
        "evaluate": {"every_epochs": epochs},
        "storage_path": str(folder / "runs"),
    }
    return run(Job.model_validate(job | changes), in_process=True)


def measure(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Train every variant with every seed and number of images."""
    train_set, test_set = read_cifar100(arguments.data_root, arguments.side, coarse=False)
    test = take(test_set, HALF, TEST_PER_CLASS)
    first = save(
        folder / "first",
        take(train_set, 0, PRETRAIN_PER_CLASS),
        take(test_set, 0, TEST_PER_CLASS),
    )
    rows = []
    for seed in arguments.seeds:
        pretrained = train(folder, first, arguments.epochs, seed)
        for per_class in arguments.per_class:
            data_folder = folder / f"second-{seed}-{per_class}"
            data = save(data_folder, take(train_set, HALF, per_class), test)
            row: dict[str, Any] = {"seed": seed, "per_class": per_class, "accuracy": {}}
            for name, changes in VARIANTS.items():
                copy = {key: dict(value) for key, value in changes.items()}
                if "model" in copy:
                    copy["model"]["weights"] = pretrained.run_dir
                result = train(folder, data, arguments.epochs, seed, **copy)
                row["accuracy"][name] = result.test_metric
            rows.append({**row, "pretrained": pretrained.test_metric})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--per-class", type=int, nargs="+", default=[10, 40])
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(arguments, Path(folder))
    settings = {"side": arguments.side, "epochs": arguments.epochs, "rows": rows}
    print(json.dumps({**settings, "machine": machine(), "versions": versions()}))


if __name__ == "__main__":
    main()
