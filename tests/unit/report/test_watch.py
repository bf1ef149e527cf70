"""Watching a run shows every record once, also after a resume, until the run ends."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from raytrain_opt.commands.runs import run_state
from raytrain_opt.errors import JobError
from raytrain_opt.execution.lock import lock_run_directory
from raytrain_opt.report.watch import WatchedRun, watch
from raytrain_opt.terminal.progress import Terminal
from tests.support.synthetic_runs import (
    epoch_line,
    event_line,
    result,
    round_line,
    with_batch_size_search,
    write_lines,
    write_run,
    write_schedule,
)


class Screen:
    """A terminal, and its lines since the last look."""

    def __init__(self) -> None:
        self._output = io.StringIO()
        self.terminal = Terminal(Console(file=self._output, width=200))

    def lines(self) -> list[str]:
        text = self._output.getvalue()
        self._output.seek(0)
        self._output.truncate()
        return text.splitlines()


def test_a_finished_run_is_shown_completely(tmp_path: Path) -> None:
    run, screen = with_batch_size_search(write_run(tmp_path / "run", epochs=2)), Screen()
    watch(str(run), run_state, screen.terminal)
    lines = screen.lines()
    assert lines[0] == "probe 1: batch size 8  5,714 samples/s ± 1.0 %  (try 8)"
    assert lines[3] == "probe 4: batch size 512  out of memory  (CUDA out of memory)"
    assert lines[5].startswith(
        "round of epoch 1: 0.2 (35.00 %), 0.1 (45.00 %), 0.05 (35.00 %) -> 0.1"
    )
    text = "epoch 2/2  lr 0.1  train loss 1.0000  test accuracy 75.00 %  960 samples/s  2.0 s"
    assert text in lines
    assert any(line.startswith("finished: test accuracy 75.00 %") for line in lines)


@pytest.mark.parametrize("location", ["{}", "file://{}"])
def test_new_records_are_shown_once(tmp_path: Path, location: str) -> None:
    run, screen = write_run(tmp_path / "run", epochs=2, finished=False), Screen()
    watched = WatchedRun(location.format(run), run_state)
    with lock_run_directory(run):
        assert not watched.show_new(screen.terminal)
        assert len(screen.lines()) == 4
        assert not watched.show_new(screen.terminal)
        assert screen.lines() == []
        write_lines(run / "rounds.jsonl", map(round_line, (1, 2, 3)))
        assert not watched.show_new(screen.terminal)
    [line] = screen.lines()
    assert line.startswith("round of epoch 3")
    write_lines(run / "rounds.jsonl", map(round_line, (1, 2, 3, 4)))
    write_lines(run / "epochs.jsonl", map(epoch_line, (1, 2, 3, 4)))
    write_schedule(run / "schedule.jsonl", *[[0.1]] * 4)
    (run / "result.json").write_text(json.dumps(result(4)))
    assert watched.show_new(screen.terminal)
    assert [line[:9] for line in screen.lines()[1:3]] == ["epoch 3/4", "epoch 4/4"]


@pytest.mark.parametrize("kind", ["failed", "interrupted"])
def test_watching_ends_when_the_run_ends(tmp_path: Path, kind: str) -> None:
    run, screen = write_run(tmp_path / "run", epochs=1, finished=False), Screen()
    write_lines(run / "events.jsonl", [event_line("restarted", "x"), event_line(kind, "the end")])
    watch(str(run), run_state, screen.terminal)
    assert f"{kind}: the end" in screen.lines()


@pytest.mark.parametrize(
    ("epochs", "state"), [(0, "batch size found"), (1, "interrupted")], ids=["search", "killed"]
)
def test_watching_ends_with_the_process_of_a_run_without_a_result(
    tmp_path: Path, epochs: int, state: str
) -> None:
    run = write_run(tmp_path / "run", epochs=epochs, finished=False)
    watched, screen = WatchedRun(str(with_batch_size_search(run)), run_state), Screen()
    with lock_run_directory(run):
        assert not watched.show_new(screen.terminal)
    screen.lines()
    assert watched.show_new(screen.terminal)
    assert screen.lines() == [f"no process writes to this run any more: {state}"]


def test_a_resumed_run_is_still_watched(tmp_path: Path) -> None:
    """The resumed run removes a line and writes it again."""
    run, screen = write_run(tmp_path / "run", epochs=2, finished=False), Screen()
    ended, resumed = event_line("failed", "x"), event_line("resumed", "after epoch 1")
    write_lines(run / "events.jsonl", [ended, resumed])
    watched = WatchedRun(str(run), run_state)
    with lock_run_directory(run):
        assert not watched.show_new(screen.terminal)
        screen.lines()
        write_lines(run / "epochs.jsonl", [epoch_line(1)])
        assert not watched.show_new(screen.terminal)
        write_lines(run / "epochs.jsonl", map(epoch_line, (1, 2)))
        assert not watched.show_new(screen.terminal)
    assert [line[:9] for line in screen.lines()] == ["epoch 2/4"]


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="holds no run"):
        watch(str(tmp_path), run_state)
