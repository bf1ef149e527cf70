"""The summary of a run: its result, the cost and gain of its searches, and warnings.

Each function of a warning checks one condition and yields a sentence or nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from shlex import quote
from statistics import fmean, median
from typing import Any

from raytrain_opt.recording.records import RoundRecord, best_epoch
from raytrain_opt.report.plots import count, duration, percent, plain, rate, times
from raytrain_opt.report.run_reader import RunRecords
from raytrain_opt.results import Metric

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class SearchCost:
    """Cost of the rounds of candidates.

    `duration_s`: time in which candidates were trained and the winner's state was sent.
    `samples_fraction`: of the training's samples; `time_fraction`: of the run's time.
    """

    rounds: int
    candidates: int
    samples: int | None
    samples_fraction: float | None
    duration_s: float
    time_fraction: float | None


@dataclass(frozen=True)
class RunSummary:
    """Summary of one run. `metric`: the one of its task that decides."""

    run_dir: str
    name: str
    status: str
    epochs_done: int
    epochs: int | None
    metric: Metric
    test_metric: float | None
    best_test_metric: float | None
    best_epoch: int | None
    wall_s: float | None
    samples_per_s: float | None
    global_batch_size: int
    batch_size_per_worker: int
    workers: int
    min_lr: float | None
    max_lr: float | None
    data_wait_fraction: float | None
    search: SearchCost
    sentences: tuple[str, ...]
    warnings: tuple[str, ...]


def summarize(run: RunRecords) -> RunSummary:
    """Summarize a run, finished or not."""
    evaluated = [epoch.test_metric for epoch in run.epochs if epoch.metric is not None]
    best = best_epoch(run.epochs)
    speeds = [epoch.samples_per_s for epoch in run.epochs if epoch.samples_per_s]
    wall_s = run.result.wall_s if run.result else (run.epochs[-1].end_s if run.epochs else None)
    min_lr, max_lr = _lr_range(run)
    search = _search_cost(run, wall_s)
    return RunSummary(
        run_dir=run.run_dir,
        name=run.name,
        status=_status(run),
        epochs_done=len(run.epochs),
        epochs=run.planned_epochs,
        metric=run.metric,
        test_metric=evaluated[-1] if evaluated else None,
        best_test_metric=best.test_metric if best else None,
        best_epoch=best.epoch if best else None,
        wall_s=wall_s,
        samples_per_s=median(speeds) if speeds else None,
        global_batch_size=run.global_batch_size,
        batch_size_per_worker=run.global_batch_size // run.workers,
        workers=run.workers,
        min_lr=min_lr,
        max_lr=max_lr,
        data_wait_fraction=data_wait_fraction(run),
        search=search,
        sentences=tuple(_sentences(run, search, wall_s)),
        warnings=tuple(all_warnings(run)),
    )


def _status(run: RunRecords) -> str:
    if run.result is not None:
        return "finished"
    return "batch size found" if run.is_batch_size_search else "not finished"


def _lr_range(run: RunRecords) -> tuple[float | None, float | None]:
    """Return the lowest and the highest learning rate of any step, without rates of 0."""
    rates = [lr for epoch in run.schedule for lr in epoch.steps.lrs]
    positive = [lr for lr in rates or [epoch.lr for epoch in run.epochs] if lr > 0]
    return (min(positive), max(positive)) if positive else (None, None)


def _search_cost(run: RunRecords, wall_s: float | None) -> SearchCost:
    result = run.result.search if run.result else None
    duration_s = math.fsum(
        epoch.timings_s.get(part) or 0.0
        for epoch in run.epochs
        for part in ("pretrain_s", "take_state_s")
    )
    return SearchCost(
        rounds=len(run.rounds),
        candidates=sum(len(record.candidates) for record in run.rounds),
        samples=result.samples if result else None,
        samples_fraction=result.fraction_of_training if result else None,
        duration_s=duration_s,
        time_fraction=duration_s / wall_s if wall_s else None,
    )


def _sentences(run: RunRecords, search: SearchCost, wall_s: float | None) -> Iterator[str]:
    yield from _search_cost_sentence(run, search)
    yield from _search_gain_sentences(run)
    yield from _batch_size_sentence(run)
    yield from _startup_sentence(run, wall_s)
    yield from _step_sentences(run)
    if run.result and run.result.noise_scale:
        yield f"Gradient noise scale: {run.result.noise_scale.sentence}."


def _search_cost_sentence(run: RunRecords, search: SearchCost) -> Iterator[str]:
    if not run.rounds:
        if run.epochs:
            yield "No learning-rate search took place."
        return
    samples, first = "", run.rounds[0]
    if search.samples is not None:
        fraction = f"{percent(search.samples_fraction, 0)} of the training's samples"
        samples = f"{count(search.samples)} samples ({fraction}) and "
    yield (
        f"The learning-rate search cost {samples}{duration(search.duration_s)} "
        f"({percent(search.time_fraction)} of the run's time): {times(search.rounds, 'round')}, "
        f"{times(search.candidates, 'candidate')}, trained on {first.search_on}."
    )


def _search_gain_sentences(run: RunRecords) -> Iterator[str]:
    # Policy stpt has rounds without a stage; stpt_horizon names the stage of every round.
    stpt = [record for record in run.rounds if not record.stage and record.chosen is not None]
    if stpt:
        yield _stpt_gain_sentence(stpt)
    searched = [record for record in run.rounds if record.stage and record.epoch == 1]
    if searched and searched[-1].winner is not None:
        yield _found_sentence(searched, run.job["learning_rate"].get("initial"))


def _found_sentence(searched: Sequence[RoundRecord], initial: float | None) -> str:
    """State the peak, and which optimizer won if there were several."""
    peak = searched[-1].next_base_lr
    if searched[-1].is_undecided:
        return f"The search before the first epoch has {searched[-1].reason}."
    candidates = [candidate for record in searched for candidate in record.candidates]
    optimizers = list(dict.fromkeys(candidate.optimizer for candidate in candidates))
    if len(optimizers) > 1:
        [winner] = [c.optimizer for c in candidates if c.index == searched[-1].winner]
        others = ", ".join(name for name in optimizers if name != winner)
        return (
            f"The search before the first epoch chose {winner} with a peak learning rate of "
            f"{rate(peak)}, against {others}."
        )
    text = f"The search before the first epoch found a peak learning rate of {rate(peak)}"
    if initial:
        text += f", {plain(peak / initial, 3)} times the initial guess of {rate(initial)}"
    return f"{text}."


def _stpt_gain_sentence(rounds: Sequence[RoundRecord]) -> str:
    gains = [gain for record in rounds if (gain := _gain(record)) is not None]
    changed = sum(r.chosen is not None and r.chosen.multiplier != 1 for r in rounds)
    text = f"It changed the learning rate in {changed} of {times(len(rounds), 'round')}"
    if gains:
        metric, gain = rounds[0].metric, fmean(gains)
        text += (
            f"; right after the pre-training, the winner's validation {metric.name} was on "
            f"average better than that of the unchanged rate by {metric.difference(gain)}"
        )
    return (
        f"{text}. To see whether the gain lasts, compare with a run without a search: "
        "raytrain-opt report THIS_RUN OTHER_RUN."
    )


def _gain(record: RoundRecord) -> float | None:
    """Return how much better the winner is than the unchanged rate; None if that was not tried."""
    unchanged = next((c for c in record.candidates if c.multiplier == 1), None)
    before = None if unchanged is None else unchanged.val_metric
    after = None if record.chosen is None else record.chosen.val_metric
    return None if before is None or after is None else record.metric.score(after - before)


def _batch_size_sentence(run: RunRecords) -> Iterator[str]:
    record = run.batch_size
    if record is None:
        return
    probes, cost = times(record.probes, "probe"), duration(record.duration_s)
    yield (
        f"The batch-size search ({probes}, {cost}) chose "
        f"{record.batch_size_per_worker} samples per worker at {count(record.samples_per_s)} "
        f"samples/s: {record.reason}."
    )


def _startup_sentence(run: RunRecords, wall_s: float | None) -> Iterator[str]:
    first_step_s = run.result.time_to_first_step_s if run.result else None
    if first_step_s is not None and wall_s:
        yield (
            f"The first training step started after {duration(first_step_s)} "
            f"({percent(first_step_s / wall_s, 0)} of the run's time)."
        )


def _step_sentences(run: RunRecords) -> Iterator[str]:
    """Name what was chosen for a training step."""
    parallel = run.result.parallel if run.result else {}
    if "step" in parallel:
        yield _step_sentence(parallel["step"], parallel.get("first_step_s"))


def _step_sentence(step: dict[str, Any], first_step_s: float | None) -> str:
    parts = [step["precision"], *step["kernels"], step["memory_format"], step["optimizer"]]
    if step["loader_processes"]:
        parts.append(f"loader processes: {step['loader_processes']}")
    parts.append("not compiled" if step["compile"] == "off" else f"compiled ({step['compile']})")
    text = f"A training step: {', '.join(parts)}"
    if step["compile"] != "off" and first_step_s:
        text += f"; the first step, which compiles, took {duration(first_step_s)}"
    return f"{text}."


# Below this, no advice shortens an epoch by much.
_MAX_DATA_WAIT = 0.03
# Standard errors of the difference between two accuracies: about 95 % confidence.
_CLEAR_DIFFERENCE = 2.0
# Fraction of rounds from which a finding is more than a coincidence.
_MANY = 0.5


def all_warnings(run: RunRecords) -> list[str]:
    """Return all warnings that apply, the most severe first."""
    checks = (
        _unfinished, _failures, _diverged, _data_wait, _noise, _edge, _staleness, _skipped,
    )  # fmt: skip
    return [text for check in checks for text in check(run)]


def data_wait_fraction(run: RunRecords) -> float | None:
    """Return the fraction of the main training's time in which workers waited for data."""
    waited_s = math.fsum(e.timings_s.get("main_data_wait_s") or 0.0 for e in run.epochs)
    steps_s = math.fsum(e.timings_s.get("main_compute_s") or 0.0 for e in run.epochs)
    return waited_s / steps_s if steps_s > 0 else None


