"""Is the default number of compute threads good, alone and beside programs that use the cores?

    python -m benchmarks.busy_cores [--busy 2] [--pairs 5] [--seconds 5] [--ray] [--model resnet8]

Trains one job with the default, and with each number of threads from 1 to the number of cores
whose waiting threads sleep (OMP_WAIT_POLICY=passive) or spin (active); beside `--busy` processes
that compute all the time. Each training is a process of its own, started by the command line as a
user does it, in one process or on Ray. Choices are interleaved: a pair runs each of them once, in
an order that rotates. Samples/s are the median of epochs.jsonl over `--seconds` seconds, without
start, imports and the first epoch; of a training without such an epoch after four times as long,
an upper bound. `ratio`: median over the pairs of samples/s of a choice / of the default. The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.common import machine
from raytrain_opt import Job
from raytrain_opt.config.load import dump_job

SAMPLES = 256  # of an epoch
_START_LIMIT_S = 300.0  # until the first epoch, on a machine with much other work


def make_transformer() -> nn.Module:
    """Return a small transformer over the rows of an image, as a user's function."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    first, last = (nn.Flatten(1, 2), nn.Linear(8, 64)), (nn.Flatten(), nn.Linear(512, 10))
    return nn.Sequential(*first, encoder, *last)


def make_data() -> tuple[TensorDataset, TensorDataset]:
    """Return noise with labels; its speed is that of images."""
    torch.manual_seed(0)
    x, y = torch.randn(SAMPLES, 1, 8, 8), torch.arange(SAMPLES) % 10
    return TensorDataset(x, y), TensorDataset(x[:16], y[:16])


def job(model: str, folder: str) -> Job:
    """Return the job, which leaves the number of threads open."""
    never = {"every_epochs": 100_000}
    values = {
        "model": "benchmarks.busy_cores:make_transformer" if model == "transformer" else model,
        "data": {
            "name": "benchmarks.busy_cores:make_data",
            "num_classes": 10,
            "loader_workers": 0,
        },
        "epochs": 100_000,
        "global_batch_size": 32,
        "learning_rate": {"policy": "schedule", "initial": 0.001, "shape": "constant"},
        "workers": {"count": 1},
        "evaluate": never,
        "checkpoint": never,
        "storage_path": folder,
    }
    return Job.model_validate(values)


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep this number of processes that compute."""
    command = [sys.executable, "-c", "while True: pass"]
    started = [subprocess.Popen(command) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()


def samples_per_s(model: str, threads: int | None, policy: str | None, args: Any) -> float:
    """Train with a choice (None: the default) and return its speed."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    if policy is not None:
        variables["OMP_WAIT_POLICY"] = policy
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "job.yaml")
        file.write_text(dump_job(job(model, folder)))
        command = [sys.executable, "-m", "raytrain_opt", "run", str(file)]
        command += [] if threads is None else ["--set", f"workers.threads={threads}"]
        command += [] if args.ray else ["--in-process"]
        training = subprocess.Popen(
            command, env=variables, start_new_session=True, stdout=subprocess.DEVNULL
        )
        try:
            return _watch(training, Path(folder), args.seconds)
        finally:
            training.send_signal(signal.SIGTERM)
            training.wait(_START_LIMIT_S)


def _watch(training: subprocess.Popen[bytes], folder: Path, seconds: float) -> float:
    began_s, first_s = time.monotonic(), math.inf
    while training.poll() is None:
        time.sleep(0.1)
        files = list(folder.glob("*/epochs.jsonl"))
        epochs = [json.loads(line) for line in files[0].read_text().splitlines()] if files else []
        now_s = time.monotonic()
        first_s = min(first_s, now_s) if epochs else math.inf
        if now_s > first_s + seconds and len(epochs) > 1:
            return float(median(epoch["samples_per_s"] for epoch in epochs[1:]))
        if now_s > min(first_s + 4 * seconds, began_s + _START_LIMIT_S):
            return SAMPLES / (4 * seconds)
    raise RuntimeError(f"the training ended with {training.returncode}")


def measure(model: str, choices: Sequence[tuple[int | None, str | None]], args: Any) -> Any:
    """Return the speeds of each choice, and their ratio to the default, the first choice."""
    speeds: dict[Any, list[float]] = {choice: [] for choice in choices}
    for pair in range(args.pairs):
        for i in range(len(choices)):
            choice = choices[(pair + i) % len(choices)]
            with busy(args.busy):
                speeds[choice].append(samples_per_s(model, *choice, args))
        print(pair, {str(c): round(s[-1], 1) for c, s in speeds.items()}, flush=True)
    default = speeds[choices[0]]
    return {
        f"{choice[0] or 'default'} {choice[1] or ''}".strip(): {
            "samples_per_s": [round(speed, 1) for speed in values],
            "ratio": round(median(a / b for a, b in zip(values, default, strict=True)), 3),
        }
        for choice, values in speeds.items()
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--busy", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--model", default="transformer")
    parser.add_argument("--ray", action="store_true")
    args = parser.parse_args()
    numbers = range(1, len(os.sched_getaffinity(0)) + 1)
    choices = [(None, None), *((n, policy) for n in numbers for policy in ("passive", "active"))]
    load = os.getloadavg()[0]
    rows = measure(args.model, choices, args)
    result = {**vars(args), "load_before": load, "machine": machine(), "choices": rows}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
