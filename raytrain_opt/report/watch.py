"""Follow a run in the terminal from its records: another process, another machine, or a URI."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from raytrain_opt.paths import read_stored
from raytrain_opt.report.records import (
    EpochLine,
    EventLine,
    ProbeLine,
    RoundLine,
    RunRecords,
    SpanLine,
    read_lines,
    read_run,
)
from raytrain_opt.report.verdict import verdict_of
from raytrain_opt.report.words import duration, percent, plain, rate, times
from raytrain_opt.telemetry.terminal import Terminal, open_terminal

_PERIOD_S, _REMOTE_PERIOD_S = 1.0, 10.0
_ENDS = ("failed", "interrupted")

L = TypeVar("L", RoundLine, EpochLine, ProbeLine, EventLine, SpanLine)


def watch(run_dir: str, terminal: Terminal | None = None) -> None:
    """Tell all that there is, then what comes, until the run has ended. Raises what `read_run`
    raises.
    """
    run = read_run(run_dir)  # also tells whether it is one
    watched = Watched(run_dir, int(run.job["epochs"]))
    period_s = _REMOTE_PERIOD_S if "://" in run_dir else _PERIOD_S
    with terminal or open_terminal(watched.epochs) as shown:
        while not watched.tell(shown):
            time.sleep(period_s)


@dataclass
class Watched:
    """How much of each record was told. A resumed run writes some lines anew."""

    run_dir: str
    epochs: int
    told: dict[str, int] = field(default_factory=dict)

    def tell(self, terminal: Terminal) -> bool:
        """What is new. Whether the run has ended."""
        for probe in self._new("batch_size.jsonl", ProbeLine):
            terminal.note(_probe_text(probe))
        for line in self._new("rounds.jsonl", RoundLine):
            terminal.note(_round_text(line))
        for epoch in self._new("epochs.jsonl", EpochLine):
            terminal.note(_epoch_text(epoch, self.epochs))
            terminal.phase("training", epoch.epoch, self.epochs)
            terminal.advance(float(epoch.epoch))
        last = ""
        for event in self._new("events.jsonl", EventLine):
            last = event.what
            terminal.note(f"{event.what}: {event.text}")
        if read_stored(self.run_dir, "result.json") is None:
            return last in _ENDS
        for text in _verdict_lines(read_run(self.run_dir)):
            terminal.note(text)
        return True

    def _new(self, name: str, kind: type[L]) -> list[L]:
        lines = read_lines(self.run_dir, name, kind)
        told = min(self.told.get(name, 0), len(lines))
        self.told[name] = len(lines)
        return lines[told:]


def _probe_text(line: ProbeLine) -> str:
    speed = (
        "out of memory" if line.samples_per_s is None else f"{line.samples_per_s:,.0f} samples/s"
    )
    return f"probe {line.probe}: batch size {line.batch_size}  {speed}"


def _round_text(line: RoundLine) -> str:
    tried = ", ".join(f"{rate(c.lr)} ({percent(c.val_accuracy)})" for c in line.candidates)
    what = f" {line.stage}" if line.stage else ""
    return (
        f"round of epoch {line.epoch}{what}: {tried} -> {rate(line.next_base_lr)}; {line.reason}"
    )


def _epoch_text(epoch: EpochLine, epochs: int) -> str:
    accuracy = (
        "" if epoch.test_accuracy is None else f"  accuracy {percent(epoch.test_accuracy, 2)}"
    )
    return (
        f"epoch {epoch.epoch}/{epochs}  lr {rate(epoch.lr)}  loss {plain(epoch.train_loss)}"
        f"{accuracy}  {epoch.samples_per_s:,.0f} samples/s  {duration(epoch.seconds)}"
    )


def _verdict_lines(run: RunRecords) -> Iterator[str]:
    verdict = verdict_of(run)
    yield (
        f"{verdict.status}: test accuracy {percent(verdict.test_accuracy, 2)} after "
        f"{times(verdict.epochs_done, 'epoch')} and {duration(verdict.wall_s)}"
    )
    yield from verdict.sentences
    yield from (f"warning: {text}" for text in verdict.warnings)