def _unfinished(run: RunRecords) -> Iterator[str]:
    if run.result is not None or run.is_batch_size_search:
        return
    last = run.events[-1] if run.events else None
    if last is not None and last.kind in ("failed", "interrupted"):
        cause = f"{last.kind}: {last.text}"
    else:
        cause = "it is still running, or its driver died"
    advice = "It has no checkpoint to resume from"
    if run.has_checkpoint:
        advice = (
            f"If it has stopped, resume it with: raytrain-opt run --resume {quote(run.run_dir)} "
            "(and --trust if its job names functions that you trust)"
        )
    yield (
        f"The run is not finished: {len(run.epochs)} of {run.planned_epochs or '?'} epochs are "
        f"done ({cause}). {advice}"
    )


def _failures(run: RunRecords) -> Iterator[str]:
    restarts = [event for event in run.events if event.kind == "restarted"]
    if restarts:
        processes = Counter(event.process or "?" for event in restarts)
        names = ", ".join(f"{name} ({number} ×)" for name, number in processes.items())
        silent_s: dict[int, float] = {}
        for event in restarts:  # all processes of one failure wait at the same time
            silent_s[event.epoch] = max(silent_s.get(event.epoch, 0.0), event.silent_s or 0.0)
        yield (
            f"{times(len(restarts), 'restart')} of processes: {names}. About "
            f"{duration(sum(silent_s.values()))} passed between the last sign of life and the "
            "restart; the interrupted commands were repeated from the same state"
        )
    for kind in ("diverged", "collapsed", "lost", "fewer"):
        yield from (event.text for event in run.events if event.kind == kind)


