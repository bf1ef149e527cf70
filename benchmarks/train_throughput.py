"""Samples per second of the main training against a plain torchrun DDP script.

    python -m benchmarks.train_throughput [--pairs 5] [--epochs 5] [--model resnet8] [--scaling]

Both sides train the same network (built by raytrain_opt.models) with the same optimizer and
constant rate, global batch, threads per process and data: synthetic uint8 images of CIFAR's
shape, written to a temporary folder, so nothing is downloaded. No augmentation, normalized per
batch. Ours is `raytrain_opt.run` with `policy: schedule`; the other side is plain_ddp.py.

What the timers cover. `samples_per_s_*`: samples of all epochs after the first, over the seconds
of rank 0's loop of steps in them: gathering a batch, forward, backward with all-reduce, update and
the one wait for the sums of loss and hits. `ratio_epoch_median` compares complete epochs: on our
side also the driver's command, averaging BatchNorm buffers, handing over the state and writing
records (the evaluation after the last epoch is subtracted); on the other side the reduction of
the sums. Start-up counts on neither side.

The runs alternate, and so does the order within a pair, so that a drift of the machine affects
both. All our runs use one Ray session, which stays up, idle, during the other side's runs; its
processes have the environment that a run gives to a Ray that it starts itself. Ray lowers the
priority of its worker processes by 15 (RAY_worker_niceness); the other side's priority is lowered
by the same amount, otherwise a busy machine would favor it. And glibc returns the memory that a
process' main thread has freed to the system in every step (9,000 page faults a step for the
default model). Our workers are started with MALLOC_* settings that keep it, which torchrun does
not. "tuned" is the other side with such settings too (then 200 faults), and with the fused SGD
that ours has: `ratio_tuned` compares the loops alone. `scaling_*`: samples/s of all workers over
those of one worker with the same global batch, per worker, of our side and of the tuned one.

Measure on a machine with nothing else to do: beside other work, the kernel's distribution of time
between sessions (sched_autogroup) decides more than either loop.

The last line printed is one JSON object; a ratio is ours / plain, above 1 means that ours is
faster. On 2 cores a pair (three runs) takes about 90 seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.common import machine, synthetic_images
from raytrain_opt import Job, run
from raytrain_opt.cluster.connection import ray_session
from raytrain_opt.pools.launcher import environment
from raytrain_opt.recording.recorder import versions

PLAIN_SCRIPT = Path(__file__).with_name("plain_ddp.py")
CLASSES, IMAGE_SHAPE = 10, (32, 32, 3)
DEFAULT_ARGS = {"resnet8": {"width": 32}}
LR = 0.05
# Bytes. Blocks up to glibc's largest mmap threshold come from the heap, which is never trimmed.
KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(32 * 1024**2),
    "MALLOC_TRIM_THRESHOLD_": str(4 * 1024**3),
}


@dataclass(frozen=True)
class Speed:
    """One run's samples per second, over the loops of steps and over complete epochs."""

    loop: float
    epoch: float

    @classmethod
    def of(cls, samples: int, loop_s: Sequence[float], epoch_s: Sequence[float]) -> Speed:
        """Return the speed of all epochs but the first; `samples` per epoch."""
        return cls(
            samples * (len(loop_s) - 1) / sum(loop_s[1:]),
            samples * (len(epoch_s) - 1) / sum(epoch_s[1:]),
        )


def main() -> None:
    args = _arguments()
    variables = environment(local=True, start_s=120)
    with (
        tempfile.TemporaryDirectory() as folder,
        ray_session(None, verbose=False, environment=variables),
    ):
        files = write_images(Path(folder), args.samples)
        one = argparse.Namespace(**{**vars(args), "workers": 1})
        sides = {
            "ours": lambda: ours(args, files, folder),
            "plain": lambda: plain(args, files, {}),
            "tuned": lambda: plain(args, files, KEEP_FREED_MEMORY, "--fused"),
        }
        if args.scaling:
            sides["ours, one worker"] = lambda: ours(one, files, folder)
            sides["tuned, one worker"] = lambda: plain(one, files, KEEP_FREED_MEMORY, "--fused")
        pairs: list[dict[str, Speed]] = []
        for pair in range(args.pairs):
            order = list(sides) if pair % 2 == 0 else list(reversed(sides))
            pairs.append({side: sides[side]() for side in order})
            speeds = {side: f"{pairs[-1][side].loop:.1f}" for side in sides}
            print(f"pair {pair + 1} of {args.pairs}, samples/s: {speeds}", flush=True)
    print(json.dumps(report(args, pairs)))


