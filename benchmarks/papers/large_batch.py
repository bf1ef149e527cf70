"""Honda et al. (Fujitsu): ResNet-50 with a batch of 81,920, at the size of CIFAR, on CPU.

    python -m benchmarks.papers.large_batch --data-root FOLDER (--quick | --full) [--cache FILE]

jobs/imagenet_resnet50_81920.yaml with ResNet-8 (width 8) on 8,192 images of the 20 coarse labels
of CIFAR-100 at 16x16 (comparison_tasks.py describes FOLDER), 12 epochs. Warm-up, decay and the
middle of the arc-cotangent are the paper's fractions of 90 epochs; rates follow the job's rules,
were not tuned here. A worker has at most 128 images, which is what BatchNorm sees (the paper: 40).

Rows, each the one above and one ingredient more until `arc_cotangent`:

sgd               momentum SGD, steps at 1/3, 2/3 and 8/9 of the epochs, rate 0.1 for a batch of 64
                  scaled linearly; `unscaled`: 0.1 for all batches
warmup            and a warm-up of 2 epochs
lars              LARS at the job's rate, 29 for 32,768 images scaled by the square root, instead
smoothing         and label smoothing 0.1
arc_cotangent     and the paper's decay instead of steps: the job as it is
batch_norm        and a momentum of BatchNorm's averages of 0.02 instead of 0.1
recalibrated      or BatchNorm's statistics from 64 batches before the evaluation
linear            or a linear decay instead
growing           the job with a batch that doubles after 1/3 and 2/3 of the epochs, up to this one
muon              Muon at 0.1 for any batch, linear decay, warm-up; with and without smoothing
rmsprop           see survey.py

Accuracies in percent on the 10,000 test images after the last epoch, mean, lowest and highest over
the seeds; how much higher those on the training images are. The paper reports one training of each
batch, above 74.9 % up to 81,920, and no row without an ingredient. `--quick`: seed 0 at batch
1,024, minutes; `--full`: three seeds, batches of 32 to 4,096, `growing` from 128 on, two hours.
`--cache FILE` keeps every training; `--cached` trains nothing and shows what FILE has. The last
line is one JSON object; `--plot FILE` writes a figure.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

from benchmarks.comparison_tasks import Task
from benchmarks.comparison_units import Cache
from benchmarks.papers.trainings import Training, accuracies, paint_lines, run_paper

FILE = "imagenet_resnet50_81920.yaml"
TASK = Task("cifar100_coarse_16", "cifar100_coarse", 16, 8192, 0, crop=2)
EPOCHS, PAPER_EPOCHS, PAPER_WARMUP, PAPER_HALF = 12, 90, 15, 70
BATCHES, QUICK_BATCH = (32, 128, 512, 1024, 4096), 1024

_WARMUP = round(PAPER_WARMUP / PAPER_EPOCHS * EPOCHS)


def _steps_at(epochs: int) -> list[int]:
    return [round(part * epochs) for part in (1 / 3, 2 / 3, 8 / 9)]


_UNSMOOTHED = ("loss.label_smoothing=0",)


def sgd(epochs: int) -> tuple[str, ...]:
    """Return the overrides of momentum SGD with steps at 1/3, 2/3 and 8/9 of the epochs."""
    return (
        "optimizer={name: SGD, args: {momentum: 0.9, weight_decay: 5.0e-4}}",
        "learning_rate={policy: schedule, shape: multistep, initial: 0.1, "
        f"scaling: {{reference_batch_size: 64}}, milestones: {_steps_at(epochs)}}}",
        *_UNSMOOTHED,
    )


UNSCALED = "learning_rate.scaling=null"
_SGD = sgd(EPOCHS)
_WARM = (f"learning_rate.warmup={{epochs: {_WARMUP}}}",)
_LARS_STEPS = (
    "learning_rate={policy: schedule, shape: multistep, initial: 29.0, "
    "scaling: {reference_batch_size: 32768, rule: sqrt}, "
    f"milestones: {_steps_at(EPOCHS)}, warmup: {{epochs: {_WARMUP}}}}}",
)
# The job's own decay, with the paper's epochs scaled to this length.
_DECAY = (
    f"learning_rate.warmup.epochs={_WARMUP}",
    f"learning_rate.half_epoch={PAPER_HALF / PAPER_EPOCHS * EPOCHS:.4g}",
    f"learning_rate.steepness={0.5 * PAPER_EPOCHS / EPOCHS:.4g}",
)
_LINEAR = (
    "learning_rate.shape=linear",
    f"learning_rate.warmup.epochs={_WARMUP}",
    "learning_rate.half_epoch=null",
    "learning_rate.steepness=0.2",
)
_MUON = (
    "optimizer={name: Muon}",
    "learning_rate={policy: schedule, shape: linear, initial: 0.1, "
    f"warmup: {{epochs: {_WARMUP}}}}}",
)
_RMSPROP = (
    "optimizer={name: RMSpropWarmup, args: {momentum: 0.9, weight_decay: 5.0e-4, "
    # Akiba et al.: center after 10 of 90 epochs, period 5; 3e-4 / the usual rate of 256 images.
    f"center_epochs: {10 / 90 * EPOCHS:.4g}, period_epochs: {5 / 90 * EPOCHS:.4g}, "
    "rmsprop_scale: 0.0012}}"
)
_GROWTH = (
    f"batch_ramp=[{{epoch: {EPOCHS // 3 + 1}, factor: 2}}, "
    f"{{epoch: {2 * EPOCHS // 3 + 1}, factor: 4}}]"
)

ROWS: dict[str, tuple[str, ...]] = {
    "unscaled": (*_SGD, UNSCALED),
    "sgd": _SGD,
    "warmup": (*_SGD, *_WARM),
    "lars": (*_LARS_STEPS, *_UNSMOOTHED),
    "smoothing": _LARS_STEPS,
    "arc_cotangent": _DECAY,
    "batch_norm": (*_DECAY, "batch_norm.momentum=0.02"),
    "recalibrated": (*_DECAY, "batch_norm.recalibrate_batches=64"),
    "linear": _LINEAR,
    "growing": (*_DECAY, _GROWTH),
    "muon": (*_MUON, *_UNSMOOTHED),
    "muon_smoothing": _MUON,
    "rmsprop": (*_SGD, _RMSPROP),
}
LADDER = tuple(name for name in ROWS if name != "rmsprop")
BY_BATCH = ("unscaled", "sgd", "warmup", "smoothing", "arc_cotangent", "linear", "muon")
PAPER = {"arc_cotangent": "74.9 or more up to 81,920"}


def training(row: str, batch: int, seed: int) -> Training:
    """Return a training of the row; `growing` ends at `batch`."""
    first = batch // 4 if row == "growing" else batch
    return Training(row, FILE, TASK, first, EPOCHS, seed, ROWS[row])


def trainings(rows: Iterable[str], batches: Sequence[int], seeds: int) -> list[Training]:
    """Return the trainings of all rows, batches and seeds; seed 0 first."""
    return [training(r, b, s) for s in range(seeds) for b in batches for r in rows]


def main() -> None:
    run_paper(__doc__ or "", _plan, _paint, PAPER)


def _plan(args: argparse.Namespace) -> list[Training]:
    if args.quick:
        return trainings(LADDER, (QUICK_BATCH,), args.seeds)
    planned = trainings(LADDER, BATCHES, args.seeds)
    return [t for t in planned if t.batch >= BATCHES[0]]  # not `growing` from 8 to 32


def _paint(axes: object, cache: Cache) -> None:
    curves = {
        row: {
            batch: accuracies([training(row, batch, seed) for seed in range(3)], cache)
            for batch in BATCHES
        }
        for row in BY_BATCH
    }
    paint_lines(axes, curves, "samples per update", "test accuracy, %")


if __name__ == "__main__":
    main()