def _diverged(run: RunRecords) -> Iterator[str]:
    candidates = [c for record in run.rounds for c in record.candidates]
    diverged = [c for c in candidates if c.status == "diverged"]
    if diverged:
        yield (
            f"{times(len(diverged), 'candidate')} of {count(len(candidates))} diverged; the "
            f"lowest learning rate among them is {rate(min(c.lr for c in diverged))}"
        )
    for failure, number in Counter(c.failure for c in diverged if c.failure).items():
        yield f"{times(number, 'candidate')} raised {failure}"


def _data_wait(run: RunRecords) -> Iterator[str]:
    fraction = data_wait_fraction(run)
    if fraction is None or fraction <= _MAX_DATA_WAIT:
        return
    loaders = run.job["data"].get("loader_workers")
    advice = f"data.loader_workers: auto (now {loaders}) adds loader processes until they keep up"
    if loaders == "auto":
        advice = (
            "data.loader_workers: auto starts at most one loader process for each of "
            "workers.threads. If decoding is slow, use smaller image files, or more cores for "
            "each worker; if storage is slow, a larger number of data.loader_workers"
        )
    elif loaders is None:  # data in memory
        advice = "the workers prepare these data themselves; less in data.augment helps"
    waited = f"Workers waited for data in {percent(fraction, 0)} of the main training's time"
    yield f"{waited}: {advice}"


