"""The rows of the paper's experiments, its figures, and which of its claims hold here.

Source: Yamada et al. (Kobe University), adaptive learning rate by short-term pre-training in
data-parallel deep learning: table 1 (setting), tables 2 to 4 (sets), section 3 (accuracies).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from benchmarks.comparison_rows import (
    STPT_ALPHA,
    STPT_WARMUP_FRACTION,
    Row,
    outcome,
    over_seeds,
    published_stpt,
    target_of,
)
from benchmarks.comparison_units import Result, Setting, Unit

# The paper does not define saturated accuracy. A tenth of the epochs: late enough not to mistake
# noise for it, early enough that the complete decay fits into the training.
PATIENCE = 1 / 10  # of the epochs

REFERENCE = "reference"
PAPER_WORKERS = 8
# VGG16's job has the same rates.
CIFAR_FILE = "cifar100_resnet50_stpt.yaml"
# Its candidates all train complete epochs: the savings are measured against it.
ALL_RATES = "alpha_100"

# Percent. For the alphas (figure 4) the highest accuracy of a training, else the final one.
PAPER = {
    "alpha_8": 63.9,
    "alpha_25": 62.8,
    "alpha_50": 62.2,
    "alpha_100": 62.8,
    "narrow": 65.0,
    "middle": 63.4,
    "wide": 61.4,
    "mix": 66.2,
    REFERENCE: 61.4,
    # Not in the paper.
    "reference_loss": math.nan,
    "cifar_job": math.nan,
    "local": math.nan,
    "adam": math.nan,
    "adagrad": math.nan,
    "lars": math.nan,
}
PAPER_SAVING = 87.5
ALPHAS = ("alpha_8", "alpha_25", "alpha_50", "alpha_100")

Rows = Mapping[str, Mapping[str, Any]]


def paper_rows() -> dict[str, Row]:
    """Return all rows by name."""
    return {
        "alpha_8": _searched("alpha 8 %", "alpha_study"),
        "alpha_25": _searched("alpha 25 %", "alpha_study", 0.25),
        "alpha_50": _searched("alpha 50 %", "alpha_study", 0.5),
        "alpha_100": _searched("alpha 100 %", "alpha_study", 1.0),
        "narrow": _searched("narrow", "narrow"),
        "middle": _searched("middle", "middle"),
        "wide": _searched("wide", "wide"),
        "mix": _searched("Mix", "mix"),
        REFERENCE: Row("reference", lambda s: [_reference(s, "val_metric")]),
        "reference_loss": Row("reference by loss", lambda s: [_reference(s, "train_loss")]),
        "cifar_job": Row("Mix, the CIFAR jobs", lambda s: [_cifar_job(s)]),
        "local": Row("Mix, candidates on one worker's share", lambda s: [_local(s)]),
        "adam": _with_optimizer("Adam", 0.001),
        "adagrad": _with_optimizer("Adagrad", 0.01),
        "lars": _with_optimizer("LARS", 1.0),
    }


def _searched(title: str, candidates: str, alpha: float = STPT_ALPHA) -> Row:
    overrides = (f"learning_rate.candidates={candidates}", f"learning_rate.alpha={alpha}")

    def units(setting: Setting) -> list[Unit]:
        return [Unit(title, setting, published_stpt(setting, *overrides))]

    return Row(title, units)


def _local(setting: Setting) -> Unit:
    section = published_stpt(setting, "learning_rate.candidate_batch=local")
    return Unit("local", setting, section, {"workers": PAPER_WORKERS})


def _with_optimizer(name: str, lr: float) -> Row:
    overrides = (f"learning_rate.initial={lr}", f"learning_rate.warmup.lr={lr / 20}")

    def units(setting: Setting) -> list[Unit]:
        section = published_stpt(setting, *overrides)
        return [Unit(name, setting, section, optimizer=name)]

    return Row(f"Mix with {name}", units)


def _cifar_job(setting: Setting) -> Unit:
    # Its rate is for 32 images.
    rate = published_stpt(setting, file=CIFAR_FILE)["initial"] * setting.task.batch / 32
    section = published_stpt(setting, f"learning_rate.initial={rate}", file=CIFAR_FILE)
    return Unit("cifar_job", setting, section)


def _reference(setting: Setting, plateau_on: str) -> Unit:
    patience = max(1, round(PATIENCE * setting.epochs))
    rate = published_stpt(setting)["initial"]
    plateau = f"shape: plateau, plateau_on: {plateau_on}, patience: {patience}, initial: {rate}"
    section = published_stpt(setting, f"learning_rate={{policy: schedule, {plateau}}}")
    return Unit(f"reference by {plateau_on}", setting, section)


def _warmup_epochs(setting: Setting) -> int:
    return round(STPT_WARMUP_FRACTION * setting.epochs)


def _samples_of_one(setting: Setting) -> int:
    """Return the samples of one training: all rows hold out the validation split."""
    task = setting.task
    return setting.epochs * (task.train // task.batch) * task.batch


@dataclass(frozen=True)
class Counted:
    """Samples of one training, counted in iterations of the global batch.

    `warmup`: in epochs without candidates. `main`: the others that the weights went through.
    `lost`: by candidates that lost. `repeated`: by one candidate, in rounds in which all
    candidates diverged. `searches`: number of epochs with a winner.
    """

    warmup: int
    main: int
    lost: int
    repeated: int
    searches: int

    @property
    def in_turn(self) -> int:
        """Iterations after the warm-up, one after another."""
        return self.main + self.lost

    @property
    def side_by_side(self) -> int:
        """Iterations with a worker for each candidate: a round is as long as one of them."""
        return self.main + self.repeated


def counted(result: Result, setting: Setting) -> Counted:
    """Count the iterations of one training."""
    batch, rounds = setting.task.batch, [n for n in result["notes"] if "winner" in n]
    trained = (result["samples"] - result["search_samples"]) // batch
    warmup = _warmup_epochs(setting) * (setting.task.train // batch) if rounds else 0
    return Counted(
        warmup,
        trained - warmup,
        result["search_samples"] // batch,
        sum(note["steps"] for note in rounds if note["winner"] is None),
        sum(note["winner"] is not None for note in rounds),
    )


def row_of(
    row: Row, results: Sequence[Result], references: Sequence[Result], settings: Sequence[Setting]
) -> dict[str, Any]:
    """Return a row of one task over its seeds: the comparison's columns and the paper's."""
    outcomes = [
        outcome(row, [result], target_of(reference), _samples_of_one(setting))
        for result, reference, setting in zip(results, references, settings, strict=True)
    ]
    iterations = [counted(r, s) for r, s in zip(results, settings, strict=True)]
    highest = [100 * max([r["accuracy"], *_curve_accuracies(r)]) for r in results]
    return {
        **over_seeds(outcomes),
        "highest_mean": round(mean(highest), 3),
        "highest": [round(h, 3) for h in highest],
        "last_lrs": [_last_lr(result) for result in results],
        "curve": _mean_curve(results),
        "search_fraction": round(mean(c.lost / max(c.warmup + c.main, 1) for c in iterations), 4),
        "iterations": round(mean(c.warmup + c.in_turn for c in iterations), 1),
        "iterations_side_by_side": round(mean(c.warmup + c.side_by_side for c in iterations), 1),
    }


def _curve_accuracies(result: Result) -> list[float]:
    return [] if result["diverged"] else [point["accuracy"] for point in result["curve"]]


def _mean_curve(results: Sequence[Result]) -> list[float]:
    """Return the mean accuracy, in percent, after each epoch."""
    curves = [_curve_accuracies(result) for result in results]
    return [round(100 * mean(values), 2) for values in zip(*curves, strict=False)]


def _last_lr(result: Result) -> float:
    return float(result["last_lr"])


# Claims.


@dataclass(frozen=True)
class Claim:
    """The paper has `better` above `other`, or equal, in the row's list named `measure`."""

    better: str
    other: str
    measure: str = "accuracies"


