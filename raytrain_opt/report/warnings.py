"""What a user should look at: each function looks for one thing and says it, or nothing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from raytrain_opt.report.records import RoundLine, RunRecords
from raytrain_opt.report.words import count, duration, percent, plain, rate, times

_MOST_DATA_WAIT = 0.10
# In standard errors of the difference between two accuracies.
_CLEAR = 2.0
# Of rounds, until it is worth a warning.
_MANY = 0.5


def warnings_of(run: RunRecords) -> list[str]:
    """All that apply, the gravest first."""
    looks = (_unfinished, _failures, _diverged, _data_wait, _noise, _edge, _staleness, _skipped)
    return [text for look in looks for text in look(run)]


def data_wait(run: RunRecords) -> float | None:
    """Share of the main training's steps in which workers waited for data."""
    waited = math.fsum(e.parts_s.get("main_data_wait_s") or 0.0 for e in run.epochs)
    steps = math.fsum(e.parts_s.get("main_compute_s") or 0.0 for e in run.epochs)
    return waited / steps if steps > 0 else None


def _unfinished(run: RunRecords) -> Iterator[str]:
    if run.result is not None or run.is_batch_size_search:
        return
    done = f"{len(run.epochs)} of {run.job['epochs']} epochs are done"
    last = run.events[-1] if run.events else None
    if last is not None and last.what in ("failed", "interrupted"):
        why = f"{last.what}: {last.text}"
    else:
        why = "it still goes on, or its driver died"
    how = f"go on with: raytrain-opt run --resume {run.run_dir}"
    yield f"The run is not finished: {done} ({why}). When it has ended, {how}"


def _failures(run: RunRecords) -> Iterator[str]:
    restarted = [event for event in run.events if event.what == "restarted"]
    if restarted:
        who = Counter(event.who or "?" for event in restarted)
        names = ", ".join(f"{name} ({n} ×)" for name, n in who.items())
        longest: dict[int | None, float] = {}
        for event in restarted:  # those of one failure wait at the same time
            longest[event.epoch] = max(longest.get(event.epoch, 0.0), event.cost_s or 0.0)
        lost = duration(sum(longest.values()))
        yield (
            f"{times(len(restarted), 'process', 'es')} started again: {names}; about {lost} "
            "passed from the last sign of life to the return. What they did was repeated from the "
            "same state"
        )
    elif run.result is not None and any(run.result.restarts.values()):
        names = ", ".join(f"{pool}: {n}" for pool, n in run.result.restarts.items() if n)
        yield f"Processes were started again ({names})"
    for what in ("lost", "fewer"):
        yield from (event.text for event in run.events if event.what == what)


def _diverged(run: RunRecords) -> Iterator[str]:
    tried = [c for line in run.rounds for c in line.candidates]
    gone = [c for c in tried if c.status == "diverged"]
    if gone:
        low = min(c.lr for c in gone)
        yield (
            f"{times(len(gone), 'candidate')} of {count(len(tried))} diverged, the lowest at a "
            f"learning rate of {rate(low)}"
        )


def _data_wait(run: RunRecords) -> Iterator[str]:
    share = data_wait(run)
    if share is not None and share > _MOST_DATA_WAIT:
        yield (
            f"Workers waited for data in {percent(share, 0)} of the main training's steps: more "
            "data.loader_workers, or faster storage, would make it faster"
        )


def _noise(run: RunRecords) -> Iterator[str]:
    """Of published rounds: stpt_horizon takes noise into account by itself."""
    judged = [near for line in run.rounds if (near := _is_within_noise(line)) is not None]
    if sum(judged) > _MANY * len(judged):
        yield (
            f"In {sum(judged)} of {times(len(judged), 'round')} the best candidate was within "
            "noise of the second best (two standard errors of the difference of two accuracies "
            "on the selection split): there the choice is nearly a matter of chance. A longer "
            "alpha, rates further apart or a larger data.selection_fraction tell more"
        )


def _is_within_noise(line: RoundLine) -> bool | None:
    """None where nothing can be said."""
    chosen = line.chosen
    accuracies = [c.val_accuracy for c in line.candidates if c.status == "ok"]
    known = sorted((a for a in accuracies if a is not None), reverse=True)
    if line.stage or chosen is None or not line.selection_samples or len(known) < 2:
        return None
    if chosen.score != chosen.val_accuracy:
        return None  # scored by something else
    spread = sum(a * (1 - a) for a in known[:2]) / line.selection_samples
    return known[0] - known[1] <= _CLEAR * math.sqrt(spread)


def _edge(run: RunRecords) -> Iterator[str]:
    rounds = [line for line in run.rounds if not line.stage and line.chosen is not None]
    for name, pick in (("lowest", min), ("highest", max)):
        hits = sum(_is_at(line, pick(c.lr for c in line.candidates)) for line in rounds)
        if rounds and hits > _MANY * len(rounds):
            why = (
                "short pre-trainings favour low rates (see README, stpt_horizon)"
                if name == "lowest"
                else "the set may not reach far enough"
            )
            yield (
                f"In {hits} of {times(len(rounds), 'round')} the {name} learning rate of the set "
                f"won: {why}"
            )
    yield from _edge_of_peak_search(run.rounds)


def _is_at(line: RoundLine, lr: float) -> bool:
    return line.chosen is not None and len(line.candidates) > 1 and line.chosen.lr == lr


def _edge_of_peak_search(rounds: Sequence[RoundLine]) -> Iterator[str]:
    search = [line for line in rounds if line.epoch == 1 and line.stage]
    alive = [c.lr for line in search for c in line.candidates if c.status == "ok"]
    if search and len(set(alive)) > 1 and search[-1].next_base_lr in (min(alive), max(alive)):
        yield (
            f"The peak that was found, {rate(search[-1].next_base_lr)}, is at the edge of the "
            f"rates that were tried ({rate(min(alive))} to {rate(max(alive))})"
        )


def _staleness(run: RunRecords) -> Iterator[str]:
    found = [epoch.staleness for epoch in run.epochs if epoch.staleness is not None]
    worst = max((at.mean or 0.0 for at in found), default=0.0)
    if found and worst > run.workers:
        yield (
            f"Gradients were up to {max(at.max for at in found)} updates old, {plain(worst, 3)} "
            f"on average in the worst epoch, with {run.workers} workers: a lower "
            "parallel.staleness_bound helps where accuracy suffers"
        )


def _skipped(run: RunRecords) -> Iterator[str]:
    skipped = sum(epoch.skipped for epoch in run.epochs)
    if skipped:
        yield f"{times(skipped, 'sample')} could not be read and were left out (data.corrupt)"
