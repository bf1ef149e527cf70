"""What a run's report says first: main numbers, sentences on its searches, and warnings.

Each function of a warning checks one condition and yields a sentence or nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from shlex import quote
from statistics import median

from raytrain_opt.recording.records import RoundRecord, best_epoch
from raytrain_opt.report.plots import count, duration, percent, rate, times
from raytrain_opt.report.run_reader import RunRecords


def tiles(run: RunRecords) -> list[tuple[str, str, str]]:
    """Return name, value and remark of each main number."""
    metric, best = run.metric, best_epoch(run.epochs)
    evaluated = [epoch.test_metric for epoch in run.epochs if epoch.metric is not None]
    test = metric.text(evaluated[-1] if evaluated else None)
    remark = f"best {metric.text(best.test_metric)} in epoch {best.epoch}" if best else ""
    if run.result is not None and run.result.final_set and best:
        test = metric.text(run.result.final_set[metric.name])
        remark = (
            f"once, after epoch {best.epoch}, which had {metric.text(best.test_metric)} on val"
        )
    speeds = [epoch.samples_per_s for epoch in run.epochs if epoch.samples_per_s]
    speed = count(median(speeds) if speeds else None)
    cost = run.result.search.fraction_of_training if run.result else None
    batch_size = int(run.job["global_batch_size"])
    workers = run.epochs[-1].workers if run.epochs else 0
    shares = f"{workers} workers × {batch_size // workers}" if workers else ""
    return [
        (f"Test {metric.name}", test, remark),
        ("Time", duration(run.wall_s), "since the start of the command"),
        ("Speed", f"{speed} /s", "samples, median over epochs"),
        ("Global batch size", count(batch_size), shares),
        ("Learning rate", rate(run.epochs[-1].lr_peak if run.epochs else None), "highest"),
        ("Search cost", percent(cost, 0) if run.rounds else "none", "of the training's samples"),
    ]


def sentences(run: RunRecords) -> Iterator[str]:
    """Yield what the searches cost and found."""
    if run.rounds:
        yield _search_cost(run)
    elif run.epochs:
        yield "No learning-rate search took place."
    # Policy stpt has rounds without a stage; stpt_horizon names the stage of every round.
    searched = [record for record in run.rounds if record.stage and record.epoch == 1]
    if searched and searched[-1].winner is not None:
        yield _choice(searched)
    if run.batch_size is not None:
        record = run.batch_size
        yield (
            f"The batch-size search ({times(record.probes, 'probe')}, "
            f"{duration(record.duration_s)}) chose {record.batch_size_per_worker} samples per "
            f"worker at {count(record.samples_per_s)} samples/s: {record.reason}."
        )


def _search_cost(run: RunRecords) -> str:
    parts = ("pretrain_s", "take_state_s")
    cost_s = math.fsum(e.timings_s.get(part) or 0.0 for e in run.epochs for part in parts)
    samples = ""
    if run.result:
        search = run.result.search
        fraction = f"{percent(search.fraction_of_training, 0)} of the training's samples"
        samples = f"{count(search.samples)} samples ({fraction}) and "
    candidates = sum(len(record.candidates) for record in run.rounds)
    return (
        f"The learning-rate search cost {samples}{duration(cost_s)} "
        f"({percent(cost_s / run.wall_s if run.wall_s else None)} of the run's time): "
        f"{times(len(run.rounds), 'round')}, {times(candidates, 'candidate')}, trained on "
        f"{run.rounds[0].search_on}."
    )


def _choice(searched: Sequence[RoundRecord]) -> str:
    """State the peak, and which optimizer won if there were several."""
    last = searched[-1]
    if last.is_undecided:
        return f"The search before the first epoch has {last.reason}."
    candidates = [candidate for record in searched for candidate in record.candidates]
    winner = next((c.optimizer for c in candidates if c.index == last.winner), "–")
    others = dict.fromkeys(c.optimizer for c in candidates if c.optimizer != winner)
    against = f", against {', '.join(others)}" if others else ""
    return (
        f"The search before the first epoch chose {winner} with a peak learning rate of "
        f"{rate(last.next_base_lr)}{against}."
    )


# Below this, no advice shortens an epoch by much.
_MAX_DATA_WAIT = 0.03


def all_warnings(run: RunRecords) -> list[str]:
    """Return all warnings that apply, the most severe first."""
    checks = (_unfinished, _failures, _raised, _data_wait, _edge, _skipped)
    return [text for check in checks for text in check(run)]


def _unfinished(run: RunRecords) -> Iterator[str]:
    if run.result is not None or run.is_batch_size_search:
        return
    last = run.events[-1] if run.events else None
    if last is not None and last.kind in ("failed", "interrupted"):
        cause = f"{last.kind}: {last.text}"
    else:
        cause = "it is still running, or its driver died"
    yield (
        f"The run is not finished: {len(run.epochs)} of {run.epochs_to_train or '?'} epochs are "
        f"done ({cause}). If it has stopped, resume it with: raytrain-opt run --resume "
        f"{quote(run.run_dir)} (and --trust if its job names functions that you trust)"
    )


def _failures(run: RunRecords) -> Iterator[str]:
    if restarts := [event for event in run.events if event.kind == "restarted"]:
        processes = Counter(event.process or "?" for event in restarts)
        names = ", ".join(f"{name} ({number} ×)" for name, number in processes.items())
        yield (
            f"{times(len(restarts), 'restart')} of processes: {names}. The interrupted commands "
            "were repeated from the same state"
        )
    for kind in ("diverged", "collapsed", "lost", "fewer"):
        yield from (event.text for event in run.events if event.kind == kind)


def _raised(run: RunRecords) -> Iterator[str]:
    failures = Counter(c.failure for r in run.rounds for c in r.candidates if c.failure)
    for failure, number in failures.items():
        yield f"{times(number, 'candidate')} raised {failure}"


def _data_wait(run: RunRecords) -> Iterator[str]:
    waited_s = math.fsum(e.timings_s.get("main_data_wait_s") or 0.0 for e in run.epochs)
    steps_s = math.fsum(e.timings_s.get("main_compute_s") or 0.0 for e in run.epochs)
    if not steps_s or waited_s <= _MAX_DATA_WAIT * steps_s:
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
    fraction = percent(waited_s / steps_s, 0)
    yield f"Workers waited for data in {fraction} of the main training's time: {advice}"


def _edge(run: RunRecords) -> Iterator[str]:
    search = [record for record in run.rounds if record.epoch == 1 and record.stage]
    rates = [c.lr for record in search for c in record.candidates if c.status == "ok"]
    if search and len(set(rates)) > 1 and search[-1].next_base_lr in (min(rates), max(rates)):
        yield (
            f"The peak learning rate, {rate(search[-1].next_base_lr)}, is at the edge of the "
            f"rates that were tried ({rate(min(rates))} to {rate(max(rates))})"
        )


def _skipped(run: RunRecords) -> Iterator[str]:
    if skipped := sum(epoch.skipped for epoch in run.epochs):
        yield f"{times(skipped, 'sample')} skipped as unreadable (data.on_unreadable: skip)"
    yield from (e.text.capitalize() for e in run.events if e.kind == "unreadable")
