"""Yamada et al. (Kobe University): short-term pre-training (STPT), at the size of CIFAR, on CPU.

    python -m benchmarks.papers.stpt --data-root FOLDER (--quick | --full) [--cache FILE]

The paper trains ResNet-50 on ImageNet for 40 epochs of 2,500 iterations. Here:
jobs/imagenet_resnet50_stpt_mix.yaml with ResNet-8 (width 8) on 3,072 images of the 20 coarse
labels of CIFAR-100 at 16x16 (comparison_tasks.py describes FOLDER), 40 epochs of 96 iterations.
The rest is the job's, but a weight decay of 5e-4: initial rate 0.1, 4 epochs of warm-up at 0.005,
momentum 0.9; a candidate trains on the full global batch and is scored by its accuracy on a
validation split of the training images. Options: as in large_batch.py.

Rows:

alpha_8 .. alpha_100    pre-training of 8, 25, 50 and 100 % of an epoch with the alpha-study set
                        (section 3.2 of the paper, 200 to 2,500 of 2,500 iterations)
narrow, middle, wide    the sets of section 3.3, alpha 8 %
mix                     warm-up, narrow, middle, wide: table 4, boundaries scaled to the epochs
reference               0.1, divided by 10 on plateaus, no warm-up: the product's `shape: plateau`,
                        when the accuracy on the validation split has had no new best value for
                        more than a tenth of the epochs in a row (the paper: when accuracy
                        saturates, no rule given)
cifar_job               Mix at the rate of jobs/cifar100_resnet50_stpt.yaml, 0.0125 for 32 images
local                   Mix with `candidate_batch: local`, as the paper describes it: 8 workers,
                        a candidate trains on the share of one of them
adam, adagrad, lars     Mix with these optimizers, the paper's future work, from their usual rates

`trainings`: samples trained, with every candidate's, divided by those of one training. With 8
candidates and alpha a, an epoch with a search trains on 1 + 7 a epochs; all 8 rates for complete
epochs, which is alpha_100, on 8. The paper's saving of 87.5 % is 1 - 1/8 for any alpha: a round
counted side by side, as long as one candidate, against 8 complete epochs one after another. Both
one after another, it is 1 - (1 + 7 a) / 8, 80.5 % for 8 %; both side by side, nothing.

`--quick`: seed 0, 10 epochs, 2 minutes (nothing can be decided); `--full`: five seeds, an hour.
`--plot FILE` draws the accuracy by epoch (figures 5 and 7).
"""

from __future__ import annotations

import argparse
from statistics import mean
from typing import Any

from benchmarks.comparison_tasks import Task
from benchmarks.comparison_units import Cache
from benchmarks.papers.trainings import Training, run_paper

FILE = "imagenet_resnet50_stpt_mix.yaml"
TASK = Task("cifar100_coarse_16", "cifar100_coarse", 16, 3072, 1024, crop=2)
BATCH, EPOCHS, QUICK_EPOCHS, PAPER_EPOCHS, PAPER_WORKERS = 32, 40, 10, 40, 8
# Table 1: 200 of 2,500 iterations of pre-training, 4 of 40 epochs of warm-up.
ALPHA, WARMUP = 200 / 2500, 4 / 40
# The paper does not define saturated accuracy. A tenth of the epochs: late enough not to mistake
# noise for it, early enough that the complete decay fits into the training.
PATIENCE = 1 / 10
RATE, CIFAR_RATE = 0.1, 0.0125

_SETS = {
    "alpha_8": "alpha_study",
    **{f"alpha_{pct}": "alpha_study" for pct in (25, 50, 100)},
    **{name: name for name in ("narrow", "middle", "wide", "mix")},
}
# The paper names no weight decay; the job's is for ImageNet.
_SGD = "optimizer={name: SGD, args: {momentum: 0.9, weight_decay: 5.0e-4}}"
_USUAL_LRS = {"Adam": 0.001, "Adagrad": 0.01, "LARS": 1.0}
# Percent; of the alphas the highest accuracy of a training (figure 4), else the final one.
PAPER = {
    "alpha_8": "63.9",
    "alpha_25": "62.8",
    "alpha_50": "62.2",
    "alpha_100": "62.8",
    "narrow": "65.0",
    "middle": "63.4",
    "wide": "61.4",
    "mix": "66.2",
    "reference": "61.4",
}


def rows(epochs: int) -> dict[str, tuple[str, ...]]:
    """Return the overrides of each row."""
    warmup = (f"learning_rate.warmup.epochs={round(WARMUP * epochs)}",)
    searches = {
        name: (
            _SGD,
            f"learning_rate.candidates={candidates}",
            f"learning_rate.alpha={_alpha(name)}",
            *warmup,
        )
        for name, candidates in _SETS.items()
    }
    mix = searches["mix"]
    return {
        **searches,
        "reference": _reference(epochs),
        "cifar_job": (*mix, f"learning_rate.initial={CIFAR_RATE}"),
        "local": (*mix, "learning_rate.candidate_batch=local"),
        **{
            name.lower(): (
                *mix,
                f"optimizer={{name: {name}}}",
                f"learning_rate.initial={lr}",
                f"learning_rate.warmup.lr={lr / 20}",
            )
            for name, lr in _USUAL_LRS.items()
        },
    }


def _alpha(row: str) -> float:
    pct = row.removeprefix("alpha_")
    return int(pct) / 100 if row != pct and pct != "8" else ALPHA


def _reference(epochs: int) -> tuple[str, ...]:
    patience = max(1, round(PATIENCE * epochs))
    section = f"{{policy: schedule, shape: plateau, patience: {patience}, initial: {RATE}}}"
    return (_SGD, f"learning_rate={section}")


def training(row: str, epochs: int, seed: int) -> Training:
    """Return a training of the row."""
    workers = PAPER_WORKERS if row == "local" else 1
    overrides = rows(epochs)[row]
    return Training(row, FILE, TASK, BATCH, epochs, seed, overrides, BATCH // workers)


def main() -> None:
    run_paper(__doc__ or "", _plan, _paint, PAPER)


def _plan(args: argparse.Namespace) -> list[Training]:
    epochs = QUICK_EPOCHS if args.quick else EPOCHS
    return [training(row, epochs, seed) for seed in range(args.seeds) for row in rows(epochs)]


def _paint(axes: Any, cache: Cache) -> None:
    """Draw the mean accuracy by epoch."""
    for row in ("reference", "narrow", "middle", "wide", "mix"):
        members = [training(row, EPOCHS, seed) for seed in range(5)]
        curves = [cache[member]["curve"] for member in members if member in cache]
        if curves:
            points = [mean(p["accuracy"] for p in at) for at in zip(*curves, strict=False)]
            axes.plot(range(1, len(points) + 1), [100 * p for p in points], label=row)
    axes.set_xlabel("epoch")
    axes.set_ylabel("test accuracy, %")


if __name__ == "__main__":
    main()
