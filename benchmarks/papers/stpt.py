"""The experiments of the STPT paper at small scale, on CPU.

    python -m benchmarks.papers.stpt --data-root FOLDER (--quick | --full) [--cache FILE]
        [--tasks T ...] [--rows R ...] [--seeds 5] [--first-seed 0] [--epochs 40] [--scale 1]
        [--plot FILE]

Yamada et al. train ResNet-50 on ImageNet for 40 epochs of 2,500 iterations. Here: ResNet-8 on the
tasks of comparison_tasks.py (which also describes FOLDER), by default the 20 coarse labels of
CIFAR-100 at 16 x 16, with a batch size that gives 40 short epochs several iterations each. The
rest is the paper's, from jobs/imagenet_resnet50_stpt_mix.yaml: policy stpt, scored by accuracy;
initial rate 0.1, 4 of 40 epochs of warm-up at 0.005, momentum 0.9 (and weight decay 5e-4, which
the paper does not mention); a candidate trains on the full global batch. Candidates are scored on
a validation split of the training images; accuracies are those on the test split. A seed sets
weights, order, augmentation and the split of the training images.

Rows (stpt_rows.py):

alpha_8 .. alpha_100    pre-training of 8, 25, 50 and 100 % of an epoch with the alpha-study set
                        (section 3.2 of the paper, 200 to 2,500 of 2,500 iterations)
narrow, middle, wide    the sets of section 3.3, alpha 8 %
mix                     warm-up, narrow, middle, wide: table 4, boundaries scaled to the epochs
reference               0.1, divided by 10 on plateaus, no warm-up: the product's `shape: plateau`,
                        when the accuracy on the validation split has had no new best value for
                        more than a tenth of the epochs in a row (the paper: when accuracy
                        saturates, no rule given); `reference_loss`: no new lowest training loss
cifar_job               Mix at the rate of jobs/cifar100_resnet50_stpt.yaml, 0.0125 for 32 images
local                   Mix with `candidate_batch: local`, as the paper describes it: 8 workers,
                        a candidate trains on the share of one of them
adam, adagrad, lars     Mix with these optimizers, the paper's future work, from their usual rates

Columns, over the seeds: `accuracy_*`, in percent, after the last epoch on the complete test split.
`highest_*`: the highest of the training, which the paper shows for the alphas: of the final one
and those after each later epoch on a part of about 2,500 test images, which favors lucky ones a
little, in all rows alike. `paper`: its figure. `trainings`: samples trained, with
every candidate's, divided by those of one training. `search_fraction`: samples of the candidates
that lost, divided by those that the weights went through. `iterations`: of the global batch, all
candidates one after another, and `iterations_side_by_side`, a round counted as one of its
candidates. `reach_*`: until it is as good as the reference at its end, as in time_to_accuracy.
`last_lrs`: the rates after the last round. `wall_seconds`: as there.

`claims` compares each of the paper's claims about two rows: the difference in its figures, and
the one here, by seed and in the mean; `spread_points`, highest minus lowest over the seeds, the
larger of the two rows'; whether the difference here exceeds it; and so whether the two agree:
yes, no, or undecided if it does not. Alphas are compared by their highest accuracy, the rest by
the final one.

`savings` are percent of the iterations of an epoch with a search, from the samples counted, versus
training all 8 rates for complete epochs, which is what alpha_100 does. The paper states 87.5 % for
8 candidates on 8 workers. That is 1 - 1/8: a round counted side by side, as long as one candidate,
against 8 complete epochs counted one after another (`as_published`). It has this value for any
alpha, even for alpha_100 itself. Comparing like with like, one after another, which is also in
samples or in worker time: 1 - (1 + 7 alpha) / 8, 80.5 % for 8 % (`in_turn`). Both side by side:
nothing (`side_by_side`), since an epoch with a search then has as many iterations as one without;
but those of its round take longer wherever a candidate computes the global batch alone.

`--cache FILE`, `--merge FILE ...` and processes: as in time_to_accuracy. On 2 quiet cores
everything (five seeds) takes about an hour, `--quick` (1 seed, fewer and shorter epochs: nothing
can be decided) less than 3 minutes. `--plot FILE` draws the accuracy by epoch (figures 5 and 7).
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common import machine
from benchmarks.comparison_command import (
    command,
    compute_missing,
    parse,
    prepare_settings,
    run_comparison,
    setting_record,
)
from benchmarks.comparison_tasks import TASKS
from benchmarks.comparison_units import Cache, Setting
from benchmarks.papers.stpt_rows import (
    ALL_RATES,
    ALPHAS,
    PAPER,
    PAPER_SAVING,
    REFERENCE,
    alpha_claim,
    counted,
    order_claims,
    paper_rows,
    row_of,
    saving_claims,
)
from benchmarks.papers.trainings import write_plot
from raytrain_opt.clock import monotonic_s
from raytrain_opt.recording.recorder import versions

# So that 8 % of an epoch are several iterations.
PAPER_TASKS = {task.name: replace(task, batch=min(task.batch, 64)) for task in TASKS.values()}
FULL = {"tasks": ["cifar100_coarse_16"], "seeds": 5, "epochs": 40, "scale": 1.0}
QUICK = {"tasks": ["cifar100_coarse_16"], "seeds": 1, "epochs": 10, "scale": 0.5}


def main() -> None:
    args = _arguments()
    result = run_comparison(args, repeat, print_tables)
    write_plot(args.plot, lambda axes: _paint(axes, result["tasks"][args.tasks[0].name]["rows"]))


def repeat(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Compute what is not in the cache and compare it with the paper's figures."""
    started_s = monotonic_s()
    names = list(dict.fromkeys((*args.rows, REFERENCE)))
    settings = prepare_settings(args, folder)
    cache = Cache(args.merge, args.cache)
    rows = paper_rows()
    units = [unit for s in settings for name in names for unit in rows[name].units(s)]
    compute_missing(cache, units, args.processes)
    tasks = {
        task.name: task_of([s for s in settings if s.task.name == task.name], names, cache)
        for task in args.tasks
    }
    return {
        "tasks": tasks,
        "seconds": round(monotonic_s() - started_s, 1),
        "setting": setting_record(args, settings),
        "machine": machine(),
        "versions": versions(),
    }


