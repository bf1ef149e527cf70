"""What the chaos benchmark counts, and that its runs can be made in pieces."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import chaos
from chaos import Outcome, Quiet, Run, disturb, read, summary

QUIET = Quiet(1, "digest", 2)


class Pretended(Run):
    """Its first command makes a commit and waits; the next ones make another and end."""

    def start(self) -> subprocess.Popen[bytes]:
        command = "pass" if self._marks else "import time; time.sleep(60)"
        self._marks.append(f"{self.storage} {len(self._marks)}")
        process = subprocess.Popen(
            [sys.executable, "-c", command], env={**os.environ, chaos.MARK: self._marks[-1]}
        )
        run = self.storage / "run" / "checkpoints"
        run.mkdir(parents=True, exist_ok=True)
        commit = {"epoch": len(self._marks), "test_accuracy": None, "sha256": {}}
        (run / "index.json").write_text(json.dumps({"commits": [commit]}))
        with (self.storage / "run" / "epochs.jsonl").open("a") as records:
            records.write("{}\n")
        (self.storage / "log.txt").touch()
        return process

    def result(self) -> str:
        return "digest"


def test_a_killed_driver_is_started_again_at_once_and_counted(tmp_path: Path) -> None:
    outcome = Outcome(1, "driver")
    disturb(Pretended(tmp_path, 1), outcome, random.Random(0), QUIET)
    assert (outcome.killed, outcome.completed, outcome.identical) == (True, True, True)
    assert (outcome.started_again, outcome.lost_commit, outcome.leaked) == (1, False, [])
    assert outcome.recovery_s is not None


def test_a_kill_comes_after_any_record_but_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is over cannot be hit, however quick it was."""
    run, records = Pretended(tmp_path, 1), tmp_path / "run" / "epochs.jsonl"
    command = run.start()

    def another(_seconds: float) -> None:
        with records.open("a") as file:
            file.write("{}\n")

    monkeypatch.setattr(chaos, "sleep", another)
    monkeypatch.setattr(chaos, "monotonic_s", lambda: 0.0)
    reached = set()
    for seed in range(40):
        records.write_text("")
        chaos._wait(run, command, random.Random(seed), Quiet(1, "digest", 5))
        reached.add(run.records())
    command.kill()
    command.wait()
    assert reached == {1, 2, 3, 4}


def test_outcomes_are_kept_and_added_up(tmp_path: Path) -> None:
    file = tmp_path / "outcomes.jsonl"
    worker = Outcome(1, "worker", True, True, True, recovery_s=10.0)
    driver = Outcome(2, "driver", True, True, False, True, ["agent"], 80.0, 1)
    late = Outcome(3, "slot", True, killed=False, identical=True, recovery_s=0.0)
    chaos._append(file, QUIET)
    for outcome in (worker, driver, late):
        chaos._append(file, outcome)
    assert read(file) == (QUIET, [worker, driver, late])
    found = summary([worker, driver, late])
    assert [found[name] for name in ("runs", "kills", "completed")] == [3, 2, 3]
    assert [found[name] for name in ("bit_identical", "lost_commits")] == [2, 1]
    assert [found[name] for name in ("leaked_processes", "started_again")] == [1, 1]
    assert found["median_recovery_s"] == pytest.approx(45.0)
    assert found["recovery_s"] == {"worker": 10.0, "driver": 80.0}
