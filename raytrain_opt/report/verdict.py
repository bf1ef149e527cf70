"""The verdict: what came of a run, what its search cost and brought, and what to look at."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from raytrain_opt.report.records import CandidateLine, EpochLine, RoundLine, RunRecords
from raytrain_opt.report.warnings import data_wait, warnings_of
from raytrain_opt.report.words import count, duration, percent, plain, rate, times

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class SearchCost:
    """Of the rounds of candidates. `seconds`: in which slots trained and handed over; fractions
    are of the training's samples and of the run's time.
    """

    rounds: int
    candidates: int
    samples: int | None
    samples_fraction: float | None
    seconds: float
    seconds_fraction: float | None


@dataclass(frozen=True)
class Verdict:
    """Of one run. Accuracies are shares of one."""

    run_dir: str
    name: str
    status: str
    epochs_done: int
    epochs: int
    test_accuracy: float | None
    best_test_accuracy: float | None
    best_epoch: int | None
    wall_s: float | None
    samples_per_s: float | None
    global_batch_size: int
    batch_size_per_worker: int
    workers: int
    lr_lowest: float | None
    lr_highest: float | None
    data_wait_fraction: float | None
    search: SearchCost
    sentences: tuple[str, ...]
    warnings: tuple[str, ...]


def verdict_of(run: RunRecords) -> Verdict:
    """From the records alone; a run that is not finished has one too."""
    measured = [epoch for epoch in run.epochs if epoch.test_accuracy is not None]
    best = max(measured, key=lambda epoch: epoch.test_accuracy or 0.0, default=None)
    wall_s = run.result.wall_s if run.result else (run.ends_s[-1] if run.epochs else None)
    low, high = lr_range(run)
    search = _search_cost(run, wall_s)
    return Verdict(
        run_dir=run.run_dir,
        name=run.name,
        status=_status(run),
        epochs_done=len(run.epochs),
        epochs=int(run.job["epochs"]),
        test_accuracy=measured[-1].test_accuracy if measured else None,
        best_test_accuracy=best.test_accuracy if best else None,
        best_epoch=best.epoch if best else None,
        wall_s=wall_s,
        samples_per_s=median(speeds) if (speeds := _speeds(run.epochs)) else None,
        global_batch_size=run.global_batch_size,
        batch_size_per_worker=run.global_batch_size // run.workers,
        workers=run.workers,
        lr_lowest=low,
        lr_highest=high,
        data_wait_fraction=data_wait(run),
        search=search,
        sentences=tuple(_sentences(run, search, wall_s)),
        warnings=tuple(warnings_of(run)),
    )


def _status(run: RunRecords) -> str:
    if run.result is not None:
        return "finished"
    return "batch size found" if run.is_batch_size_search else "not finished"


def lr_range(run: RunRecords) -> tuple[float | None, float | None]:
    """The lowest and the highest rate of any step; decays to zero aside."""
    steps = [at.lr for at in run.schedule.segments] if run.schedule else []
    found = [lr for lr in steps or [epoch.lr for epoch in run.epochs] if lr > 0]
    return (min(found), max(found)) if found else (None, None)


def search_seconds(epoch: EpochLine) -> float:
    """Of the rounds of an epoch."""
    return sum(epoch.parts_s.get(part) or 0.0 for part in ("pretrain_s", "take_state_s"))


def _speeds(epochs: Sequence[EpochLine]) -> list[float]:
    return [epoch.samples_per_s for epoch in epochs if epoch.samples_per_s]


def _search_cost(run: RunRecords, wall_s: float | None) -> SearchCost:
    found = run.result.search if run.result else None
    seconds = math.fsum(search_seconds(epoch) for epoch in run.epochs)
    return SearchCost(
        rounds=len(run.rounds),
        candidates=sum(len(line.candidates) for line in run.rounds),
        samples=found.samples if found else None,
        samples_fraction=found.fraction_of_training if found else None,
        seconds=seconds,
        seconds_fraction=seconds / wall_s if wall_s else None,
    )


def _sentences(run: RunRecords, search: SearchCost, wall_s: float | None) -> Iterator[str]:
    yield from _cost(run, search)
    yield from _brought(run)
    yield from _batch_size(run)
    yield from _staleness(run)
    yield from _start_up(run, wall_s)
    if run.result and run.result.noise_scale:
        yield f"Gradient noise scale: {run.result.noise_scale.sentence}."


def _cost(run: RunRecords, search: SearchCost) -> Iterator[str]:
    if not run.rounds:
        policy = run.job.get("learning_rate", {}).get("policy", "")
        if policy in ("schedule", "replay"):
            yield "No learning-rate search: the rates were written down beforehand."
        return
    samples = (
        ""
        if search.samples is None
        else f"{count(search.samples)} samples, {percent(search.samples_fraction, 0)} of the "
        "training's, and "
    )
    yield (
        f"The learning-rate search cost {samples}{duration(search.seconds)}, "
        f"{percent(search.seconds_fraction)} of the run's time: {times(search.rounds, 'round')}, "
        f"{times(search.candidates, 'candidate')}."
    )


def _brought(run: RunRecords) -> Iterator[str]:
    published = [at for at in run.rounds if not at.stage and at.chosen is not None]
    if published:
        yield _brought_by_rounds(published)
    peaks = [line for line in run.rounds if line.stage and line.epoch == 1 and line.winner]
    peaks = peaks or [line for line in run.rounds if line.stage and line.epoch == 1]
    if peaks:
        initial = run.job["learning_rate"].get("initial") or math.nan
        found = peaks[-1].next_base_lr
        yield (
            f"The search before the first epoch found a peak of {rate(found)}, "
            f"{plain(found / initial, 3)} times the initial guess of {rate(initial)}."
        )
    later = [line for line in run.rounds if line.stage == "later"]
    if later:
        changed = sum(at.chosen is not None and at.chosen.multiplier != 1 for at in later)
        yield f"{changed} of {times(len(later), 'later round')} changed the rest of the schedule."


def _brought_by_rounds(decided: Sequence[RoundLine]) -> str:
    gains = [gain for line in decided if (gain := _gain(line)) is not None]
    changed = sum(at.chosen is not None and at.chosen.multiplier != 1 for at in decided)
    text = f"It changed the rate in {changed} of {times(len(decided), 'round')}"
    if gains:
        text += (
            f"; right after the pre-training the winner was {100 * fmean(gains):.1f} points of "
            "selection accuracy ahead of the unchanged rate on average"
        )
    return (
        f"{text}. Whether that lasts is told by a run without a search: raytrain-opt report "
        "THIS_RUN OTHER_RUN."
    )


def _gain(line: RoundLine) -> float | None:
    """Of the winner's accuracy over the unchanged rate's; None where that was not tried."""
    same = next((c for c in line.candidates if c.multiplier == 1), None)
    return _difference(line.chosen, same)


def _difference(one: CandidateLine | None, other: CandidateLine | None) -> float | None:
    if one is None or other is None or one.val_accuracy is None or other.val_accuracy is None:
        return None
    return one.val_accuracy - other.val_accuracy


def _batch_size(run: RunRecords) -> Iterator[str]:
    found = run.batch_size
    if found is None:
        return
    taken = "taken from an earlier search" if found.cached else duration(found.seconds)
    yield (
        f"The batch-size search ({times(found.probes, 'probe')}, {taken}) chose "
        f"{found.batch_size_per_worker} per worker at {count(found.samples_per_s)} "
        f"samples/s: {found.reason}."
    )


def _staleness(run: RunRecords) -> Iterator[str]:
    found = [epoch.staleness for epoch in run.epochs if epoch.staleness is not None]
    updates = sum(sum(at.counts) for at in found)
    if updates:
        aged = sum(age * number for at in found for age, number in enumerate(at.counts))
        yield (
            f"Asynchronous: gradients were {plain(aged / updates, 3)} updates old on average, at "
            f"most {max(at.max for at in found)}."
        )


def _start_up(run: RunRecords, wall_s: float | None) -> Iterator[str]:
    first_s = run.result.time_to_first_step_s if run.result else None
    if first_s is not None and wall_s:
        yield (
            f"The first training step came {duration(first_s)} after the start "
            f"({percent(first_s / wall_s, 0)} of the run)."
        )