def task_of(settings: Sequence[Setting], names: Sequence[str], cache: Cache) -> dict[str, Any]:
    """Return the rows of one task, which claims hold in it, and the savings."""
    rows = paper_rows()
    results = {name: [cache[rows[name].units(s)[0]] for s in settings] for name in names}
    table = {
        name: {
            "paper": PAPER[name],
            **row_of(rows[name], results[name], results[REFERENCE], settings),
        }
        for name in names
    }
    claims = order_claims(table)
    if all(name in table for name in ALPHAS):
        claims["range of the alphas"] = alpha_claim(table)
    counts = {
        name: [counted(result, s) for result, s in zip(results[name], settings, strict=True)]
        for name in names
    }
    savings = {
        name: saving_claims(counts[name], counts[ALL_RATES])
        for name in names
        if name != REFERENCE and ALL_RATES in names
    }
    return {"rows": table, "claims": claims, "savings": savings}


def print_tables(tasks: Mapping[str, Mapping[str, Any]]) -> None:
    """Print rows, claims and savings as tables for people."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 120)

    def show(title: str, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
        table = Table(title=title)
        for number, column in enumerate(columns):
            table.add_column(column, justify="right" if number else "left")
        for line in lines:
            table.add_row(*line)
        console.print(table)

    titles = {name: row.title for name, row in paper_rows().items()}
    for task, result in tasks.items():
        lines = [[titles[name], *_cells(row)] for name, row in result["rows"].items()]
        show(task, _COLUMNS, lines)
        claims = [[name, *_claim_cells(claim)] for name, claim in result["claims"].items()]
        show(f"{task}: the paper's claims", _CLAIM_COLUMNS, claims)
        savings = [
            [titles[name], *(f"{way['pct']:.1f} ({way['agrees']})" for way in ways.values())]
            for name, ways in result["savings"].items()
        ]
        show(f"{task}: iterations saved, %; the paper: {PAPER_SAVING}", _SAVING_COLUMNS, savings)


_COLUMNS = (
    "",
    "paper",
    "accuracy",
    "min .. max",
    "highest",
    "trainings",
    "search",
    "iterations",
    "last rates",
    "s",
)
_CLAIM_COLUMNS = ("points", "paper", "here", "by seed", "spread", "agrees")
_SAVING_COLUMNS = ("", "as published", "one after another", "side by side")


def _cells(row: Mapping[str, Any]) -> list[str]:
    return [
        f"{row['paper']:.1f}",
        f"{row['accuracy_mean']:.2f}",
        f"{row['accuracy_min']:.2f} .. {row['accuracy_max']:.2f}",
        f"{row['highest_mean']:.2f}",
        f"{row['trainings']:.2f}",
        f"{100 * row['search_fraction']:.0f} %",
        f"{row['iterations']:.0f}",
        " ".join(f"{lr:.0e}" for lr in row["last_lrs"]),
        f"{row['wall_seconds']:.0f}",
    ]


def _claim_cells(claim: Mapping[str, Any]) -> list[str]:
    spread = claim["spread_points"]
    return [
        f"{claim['paper_points']:+.1f}",
        f"{claim['points']:+.2f}",
        " ".join(f"{value:+.2f}" for value in claim["differences"]),
        "-" if spread is None else f"{spread:.2f}",
        claim["agrees"],
    ]


def _paint(axes: Any, rows: Mapping[str, Mapping[str, Any]]) -> None:
    for name in (REFERENCE, "narrow", "middle", "wide", "mix"):
        if name in rows:
            curve = rows[name]["curve"]
            axes.plot(range(1, len(curve) + 1), curve, label=name)
    axes.set_xlabel("epoch")
    axes.set_ylabel("test accuracy, %")


def _arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    about = "The paper's experiments at small scale."
    parser = command(about, PAPER_TASKS, list(paper_rows()), size_required=True)
    parser.add_argument("--plot", type=Path, help="write a figure, a PNG file")
    return parse(parser, argv, PAPER_TASKS, FULL, QUICK)


if __name__ == "__main__":
    main()
