"""The rows of the paper's experiments, its figures, and which of its claims hold here.

Source: Yamada et al. (Kobe University), adaptive learning rate by short-term pre-training in
data-parallel deep learning: table 1 (setting), tables 2 to 4 (sets), section 3 (accuracies).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from comparison_rows import Row, outcome, over_seeds, target_of
from comparison_units import Result, Setting, Unit

INITIAL_LR = 0.1
WARMUP_LR = 0.005
WARMUP = 4 / 40  # of the epochs
ALPHA = 200 / 2500  # of an epoch
# The paper does not say when accuracy is saturated. A tenth of the epochs: late enough not to
# take noise for it, early enough that all of the decay fits into the training.
PATIENCE = 1 / 10

REFERENCE = "reference"
# Its candidates all train whole epochs: what the saving is measured against.
EVERY_LR = "alpha_100"

# Percent. Of the alphas (figure 4) the highest accuracy of a training, else the final one.
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
}
PAPER_SAVING = 87.5
ALPHAS = ("alpha_8", "alpha_25", "alpha_50", "alpha_100")

Rows = Mapping[str, Mapping[str, Any]]


def paper_rows() -> dict[str, Row]:
    """All rows by name."""
    return {
        "alpha_8": _searched("alpha 8 %", "alpha_study", ALPHA),
        "alpha_25": _searched("alpha 25 %", "alpha_study", 0.25),
        "alpha_50": _searched("alpha 50 %", "alpha_study", 0.5),
        "alpha_100": _searched("alpha 100 %", "alpha_study", 1.0),
        "narrow": _searched("narrow", "narrow", ALPHA),
        "middle": _searched("middle", "middle", ALPHA),
        "wide": _searched("wide", "wide", ALPHA),
        "mix": _searched("Mix", "mix", ALPHA),
        REFERENCE: Row("reference", lambda s: [_reference(s)]),
    }


def _searched(title: str, candidates: str, alpha: float) -> Row:
    def units(setting: Setting) -> list[Unit]:
        warmup = {"epochs": _warmup_epochs(setting), "lr": WARMUP_LR, "shape": "constant"}
        section = {"policy": "stpt", "initial": INITIAL_LR, "candidates": candidates}
        return [Unit(title, "train", setting, {**section, "alpha": alpha, "warmup": warmup})]

    return Row(title, units)


def _reference(setting: Setting) -> Unit:
    section = {"policy": "schedule", "shape": "constant", "initial": INITIAL_LR}
    patience = max(1, round(PATIENCE * setting.epochs))
    return Unit("reference", "plateau", setting, section, {"patience": patience})


def _warmup_epochs(setting: Setting) -> int:
    return round(WARMUP * setting.epochs)


@dataclass(frozen=True)
class Counted:
    """Samples of one training as they were counted, in iterations of the global batch.

    `warmup`: of the epochs without candidates. `main`: what else the weights went through.
    `lost`: of the candidates that were not taken. `repeated`: of the rounds in which all
    candidates diverged, one candidate's. `searches`: epochs with a winner.
    """

    warmup: int
    main: int
    lost: int
    repeated: int
    searches: int

    @property
    def in_turn(self) -> int:
        """After the warm-up, one after the other."""
        return self.main + self.lost

    @property
    def side_by_side(self) -> int:
        """With a worker for each candidate: a round is as long as one of them."""
        return self.main + self.repeated


def counted(result: Result, setting: Setting) -> Counted:
    """Of one training."""
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
    """A row of one task, over its seeds: what the comparison has, and what the paper asks."""
    outcomes = [
        outcome(row, [result], target_of(reference), setting.training_samples)
        for result, reference, setting in zip(results, references, settings, strict=True)
    ]
    iterations = [counted(r, s) for r, s in zip(results, settings, strict=True)]
    highest = [100 * max([r["accuracy"], *_seen(r)]) for r in results]
    return {
        **over_seeds(outcomes),
        "highest_mean": round(mean(highest), 3),
        "highest": [round(h, 3) for h in highest],
        "last_lrs": [_last_lr(result) for result in results],
        "search_share": round(mean(c.lost / max(c.warmup + c.main, 1) for c in iterations), 4),
        "iterations": round(mean(c.warmup + c.in_turn for c in iterations), 1),
        "iterations_side_by_side": round(mean(c.warmup + c.side_by_side for c in iterations), 1),
    }


def _seen(result: Result) -> list[float]:
    return [] if result["diverged"] else [point["accuracy"] for point in result["curve"]]


def _last_lr(result: Result) -> float:
    return result["notes"][-1]["next_base_lr"] if result["notes"] else result["peak_lr"]


# Claims.


@dataclass(frozen=True)
class Claim:
    """The paper has `better` above `other`, or both equal. `measure`: a list of the row's."""

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
    """Those whose rows are there. `spread_points`: highest minus lowest over the seeds, of the
    two rows' the larger one; unknown with one seed.
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
    return _judged(differences, round(paper, 1), _spread(ours, others))


def _judged(differences: Sequence[float], paper: float, spread: float | None) -> dict[str, Any]:
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
    """A difference that is within the spread says nothing, unless the paper has none."""
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
    """That alpha matters little: highest minus lowest accuracy over the alphas."""
    highest = [rows[name]["highest"] for name in ALPHAS]
    means = [mean(row) for row in highest]
    points, spread = round(max(means) - min(means), 3), _spread(*highest)
    figures = [PAPER[name] for name in ALPHAS]
    paper = round(max(figures) - min(figures), 1)
    beyond = None if spread is None else points > spread
    # Little is the paper's own range, or what seeds make of it.
    little = points <= paper or not beyond
    return {
        "paper_points": paper,
        "points": points,
        "differences": [round(max(s) - min(s), 3) for s in zip(*highest, strict=True)],
        "spread_points": None if spread is None else round(spread, 3),
        "beyond_spread": beyond,
        "agrees": "undecided" if beyond is None else "yes" if little else "no",
    }


# Iterations saved against training every rate for a whole epoch, by how they are counted: of
# the row's, and of `EVERY_LR`'s.
WAYS: dict[str, tuple[Callable[[Counted], int], Callable[[Counted], int]]] = {
    "as_published": (lambda c: c.side_by_side, lambda c: c.in_turn),
    "in_turn": (lambda c: c.in_turn, lambda c: c.in_turn),
    "side_by_side": (lambda c: c.side_by_side, lambda c: c.side_by_side),
}


def saving_claims(
    searched: Sequence[Counted], every_lr: Sequence[Counted]
) -> dict[str, dict[str, Any]]:
    """Percent per epoch with a search, over the seeds, by each way of counting."""
    found = {}
    for way, (of_row, of_whole) in WAYS.items():
        pairs = zip(searched, every_lr, strict=True)
        saved = [
            100 * (1 - of_row(c) / c.searches / (of_whole(whole) / whole.searches))
            for c, whole in pairs
            if c.searches and whole.searches
        ]
        found[way] = _saving(saved) if saved else None
    return {way: saving for way, saving in found.items() if saving}


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
