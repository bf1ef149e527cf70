"""The records of a run are read completely; a damaged one is named with file and line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raytrain_opt.errors import RecordError
from raytrain_opt.report.run_reader import read_run
from tests.support.synthetic_runs import epoch_line, with_batch_size_search, write_run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return with_batch_size_search(write_run(tmp_path / "run", epochs=3))


def test_everything_is_read(run_dir: Path) -> None:
    run = read_run(str(run_dir))
    assert [epoch.epoch for epoch in run.epochs] == [1, 2, 3]
    assert [line.chosen and line.chosen.lr for line in run.rounds] == [0.1] * 3
    assert (len(run.probes), len(run.events)) == (5, 0)
    assert [run.first_step(epoch) for epoch in (1, 2, 3, 4)] == [0, 20, 40, 60]
    assert run.result is not None
    assert run.name == "run"


def test_a_run_that_has_just_started_has_only_a_job(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", epochs=0, finished=False)
    for name in ("epochs.jsonl", "rounds.jsonl", "schedule.jsonl"):
        (run_dir / name).unlink()
    run = read_run(str(run_dir))
    assert (run.epochs, run.rounds, run.result) == ([], [], None)
    assert run.first_step(1) == 0


def test_an_incomplete_last_line_is_left_out(run_dir: Path) -> None:
    with (run_dir / "epochs.jsonl").open("a") as file:
        file.write('{"schema_version": 1, "epo')
    assert len(read_run(str(run_dir)).epochs) == 3


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("epochs.jsonl", "{", "EOF"),
        ("epochs.jsonl", "[]", "object"),
        ("rounds.jsonl", '{"epoch": 2}', "stage"),
        ("schedule.jsonl", '{"epoch": 2}', "optimizer"),
        ("epochs.jsonl", json.dumps(epoch_line(2, lr="fast")), "lr"),
        ("epochs.jsonl", json.dumps(epoch_line(2, schema_version=99)), "schema_version"),
    ],
)
def test_a_damaged_line_is_named(run_dir: Path, name: str, line: str, message: str) -> None:
    file = run_dir / name
    lines = file.read_text().split("\n")[:-1]
    lines[1] = line
    file.write_text("\n".join(lines) + "\n")
    with pytest.raises(RecordError) as error:
        read_run(str(run_dir))
    assert f"{file}, line 2" in str(error.value)
    assert message in str(error.value)


def test_a_line_that_is_not_utf_8_is_named(run_dir: Path) -> None:
    file = run_dir / "epochs.jsonl"
    file.write_bytes(file.read_bytes() + b"\xff\xfe\n")
    with pytest.raises(RecordError, match="line 4"):
        read_run(str(run_dir))


@pytest.mark.parametrize("name", ["result.json", "batch_size.json"])
@pytest.mark.parametrize("text", ["{", "[]", "{}", '"x"'])
def test_a_damaged_file_is_named(run_dir: Path, name: str, text: str) -> None:
    (run_dir / name).write_text(text)
    with pytest.raises(RecordError, match=name):
        read_run(str(run_dir))
