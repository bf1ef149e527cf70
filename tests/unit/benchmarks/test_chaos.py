"""The chaos benchmark: when it kills, what it counts, and series made in pieces."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import chaos
from benchmarks.chaos import Outcome, Run, disturb


class FakeRun(Run):
    """A run whose first command writes a checkpoint and waits; later ones write one and end."""

    def start(self) -> subprocess.Popen[bytes]:
        command = "pass" if self.marks else "import time; time.sleep(60)"
        self.marks.append(f"{self.folder} {len(self.marks)}")
        process = subprocess.Popen(
            [sys.executable, "-c", command], env={**os.environ, chaos.MARK: self.marks[-1]}
        )
        run = self.folder / "run" / "checkpoints"
        run.mkdir(parents=True, exist_ok=True)
        checkpoint = {"epoch": len(self.marks), "rounds": 0, "steps": 0}
        (run / "index.json").write_text(json.dumps({"checkpoints": [checkpoint]}))
        with (self.folder / "run" / "epochs.jsonl").open("a") as records:
            records.write("{}\n")
        (self.folder / "log.txt").touch()
        return process

    def digest(self) -> str:
        return "digest"


def test_a_killed_driver_is_restarted_at_once_and_counted(tmp_path: Path) -> None:
    outcome = Outcome(1, "driver")
    undisturbed = Outcome(1, "", records=2, digest="digest")
    disturb(FakeRun(tmp_path, outcome, 1), random.Random(0), undisturbed)
    assert (outcome.faults, outcome.completed, outcome.identical) == (1, True, True)
    assert (outcome.restarts, outcome.lost_checkpoint, outcome.leaked) == (1, False, [])
    assert outcome.recovery_s is not None
    assert 0 < outcome.lost_s < 60


COMMAND = """
import sys
from pathlib import Path
from benchmarks.chaos_command import set_faults
from raytrain_opt.clock import utc_now
from raytrain_opt.execution.workspace import lock_run_directory
set_faults(["no_locks", "-864000"])
with lock_run_directory(Path(sys.argv[1])) as sign:
    print(sign(), utc_now())
"""


def test_a_command_meets_the_faults_of_its_machine(tmp_path: Path) -> None:
    """In a process of its own: the faults stay."""
    command = [sys.executable, "-c", COMMAND, str(tmp_path)]
    held, date = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert held == "False"
    error = datetime.now(UTC) - datetime.fromisoformat(date)
    assert abs(error.total_seconds() - 864000) < 600
