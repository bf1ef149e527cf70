"""Okanohara (survey of 2018): what large batches need, at the size of CIFAR, on CPU.

    python -m benchmarks.papers.survey --data-root FOLDER (--quick | --full) [--cache FILE]

Claims, in the setting of large_batch.py (which also describes the options), by its rows:

n times the batch and the rate      `sgd` and `warmup` at batches of 128, 1,024 and 4,096: the rate
give the same training              is scaled linearly, with and without a warm-up (Goyal et al.)
more noise generalizes better       `unscaled` and `sgd` at 1,024: equal steps and batch, 16 times
                                    the rate and so the noise scale (Smith and Le)
RMSprop first, momentum SGD later   `rmsprop` against `warmup` (Akiba et al.)
a schedule of the momentum          `rising`: `warmup` with a momentum that rises from 0.5 to 0.9
                                    in the first 2 epochs; the survey gives no rule, this is ours

`--quick`: seed 0, batches of 128 and 1,024; `--full`: three seeds and all batches.
"""

from __future__ import annotations

import argparse

from benchmarks.papers.large_batch import LADDER_BATCH, trainings
from benchmarks.papers.trainings import Training, run_paper


def main() -> None:
    run_paper(__doc__ or "", _plan)


def _plan(args: argparse.Namespace) -> list[Training]:
    batches = (128, LADDER_BATCH) if args.quick else (128, LADDER_BATCH, 4096)
    planned = trainings(("sgd", "warmup"), batches, args.seeds)
    return planned + trainings(("unscaled", "rmsprop", "rising"), (LADDER_BATCH,), args.seeds)


if __name__ == "__main__":
    main()