def ours(args: argparse.Namespace, files: tuple[str, str], folder: str) -> Speed:
    """Run the package in the Ray session that is up."""
    job = Job.model_validate(
        {
            "name": "train-throughput",
            "model": {"name": args.model, "args": DEFAULT_ARGS.get(args.model, {})},
            "data": {"name": "arrays", "train": files, "test": files, "validation_fraction": 0},
            "epochs": args.epochs,
            "global_batch_size": args.global_batch_size,
            "learning_rate": {"policy": "schedule", "shape": "constant", "initial": LR},
            "workers": {"count": args.workers, "threads": args.threads},
            "evaluate": {"every_epochs": args.epochs},
            "checkpoint": {"every_epochs": args.epochs},
            "storage_path": f"{folder}/runs",
        }
    )
    lines = Path(run(job).run_dir, "epochs.jsonl").read_text().splitlines()
    epochs = [json.loads(line) for line in lines]
    return Speed.of(
        epochs[0]["samples"],
        [epoch["samples"] / epoch["samples_per_s"] for epoch in epochs],
        [epoch["duration_s"] - epoch["timings_s"].get("evaluate_s", 0.0) for epoch in epochs],
    )


def plain(
    args: argparse.Namespace, files: tuple[str, str], memory: dict[str, str], *flags: str
) -> Speed:
    """Run the torchrun script at the priority that Ray gives to its workers."""
    niceness = int(os.environ.get("RAY_worker_niceness", "15"))  # noqa: SIM112 - Ray's name
    options = {
        "--x": files[0],
        "--y": files[1],
        "--classes": CLASSES,
        "--model": args.model,
        "--model-args": json.dumps(DEFAULT_ARGS.get(args.model, {})),
        "--epochs": args.epochs,
        "--global-batch-size": args.global_batch_size,
        "--threads": args.threads,
        "--lr": LR,
    }
    launcher = ["nice", "-n", str(niceness), sys.executable, "-m", "torch.distributed.run"]
    processes = ["--standalone", f"--nproc-per-node={args.workers}", str(PLAIN_SCRIPT)]
    arguments = [str(part) for option in options.items() for part in option]
    done = subprocess.run(
        [*launcher, *processes, *arguments, *flags],
        env={**os.environ, **memory, "OMP_NUM_THREADS": str(args.threads)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    result = json.loads(done.stdout.splitlines()[-1])
    return Speed.of(result["samples"], result["loop_s"], result["epoch_s"])


def report(args: argparse.Namespace, pairs: Sequence[dict[str, Speed]]) -> dict[str, object]:
    ratios = [pair["ours"].loop / pair["plain"].loop for pair in pairs]
    tuned = [pair["ours"].loop / pair["tuned"].loop for pair in pairs]
    scaling = {
        f"scaling_{side}": round(
            median(p[side].loop / p[f"{side}, one worker"].loop for p in pairs) / args.workers, 4
        )
        for side in ("ours", "tuned")
        if args.scaling
    }
    epoch_ratios = [pair["ours"].epoch / pair["plain"].epoch for pair in pairs]
    return {
        "ratio_median": round(median(ratios), 4),
        "ratio_min": round(min(ratios), 4),
        "ratio_max": round(max(ratios), 4),
        "ratio_tuned": round(median(tuned), 4),
        "ratio_tuned_range": [round(min(tuned), 4), round(max(tuned), 4)],
        "ratio_epoch_median": round(median(epoch_ratios), 4),
        **scaling,
        "pairs": len(pairs),
        "samples_per_s_ours": [round(pair["ours"].loop, 1) for pair in pairs],
        "samples_per_s_plain": [round(pair["plain"].loop, 1) for pair in pairs],
        "samples_per_s_tuned": [round(pair["tuned"].loop, 1) for pair in pairs],
        "model": args.model,
        "global_batch_size": args.global_batch_size,
        "steps_per_epoch": args.samples // args.global_batch_size,
        "epochs_timed": args.epochs - 1,
        "workers": args.workers,
        "threads": args.threads,
        "machine": machine(),
        "versions": versions(),
    }


def write_images(folder: Path, samples: int) -> tuple[str, str]:
    """Write synthetic images and their labels as .npy files and return the paths."""
    images, labels = synthetic_images(samples, IMAGE_SHAPE, CLASSES)
    np.save(folder / "x.npy", images)
    np.save(folder / "y.npy", labels)
    return str(folder / "x.npy"), str(folder / "y.npy")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Main train against plain torchrun DDP.")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument(
        "--epochs", type=int, default=5, help="including the first, which is not timed"
    )
    parser.add_argument("--model", default="resnet8", choices=["resnet8", "cifar_resnet18"])
    parser.add_argument("--samples", type=int, default=2560, help="training images")
    parser.add_argument("--global-batch-size", type=int, default=128)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each worker")
    parser.add_argument("--scaling", action="store_true", help="also with one worker")
    args = parser.parse_args()
    if args.epochs < 2 or args.pairs < 1:
        parser.error("--epochs must be at least 2 (the first is not timed), --pairs at least 1")
    return args


if __name__ == "__main__":
    main()