CLAIMS = (
    *(Claim("alpha_8", other, "highest") for other in ALPHAS[1:]),
    Claim("narrow", "middle"),
    Claim("middle", "wide"),
    Claim("mix", "narrow"),
    Claim("mix", REFERENCE),
    Claim("narrow", REFERENCE),
    Claim("middle", REFERENCE),
    Claim("wide", REFERENCE),
)


def order_claims(rows: Rows) -> dict[str, dict[str, Any]]:
    """Return the claims whose rows exist, with the differences in the paper and here.

    `spread_points`: highest minus lowest over the seeds, the larger of the two rows'; unknown
    with one seed.
    """
    return {
        f"{claim.better} - {claim.other}": _compared(claim, rows)
        for claim in CLAIMS
        if claim.better in rows and claim.other in rows
    }


def _compared(claim: Claim, rows: Rows) -> dict[str, Any]:
    ours, others = (rows[name][claim.measure] for name in (claim.better, claim.other))
    differences = [a - b for a, b in zip(ours, others, strict=True)]
    paper = PAPER[claim.better] - PAPER[claim.other]
    return _verdict(differences, round(paper, 1), _spread(ours, others))


def _verdict(differences: Sequence[float], paper: float, spread: float | None) -> dict[str, Any]:
    points = mean(differences)
    beyond = None if spread is None else abs(points) > spread
    return {
        "paper_points": paper,
        "points": round(points, 3),
        "differences": [round(difference, 3) for difference in differences],
        "spread_points": None if spread is None else round(spread, 3),
        "beyond_spread": beyond,
        "agrees": _agrees(points, paper, beyond),
    }


