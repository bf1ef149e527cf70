"""Batch-size finders against an exhaustive sweep, on real training on CPU.

    python -m benchmarks.batch_size_search [--repeats 3] [--pairs 5] [--data-root FOLDER]

ResNet-8, momentum SGD, synthetic uint8 images of Fashion-MNIST's shape in a TensorDataset behind
a DataLoader without workers; `--data-root` takes the first `--samples` images of the real set
(FOLDER/FashionMNIST/raw, IDX files, gzipped or not). One process, `--threads` compute threads.

1. Sweep: samples/s of training at sizes from 8 to 1,024, measured by the package's own probe
   but to a smaller relative error, in passes of opposite order. `sweep` holds the medians.
2. Finders, `--repeats` times in turn: the package's three strategies through
   `MinibatchSizeOptimizer` with `max_batch_size` 1,024, and Lightning's BatchSizeFinder
   (`Tuner.scale_batch_size`, mode power, 3 steps a trial, from 2) on the same network and data.
3. Every choice is measured beside the best size of the sweep, `--pairs` times in turn.

Medians over the runs of each finder: `probes`, `seconds` (the complete call, without imports and
building the network), `choice` (the lower median), `samples_per_s_of_choice`, and `regret_pct` =
100 * (1 - median over pairs of choice / best). The best size is the best of a noisy sweep, so a
choice may beat it: then the regret is negative.

Two finders are not made for this machine. BatchSizeFinder looks for the largest size that fits
into memory and measures no speed. Here every size fits, so it stops at its bound (1,024, chosen
without having been tried): its regret is the cost of that bound, no more. GpuUsageMaximize sees
its CPU time (`utilization.sampler: cpu`, samples of 0.2 s, correct to 5 %), which is close
to 100 % at any size when nothing else runs: the published rule then shrinks the batch. To save
time, `--max-loops` bounds the published strategies' probes (100 by default in a job). All other
settings are a job's defaults: a probe of ThroughputKnee ends at a standard error of 2 %, because
that strategy repeats noisy sizes, a probe of the published strategies at 1 %, because they look
at each size once. `--max-probe-s 0.7` makes all probes about equally long.

Measure on a machine with nothing else to do; on 2 cores it takes 6 to 10 minutes. The last line
is one JSON object.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import json
import logging
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.batch_size_common import (
    Finder,
    FinderRun,
    Training,
    add_arguments,
    compare,
    sgd_training,
)
from benchmarks.batch_size_common import strategies as our_strategies
from benchmarks.common import finite, machine, synthetic_images
from raytrain_opt.clock import monotonic_s
from raytrain_opt.config.schema import ModelSection
from raytrain_opt.recording.recorder import versions

CLASSES, IMAGE_SHAPE = 10, (1, 28, 28)
SIZES = [8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
UTILIZATION = {"sampler": "cpu", "period_s": 0.2}


def main() -> None:
    args = _arguments()
    torch.set_num_threads(args.threads)
    training = cpu_training(args)
    finders = our_strategies(training, args.max_loops)
    with tempfile.TemporaryDirectory() as folder:
        finders["lightning_batch_size_finder"] = lightning_finder(
            training, args.max_batch_size, folder
        )
        result = compare(training, finders, args)
    print(json.dumps(finite({**result, **_setting(args)})))


def cpu_training(args: argparse.Namespace) -> Training:
    settings = {
        "max_batch_size": args.max_batch_size,
        "max_probe_s": args.max_probe_s,
        "utilization": UTILIZATION,
    }
    return sgd_training(
        ModelSection(name="resnet8", args={"width": args.width}),
        CLASSES,
        IMAGE_SHAPE,
        _dataset(args),
        torch.device("cpu"),
        settings=settings,
    )


def _dataset(args: argparse.Namespace) -> TensorDataset:
    """Return uint8 images [samples, 1, 28, 28] and labels."""
    if args.data_root is None:
        images, labels = synthetic_images(args.samples, IMAGE_SHAPE, CLASSES)
    else:
        raw = Path(args.data_root, "FashionMNIST", "raw")
        images = _idx(raw / "train-images-idx3-ubyte", 16)[: args.samples * 28 * 28].copy()
        labels = _idx(raw / "train-labels-idx1-ubyte", 8)[: args.samples].copy()
    pixels = torch.from_numpy(images).view(-1, *IMAGE_SHAPE)
    return TensorDataset(pixels, torch.from_numpy(labels).long())


def _idx(path: Path, header_bytes: int) -> Any:
    """Return the bytes of an IDX file after its header, from `path` or `path`.gz."""
    packed = path.with_name(path.name + ".gz")
    data = path.read_bytes() if path.exists() else gzip.decompress(packed.read_bytes())
    return np.frombuffer(data, np.uint8, offset=header_bytes)


def lightning_finder(training: Training, largest: int, folder: str) -> Finder:
    """Return a finder that runs BatchSizeFinder on a copy of the network, as documented."""
    import lightning.pytorch as pl
    from lightning.pytorch.tuner.tuning import Tuner

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)

    class Module(pl.LightningModule):  # type: ignore[misc]  # Lightning is optional
        """The network; Lightning scales its `batch_size`, and `tried` keeps the sizes."""

        def __init__(self, network: nn.Module, dataset: Dataset[Any]) -> None:
            super().__init__()
            self.network, self.dataset = network, dataset
            self.batch_size, self.tried = 2, set[int]()

        def forward(self, x: Tensor) -> Tensor:
            return self.network(x)  # type: ignore[no-any-return]

        def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
            self.tried.add(len(batch[1]))
            return cross_entropy(self(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(
                self.parameters(),
                **{key: group[key] for key in ("lr", "momentum", "weight_decay")},
            )

        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(
                self.dataset, batch_size=self.batch_size, shuffle=True, drop_last=True
            )

    group = training.optimizer.param_groups[0]

    def find() -> FinderRun:
        module = Module(copy.deepcopy(training.model), training.dataset)
        started_s = monotonic_s()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = pl.Trainer(
                accelerator="cpu",
                devices=1,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                default_root_dir=folder,
            )
            size = Tuner(trainer).scale_batch_size(
                module, mode="power", steps_per_trial=3, max_val=largest
            )
        assert size is not None  # it is None for fast_dev_run only
        return FinderRun(size, len(module.tried), monotonic_s() - started_s)

    return find


def _setting(args: argparse.Namespace) -> dict[str, object]:
    from importlib.metadata import version

    settings = {key: value for key, value in vars(args).items() if key != "data_root"}
    return {
        **settings,
        "model": "resnet8",
        "data": "synthetic" if args.data_root is None else "Fashion-MNIST",
        "machine": machine(),
        "versions": {**versions(), "lightning": version("lightning")},
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Batch-size finders against a sweep, on CPU.")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--width", type=int, default=16, help="of ResNet-8's first stage")
    parser.add_argument("--samples", type=int, default=4096, help="training images")
    parser.add_argument("--data-root", help="folder of the real Fashion-MNIST")
    add_arguments(
        parser,
        sizes=SIZES,
        passes=2,
        repeats=3,
        pairs=5,
        max_batch_size=1024,
        max_probe_s=10.0,
        max_loops=30,
        sweep_max_probe_s=1.2,
    )
    args = parser.parse_args()
    if max(*args.sizes, args.max_batch_size) > args.samples:
        parser.error("--samples must be at least --max-batch-size and all of --sizes")
    return args


if __name__ == "__main__":
    main()
