"""Following a run: everything is told once, also of a run that is resumed, until it ends."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from made_runs import (
    epoch_line,
    event_line,
    made_run,
    result,
    round_line,
    with_batch_size_search,
    write_lines,
)
from rich.console import Console

from raytrain_opt.errors import JobError
from raytrain_opt.report.watch import Watched, watch
from raytrain_opt.telemetry.terminal import Lines


class Told:
    """A terminal, and what it was told since the last question."""

    def __init__(self) -> None:
        self._output = io.StringIO()
        self.terminal = Lines(Console(file=self._output, width=200))

    def lines(self) -> list[str]:
        text = self._output.getvalue()
        self._output.seek(0)
        self._output.truncate()
        return text.splitlines()


def test_a_finished_run_is_told_as_a_whole(tmp_path: Path) -> None:
    run, told = with_batch_size_search(made_run(tmp_path / "run", epochs=2)), Told()
    watch(str(run), told.terminal)
    lines = told.lines()
    assert lines[0] == "probe 1: batch size 8  5,714 samples/s"
    assert lines[3] == "probe 4: batch size 512  out of memory"
    assert lines[5].startswith(
        "round of epoch 1: 0.2 (35.0 %), 0.1 (45.0 %), 0.05 (35.0 %) -> 0.1"
    )
    assert "epoch 2/2  lr 0.1  loss 1  accuracy 75.00 %  960 samples/s  2.0 s" in lines
    assert any(line.startswith("finished: test accuracy 75.00 %") for line in lines)


@pytest.mark.parametrize("place", ["{}", "file://{}"])
def test_what_comes_is_told_once(tmp_path: Path, place: str) -> None:
    run, told = made_run(tmp_path / "run", epochs=2, finished=False), Told()
    watched = Watched(place.format(run), 4)
    assert not watched.tell(told.terminal)
    assert len(told.lines()) == 4
    assert not watched.tell(told.terminal)
    assert told.lines() == []
    write_lines(run / "rounds.jsonl", map(round_line, (1, 2, 3)))
    assert not watched.tell(told.terminal)
    [line] = told.lines()
    assert line.startswith("round of epoch 3")
    write_lines(run / "epochs.jsonl", map(epoch_line, (1, 2, 3, 4)))
    (run / "result.json").write_text(json.dumps(result(4)))
    assert watched.tell(told.terminal)
    assert [line[:9] for line in told.lines()[:2]] == ["epoch 3/4", "epoch 4/4"]


@pytest.mark.parametrize("what", ["failed", "interrupted"])
def test_it_ends_when_the_run_does(tmp_path: Path, what: str) -> None:
    run, told = made_run(tmp_path / "run", epochs=1, finished=False), Told()
    write_lines(run / "events.jsonl", [event_line("restarted", "x"), event_line(what, "the end")])
    watch(str(run), told.terminal)
    assert told.lines()[-1] == f"{what}: the end"


def test_a_resumed_run_is_followed_on(tmp_path: Path) -> None:
    """The resumed run forgets a line and writes it again."""
    run, told = made_run(tmp_path / "run", epochs=2, finished=False), Told()
    ended, resumed = event_line("failed", "x"), event_line("resumed", "after epoch 1")
    write_lines(run / "events.jsonl", [ended, resumed])
    watched = Watched(str(run), 4)
    assert not watched.tell(told.terminal)
    told.lines()
    write_lines(run / "epochs.jsonl", [epoch_line(1)])
    assert not watched.tell(told.terminal)
    write_lines(run / "epochs.jsonl", map(epoch_line, (1, 2)))
    assert not watched.tell(told.terminal)
    assert [line[:9] for line in told.lines()] == ["epoch 2/4"]


def test_a_place_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="holds no run"):
        watch(str(tmp_path))