def _agrees(points: float, paper: float, beyond: bool | None) -> str:
    """Return "yes", "no" or "undecided": a difference within the spread decides nothing.

    Unless the paper has no difference: then one within the spread agrees.
    """
    if beyond is None:
        return "undecided"
    if paper == 0:
        return "no" if beyond else "yes"
    if not beyond:
        return "undecided"
    return "yes" if points * paper > 0 else "no"


def _spread(*rows: Sequence[float]) -> float | None:
    return max(max(row) - min(row) for row in rows) if len(rows[0]) > 1 else None


def alpha_claim(rows: Rows) -> dict[str, Any]:
    """Compare the claim that alpha matters little: highest minus lowest over the alphas."""
    highest = [rows[name]["highest"] for name in ALPHAS]
    means = [mean(row) for row in highest]
    points, spread = round(max(means) - min(means), 3), _spread(*highest)
    figures = [PAPER[name] for name in ALPHAS]
    paper = round(max(figures) - min(figures), 1)
    beyond = None if spread is None else points > spread
    # "Little" is at most the paper's own range, or within the spread of the seeds.
    small = points <= paper or not beyond
    return {
        "paper_points": paper,
        "points": points,
        "differences": [round(max(s) - min(s), 3) for s in zip(*highest, strict=True)],
        "spread_points": None if spread is None else round(spread, 3),
        "beyond_spread": beyond,
        "agrees": "undecided" if beyond is None else "yes" if small else "no",
    }


# Ways to count the iterations saved against training every rate for a complete epoch: the row's
# count, and that of `ALL_RATES`.
WAYS: dict[str, tuple[Callable[[Counted], int], Callable[[Counted], int]]] = {
    "as_published": (lambda c: c.side_by_side, lambda c: c.in_turn),
    "in_turn": (lambda c: c.in_turn, lambda c: c.in_turn),
    "side_by_side": (lambda c: c.side_by_side, lambda c: c.side_by_side),
}


def saving_claims(
    searched: Sequence[Counted], all_rates: Sequence[Counted]
) -> dict[str, dict[str, Any]]:
    """Return percent saved per epoch with a search, over the seeds, for each way of counting."""
    savings = {}
    for way, (count_row, count_all) in WAYS.items():
        pairs = zip(searched, all_rates, strict=True)
        saved = [
            100 * (1 - count_row(row) / row.searches / (count_all(full) / full.searches))
            for row, full in pairs
            if row.searches and full.searches
        ]
        if saved:
            savings[way] = _saving(saved)
    return savings


def _saving(saved: Sequence[float]) -> dict[str, Any]:
    pct, spread = mean(saved), _spread(saved)
    return {
        "paper_pct": PAPER_SAVING,
        "pct": round(pct, 3),
        "of_seeds": [round(value, 3) for value in saved],
        "spread": None if spread is None else round(spread, 3),
        "beyond_spread": None if spread is None else abs(pct - PAPER_SAVING) > spread,
        # The paper's figure has one decimal.
        "agrees": "yes" if round(pct, 1) == PAPER_SAVING else "no",
    }
