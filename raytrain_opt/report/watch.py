"""Follow a run in the terminal by its records: from another process, another machine, or a URI."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from raytrain_opt import storage
from raytrain_opt.errors import printable
from raytrain_opt.recording.base import Record
from raytrain_opt.recording.reader import read_lines
from raytrain_opt.recording.records import BatchSizeProbeRecord, EpochRecord, RoundRecord
from raytrain_opt.recording.spans import EventRecord
from raytrain_opt.report.formatting import duration, rate, times
from raytrain_opt.report.run_reader import RunRecords, read_run
from raytrain_opt.report.summary import summarize
from raytrain_opt.terminal.probe_tables import probe_text
from raytrain_opt.terminal.progress import Terminal, epoch_text, open_terminal

# Every look at a remote storage costs requests.
_LOCAL_PERIOD_S, _REMOTE_PERIOD_S = 1.0, 10.0

R = TypeVar("R", bound=Record)


def watch(run_dir: str, state: Callable[[str], str], terminal: Terminal | None = None) -> None:
    """Show all records so far, then new ones, until the run ends. Raises what `read_run` does.

    `state` returns the state of a run directory: "running" while a process writes to it.
    """
    read_run(run_dir)
    watched = WatchedRun(run_dir, state)
    period_s = _REMOTE_PERIOD_S if storage.is_remote(run_dir) else _LOCAL_PERIOD_S
    with terminal or open_terminal() as display:
        while not watched.show_new(display):
            time.sleep(period_s)


@dataclass
class WatchedRun:
    """A run and how many lines of each record were shown. A resumed run repeats some lines."""

    run_dir: str
    state: Callable[[str], str]
    shown: dict[str, int] = field(default_factory=dict)

    def show_new(self, terminal: Terminal) -> bool:
        """Show what is new; return whether the run has ended."""
        state = self.state(self.run_dir)  # before the records: then the last ones are shown too
        texts = list(map(probe_text, self._new_lines("batch_size.jsonl", BatchSizeProbeRecord)))
        texts += map(_round_text, self._new_lines("rounds.jsonl", RoundRecord))
        for epoch in self._new_lines("epochs.jsonl", EpochRecord):
            texts.append(epoch_text(epoch))
            terminal.phase(f"epoch {epoch.epoch}  training")
            terminal.advance(epoch.epoch / epoch.epochs)
        texts += [f"{e.kind}: {e.text}" for e in self._new_lines("events.jsonl", EventRecord)]
        has_ended = True
        if storage.read(self.run_dir, "result.json") is not None:
            texts += _summary_lines(read_run(self.run_dir))
        elif has_ended := state not in ("running", "not readable"):
            texts.append(f"no process writes to this run any more: {state}")
        for text in texts:
            terminal.note(printable(text, kept=""))
        return has_ended

    def _new_lines(self, name: str, kind: type[R]) -> list[R]:
        records = read_lines(self.run_dir, name, kind)
        new_records = records[self.shown.get(name, 0) :]
        self.shown[name] = len(records)
        return new_records


def _round_text(record: RoundRecord) -> str:
    stage = f" ({record.stage})" if record.stage else ""
    text = record.metric.text
    candidates = ", ".join(f"{rate(c.lr)} ({text(c.val_metric)})" for c in record.candidates)
    return (
        f"round of epoch {record.epoch}{stage}: {candidates} -> {rate(record.next_base_lr)}; "
        f"{record.reason}"
    )


def _summary_lines(run: RunRecords) -> Iterator[str]:
    summary = summarize(run)
    metric = summary.metric
    yield (
        f"{summary.status}: test {metric.name} {metric.text(summary.test_metric)} after "
        f"{times(summary.epochs_done, 'epoch')} and {duration(summary.wall_s)}"
    )
    yield from summary.sentences
    yield from (f"warning: {text}" for text in summary.warnings)