def _noise(run: RunRecords) -> Iterator[str]:
    """Warn about close candidates, for policy stpt only: stpt_horizon accounts for noise."""
    within = [near for record in run.rounds if (near := _is_within_noise(record)) is not None]
    if sum(within) > _MANY * len(within):
        yield (
            f"In {sum(within)} of {times(len(within), 'round')}, the best and the second-best "
            "candidate differ by less than the noise (two standard errors of the difference of "
            "their accuracies on the validation split): these choices are close to random. A "
            "longer alpha, rates further apart or a larger data.validation_fraction help"
        )


def _is_within_noise(record: RoundRecord) -> bool | None:
    """Return whether the best two candidates are too close; None when it cannot be decided."""
    chosen = record.chosen
    accuracies = [c.val_metric for c in record.candidates if c.status == "ok"]
    known = sorted((a for a in accuracies if a is not None), reverse=True)
    if record.stage or chosen is None or not record.validation_samples or len(known) < 2:
        return None
    if not record.metric.is_fraction or chosen.score != chosen.val_metric:
        return None  # the standard error of another score is not known
    variance = sum(a * (1 - a) for a in known[:2]) / record.validation_samples
    return known[0] - known[1] <= _CLEAR_DIFFERENCE * math.sqrt(variance)


def _edge(run: RunRecords) -> Iterator[str]:
    rounds = [r for r in run.rounds if not r.stage and r.chosen is not None]
    searched = [r for r in rounds if len(r.candidates) > 1]
    hints = {
        "lowest": "short pre-trainings favor low rates; policy stpt_horizon avoids that",
        "highest": "add higher multipliers",
    }
    for (name, hint), pick in zip(hints.items(), (min, max), strict=True):
        wins = sum(r.chosen is pick(r.candidates, key=lambda c: c.lr) for r in searched)
        if rounds and wins > _MANY * len(rounds):
            yield (
                f"In {wins} of {times(len(rounds), 'round')}, the {name} learning rate of the "
                f"set won: {hint}"
            )
    yield from _edge_of_peak_search(run.rounds)


def _edge_of_peak_search(rounds: Sequence[RoundRecord]) -> Iterator[str]:
    search = [record for record in rounds if record.epoch == 1 and record.stage]
    rates = [c.lr for record in search for c in record.candidates if c.status == "ok"]
    if search and len(set(rates)) > 1 and search[-1].next_base_lr in (min(rates), max(rates)):
        yield (
            f"The peak learning rate, {rate(search[-1].next_base_lr)}, is at the edge of the "
            f"rates that were tried ({rate(min(rates))} to {rate(max(rates))})"
        )


def _staleness(run: RunRecords) -> Iterator[str]:
    records = [epoch.staleness for epoch in run.epochs if epoch.staleness is not None]
    worst = max((record.mean or 0.0 for record in records), default=0.0)
    # That of workers of equal speed is about their number.
    if records and worst > 2 * run.workers:
        yield (
            f"Gradients were up to {max(record.max for record in records)} updates stale, "
            f"{plain(worst, 3)} on average in the worst epoch, with {run.workers} workers: if "
            "the accuracy suffers, lower parallel.staleness_bound"
        )


def _skipped(run: RunRecords) -> Iterator[str]:
    skipped = sum(epoch.skipped for epoch in run.epochs)
    if skipped:
        yield f"{times(skipped, 'sample')} skipped as unreadable (data.on_unreadable: skip)"
