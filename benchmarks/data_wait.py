"""How long a training waits for JPEG files, and the memory of a long list of files.

    python -m benchmarks.data_wait --data-root FOLDER [--epochs 3] [--in-process] [--files 1281000]

A job of the product as a user writes it: ResNet-18 on the 1,450 JPEG files, 224 x 224 pixels, of
small/imagenette224_small.npz below FOLDER (see comparison_tasks.py), read from a temporary folder
and cropped to 64 x 64; global batch 64, `loader_workers: auto`, on Ray with the default worker.
`data_wait_pct` is the report's figure: seconds in which steps waited for a batch, of those of all
steps; `by_epoch` has that of each epoch, as loader processes are added after the first one.

`list_mib`: the list of `--files` files, as arrays of a node; `process_mib`: memory that a fork,
as loader processes are, gains by reading each entry of the list. `tuples_mib`: the same with
a list of (path, class). The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.common import machine
from raytrain_opt import Job, run
from raytrain_opt.data.image_folder import ImageFiles
from raytrain_opt.recording.recorder import versions
from raytrain_opt.recording.records import EpochRecord
from raytrain_opt.report.run_reader import read_run
from raytrain_opt.report.warnings import data_wait_fraction

SET = "small/imagenette224_small.npz"


def write_files(data_root: Path, folder: Path) -> None:
    """Write the JPEG files as folder/{train,val}/<class>/<number>.jpg."""
    with np.load(data_root / SET) as stored:
        for split in ("train", "val"):
            blob, ends, labels = (stored[f"{split}_{part}"] for part in ("blob", "ends", "y"))
            for number, content in enumerate(np.split(blob, ends[:-1])):
                file = folder / split / stored["classes"][labels[number]] / f"{number:05}.jpg"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content.tobytes())


def measure_wait(data_root: Path, epochs: int, in_process: bool) -> dict[str, object]:
    """Train; return the percentage of the steps' time in which they waited."""
    with tempfile.TemporaryDirectory() as folder:
        write_files(data_root, Path(folder))
        job = Job.model_validate(
            {
                "name": "data-wait",
                "model": "resnet18",
                "data": {"name": "image_folder", "root": folder, "image_size": 64},
                "epochs": epochs,
                "global_batch_size": 64,
                "learning_rate": {"policy": "schedule", "initial": 0.05},
                "storage_path": f"{folder}/runs",
            }
        )
        records = read_run(run(job, in_process=in_process).run_dir)

    def wait_pct(epochs: Sequence[EpochRecord]) -> float:
        fraction = data_wait_fraction(replace(records, epochs=epochs))
        assert fraction is not None
        return round(100 * fraction, 2)

    return {
        "data_wait_pct": wait_pct(records.epochs),
        "by_epoch": [wait_pct([epoch]) for epoch in records.epochs],
        "samples_per_s": [round(epoch.samples_per_s, 1) for epoch in records.epochs],
    }


def measure_list(count: int) -> dict[str, float]:
    """Return MiB of a list, and what a fork gains by reading all of it."""
    classes = [f"n{number:08}" for number in range(1000)]
    pairs = [
        (f"/data/imagenet/train/{classes[i % 1000]}/{classes[i % 1000]}_{i:08}.JPEG", i % 1000)
        for i in range(count)
    ]
    files = ImageFiles.of(classes, pairs)
    size = files.paths.nbytes + files.ends.nbytes + files.labels.nbytes
    figures = {
        "list_mib": size / 2**20,
        "process_mib": gained_mib(files),
        "tuples_mib": gained_mib(pairs),
    }
    return {name: round(value, 1) for name, value in figures.items()}


def gained_mib(files: ImageFiles | Sequence[tuple[str, int]]) -> float:
    """Fork, read each entry there, and return the growth of the fork's own memory."""
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def read_all() -> None:
        before = own_mib()
        for i in range(len(files)):
            files[i]
        sender.send(own_mib() - before)

    process = multiprocessing.get_context("fork").Process(target=read_all)
    process.start()
    process.join()
    gained: float = receiver.recv()
    return gained


def own_mib() -> float:
    """Return the memory that this process shares with no other."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--in-process", action="store_true", help="without Ray")
    parser.add_argument("--files", type=int, default=1_281_000)
    arguments = parser.parse_args()
    figures = {
        "load_before": round(os.getloadavg()[0], 1),
        **measure_list(arguments.files),
        **measure_wait(arguments.data_root, arguments.epochs, arguments.in_process),
        "load_after": round(os.getloadavg()[0], 1),
    }
    print(json.dumps({**figures, "machine": machine(), "versions": versions()}))


if __name__ == "__main__":
    main()
