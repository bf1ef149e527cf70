"""The benchmark of faults: one place of each kind, and a run that is not resumed to the bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.every_fault import CHECKPOINT_STEPS, Fault, Watch

COMMAND = ["-m", "benchmarks.every_fault", "--quick", "--policies", "stpt", "--processes", "1"]


def test_a_run_that_is_killed_at_each_kind_of_place_is_resumed_to_the_bit() -> None:
    command = [sys.executable, *COMMAND, "--actions", "kill", "tear"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["identical"] == figures["faults"] > 10
    assert figures["places"]["stpt"] > 500
    assert figures["steps"]["stpt"] == 225
    # At most `checkpoint.every`, in candidates as in the training.
    assert 0 < figures["worst_lost_steps"] <= CHECKPOINT_STEPS


def test_the_places_of_a_command_have_no_random_names(tmp_path: Path) -> None:
    watch = Watch(tmp_path, Fault("open .job.yaml.tmp", 3, "kill"))
    run_dir = tmp_path / "faults-20260101-000000-0123456789abcdef"
    for number in (1, 2):
        watch.audit("open", (f"{run_dir}/.job.yaml.{number}.tmp", "w", 0))
    watch.audit("open", (f"{run_dir}/job.yaml", "r", 0))
    watch.audit("os.rename", (f"{run_dir}/.job.yaml.1.tmp", f"{run_dir}/job.yaml", -1, -1))
    names = ["open .job.yaml.tmp", "os.rename .job.yaml.tmp", "os.rename job.yaml"]
    assert dict(watch.passed) == {names[0]: 2, names[1]: 1, names[2]: 1, None: 4}
