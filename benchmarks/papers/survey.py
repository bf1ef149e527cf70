"""Okanohara (survey of 2018): what large batches need, at the size of CIFAR, on CPU.

    python -m benchmarks.papers.survey --data-root FOLDER (--quick | --full) [--cache FILE]

Claims, in the setting of large_batch.py (which also describes the options), by its rows:

n times the batch and the rate      `sgd` and `warmup` at batches of 32 to 4,096: the rate grows
give the same curve                 linearly, without and with a warm-up (Goyal et al.), but in
                                    `unscaled`. `--plot FILE` draws the loss on test images
more noise generalizes better       `equal_fixed` and `equal_scaled` at batches of 32 to 1,024:
                                    384 updates each on 2,048 images, so 6 to 192 epochs, without
                                    warm-up, steps at 1/3, 2/3 and 8/9 of them, at 0.1 and at the
                                    scaled rate (Smith and Le): the difference of the accuracies
                                    on training and on test images, and lr N / B
RMSprop first, momentum SGD later   `rmsprop` against `warmup` at 1,024 (Akiba et al.)
a perceptron of 3 layers and 100    `perceptron`: 20 passes over 50,000 images of Fashion-MNIST,
units trains in 3 minutes on a CPU  which are as large as MNIST's, on one core: see `seconds`

`--quick`: seed 0, curves of 32 and 512, equal steps of 32 and 128; `--full`: three seeds.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

from benchmarks.comparison_tasks import Task
from benchmarks.comparison_units import Cache
from benchmarks.papers.large_batch import BATCHES, FILE, TASK, UNSCALED, sgd, training, trainings
from benchmarks.papers.trainings import Training, run_paper

CURVES, CURVE_BATCHES = ("sgd", "warmup", "unscaled"), (32, 128, 512, 1024)
EQUAL_STEPS, EQUAL_TASK, EQUAL_BATCHES = 384, replace(TASK, train=2048), (32, 128, 512, 1024)
PAPER = {
    "sgd": "almost the same curve",
    "warmup": "almost the same curve",
    "equal_fixed": "generalizes worse with a larger batch",
    "equal_scaled": "generalizes as before",
    "rmsprop": "keeps its accuracy up to 32,768",
    "perceptron": "3 min on a CPU, 1 min on a P100",
}


def main() -> None:
    run_paper(__doc__ or "", plan, _paint, PAPER)


def plan(args: argparse.Namespace) -> list[Training]:
    """Return the trainings of `--quick` or `--full`."""
    equal = equal_steps(EQUAL_BATCHES[:2] if args.quick else EQUAL_BATCHES, args.seeds)
    single = trainings(("rmsprop", "warmup"), (1024,), args.seeds)
    curves = trainings(CURVES, CURVE_BATCHES[::2] if args.quick else BATCHES, args.seeds)
    return curves + single + equal + [perceptron(seed) for seed in range(args.seeds)]


def perceptron(seed: int) -> Training:
    """Return the training of the survey's example, with Adam as in Chainer's."""
    network = "benchmarks.comparison_networks:mlp"
    task = Task("mnist", "fashion_mnist", 28, 50_000, 0, network=network, width=100)
    overrides = (
        "optimizer={name: Adam}",
        "learning_rate={policy: schedule, shape: constant, initial: 0.001}",
        "loss.label_smoothing=0",
    )
    return Training("perceptron", FILE, task, 100, 20, seed, overrides)


def equal_steps(batches: Sequence[int], seeds: int) -> list[Training]:
    """Return trainings of the same number of updates at each batch."""
    planned = []
    for seed in range(seeds):
        for batch in batches:
            epochs = EQUAL_STEPS * batch // EQUAL_TASK.train
            scaled = sgd(epochs)
            for row, overrides in (("fixed", (*scaled, UNSCALED)), ("scaled", scaled)):
                name = f"equal_{row}"
                planned.append(Training(name, FILE, EQUAL_TASK, batch, epochs, seed, overrides))
    return planned


def _paint(axes: Any, cache: Cache) -> None:
    """Draw the mean test loss by epoch; the scaled rate with a warm-up, and the fixed one."""
    for row, style in (("warmup", "-"), ("unscaled", ":")):
        for number, batch in enumerate(CURVE_BATCHES):
            members = [training(row, batch, seed) for seed in range(3)]
            curves = [cache[member]["curve"] for member in members if member in cache]
            if curves:
                losses = [
                    mean(point["loss"] for point in points)
                    for points in zip(*curves, strict=False)
                ]
                label = f"{batch:,}" if row == "warmup" else None
                axes.plot(
                    range(1, len(losses) + 1), losses, style, color=f"C{number}", label=label
                )
    axes.set_xlabel("epoch")
    axes.set_ylabel("test loss")


if __name__ == "__main__":
    main()
