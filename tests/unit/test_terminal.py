"""A progress bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from typing import Any

import pytest
from rich.console import Console

from raytrain_opt.recording.records import EpochRecord
from raytrain_opt.terminal import Terminal, epoch_text
from tests.support.synthetic_runs import epoch_line, evaluation


def record(**values: Any) -> EpochRecord:
    shown = {"lr": 0.0125, "train_loss": 0.51234, "samples_per_s": 12345.6, "duration_s": 2.04}
    line = epoch_line(3, epochs=8, **evaluation(0.9512), **shown)
    return EpochRecord.model_validate({**line, "timings_s": {}, **values})


def colored_console(width: int = 200) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=True, width=width), out


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def test_each_note_and_each_epoch_is_one_line() -> None:
    out = io.StringIO()
    with Terminal(Console(file=out, width=20)) as terminal:
        terminal.phase("main train")
        terminal.advance(0.3)
        terminal.note("a note [with brackets] that is longer than the line is wide")
        terminal.epoch(record())
    assert out.getvalue().splitlines() == [
        "a note [with brackets] that is longer than the line is wide",
        epoch_text(record()),
    ]


def test_the_bar_shows_phase_and_percentage_below_the_lines() -> None:
    console, out = colored_console()
    with Terminal(console) as terminal:
        terminal.phase("starting")
        terminal.note("run directory: [here]")
        terminal.phase("epoch 4/8  main train")
        terminal.epoch(record())
        terminal.advance(0.75)
    text = plain(out.getvalue())
    assert "run directory: [here]" in text
    assert "epoch 4/8  main train" in text
    assert "75%" in text
    assert epoch_text(record()) in text


def test_brackets_in_the_name_of_a_metric_stay() -> None:
    console, out = colored_console()
    name = "mAP [small]"
    metric = {"name": name, "higher_is_better": True}
    with Terminal(console) as terminal:
        terminal.epoch(record(test_metrics={name: 0.5}, metric=metric))
    assert f"{name} 0.5" in plain(out.getvalue())


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_terminal_gets_a_bar_and_a_pipe_lines_only(
    is_terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with Terminal() as terminal:
        terminal.note("hello")
    text = capsys.readouterr().out
    assert (text == "hello\n") == (not is_terminal)
    assert ("starting" in text) == is_terminal


def test_a_full_disk_below_the_output_does_not_end_a_command(tmp_path: Any) -> None:
    command = [sys.executable, "-m", "raytrain_opt", "runs", str(tmp_path)]
    with open("/dev/full", "w") as full:
        assert subprocess.run(command, stdout=full, check=False).returncode == 0
