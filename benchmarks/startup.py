"""From the command to the first step of the main training, beside a bare TorchTrainer.

    python -m benchmarks.startup [--pairs 5]

Each round runs three commands one after the other, each in a new process that starts Ray on this
machine, on scikit-learn's digits with the quickstart's network and 2 workers:

    bare            `ray.train.torch.TorchTrainer` with `prepare_model` and SGD, as in Ray's guide
    without slots   `raytrain-opt run` with a fixed rate: the policy has no candidates
    with slots      the quickstart's policy: 4 candidates on 2 slots train and are scored first

`ratio_without_slots` and `ratio_with_slots` are medians of the ratios to `bare` in the same
round, of the seconds from the start of the process until rank 0 has made its first step (ours:
the end of the main training's first step, from the records). `quickstart_s` is the wall time of
the whole command `raytrain-opt run jobs/quickstart.yaml`, report and shutdown of Ray included.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import machine
from raytrain_opt.clock import monotonic_s
from raytrain_opt.recording.recorder import versions

ROOT = Path(__file__).parents[1]
JOB = ROOT / "jobs" / "quickstart.yaml"
# Prints the process's own start on the clock that all processes share, then runs the command.
LAUNCH = """
import time; print("STARTED", time.monotonic(), flush=True)
from raytrain_opt.cli import main; main()
"""
BARE = """
import time; started = time.monotonic()
import tempfile
import numpy as np, ray.train.torch, torch
from ray.train import ScalingConfig, RunConfig
from ray.train.torch import TorchTrainer

def train():
    from sklearn.datasets import load_digits
    from raytrain_opt.config.schema import ModelSection
    from raytrain_opt.models import build_model
    torch.set_num_threads(1)
    digits = load_digits()
    images = torch.tensor(digits.images[:32], dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target[:32])
    section = ModelSection(name="small_cnn")
    model = build_model(section, num_classes=10, sample_shape=(1, 8, 8), seed=0)
    model = ray.train.torch.prepare_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
    if ray.train.get_context().get_world_rank() == 0:
        print("STEPPED", time.monotonic(), flush=True)

TorchTrainer(
    train,
    scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
    run_config=RunConfig(storage_path=tempfile.mkdtemp()),
).fit()
"""
FIXED_RATE = ("learning_rate={policy: schedule, initial: 0.1}",)


def bare_s() -> float:
    """Return the seconds from the start of the command to the first step."""
    began_s = monotonic_s()
    output = run_command([sys.executable, "-c", BARE])
    return float(output.split("STEPPED", 1)[1].split()[0]) - began_s


def ours_s(overrides: Sequence[str]) -> float:
    """Return the seconds from the start of the command to the first step of the main training."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", LAUNCH, "run", str(JOB), "--set", "epochs=1"]
        for override in (*overrides, f"storage_path={folder}"):
            command += ["--set", override]
        began_s = monotonic_s()
        output = run_command(command)
        (run_dir,) = (path for path in Path(folder).iterdir() if path.is_dir())
        epoch = json.loads((run_dir / "epochs.jsonl").read_text())
    started_s = float(output.split("STARTED", 1)[1].split()[0])
    return started_s - began_s + first_step_s(epoch)


def first_step_s(epoch: dict[str, Any]) -> float:
    """Return the seconds of the run until the first update of an epoch's main training."""
    parts_s = epoch["timings_s"]
    train_s, load_s = float(parts_s["main_train_s"]), float(parts_s["main_load_s"])
    start_s = float(epoch["end_s"]) - float(parts_s["evaluate_s"]) - train_s
    return start_s + load_s + (train_s - load_s) / STEPS


STEPS = 22  # of the quickstart's epoch; with slots a quarter less, which changes 10 ms


def run_command(command: list[str]) -> str:
    """Run a command and return its output. Raises RuntimeError with the output if it fails."""
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise RuntimeError(done.stdout)
    return done.stdout


def quickstart_s() -> float:
    """Return the wall time of the quickstart."""
    with tempfile.TemporaryDirectory() as folder:
        began_s = monotonic_s()
        command = [sys.executable, "-m", "raytrain_opt", "run", str(JOB)]
        run_command([*command, "--set", f"storage_path={folder}"])
        return monotonic_s() - began_s


def main() -> None:
    """Run the rounds and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    arguments = parser.parse_args()
    rows = []
    for number in range(arguments.pairs):
        row = {
            "bare_s": bare_s(),
            "without_slots_s": ours_s(FIXED_RATE),
            "with_slots_s": ours_s(()),
            "quickstart_s": quickstart_s(),
        }
        rows.append(row)
        print(f"round {number + 1}:", {name: round(value, 1) for name, value in row.items()})

    def ratio(name: str) -> float:
        return median(row[name] / row["bare_s"] for row in rows)

    report = {
        "ratio_with_slots": ratio("with_slots_s"),
        "ratio_without_slots": ratio("without_slots_s"),
        **{name: median(row[name] for row in rows) for name in rows[0]},
        "rows": rows,
        "machine": machine(),
        "versions": versions(),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
