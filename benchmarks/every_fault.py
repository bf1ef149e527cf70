"""A run that is disturbed at every step, every command and every file operation, and resumed.

    python -m benchmarks.every_fault [--quick] [--policies POLICY ...] [--processes 2]
        [--actions ACTION ...] [--every N]

The job trains 200 steps in one process, without Ray: a network with BatchNorm and dropout, Muon,
an average of weights, searches, evaluations and checkpoints. Places at which it is disturbed are
those that an undisturbed run passes: before each step of a candidate or of the training, before
and after each command, before each operation that changes a file below `storage_path` (files are
opened to write, made durable, renamed, cut and removed) and before each append to a record. At
each place, in turn,

    kill      the process ends at once, as by SIGKILL: nothing is cleaned up, no buffer is written
    tear      the same with half of what is appended to a record written (only there)
    again     as `kill`; the command that resumes the run is killed, too, at a random place
    sigterm   the process gets SIGTERM, saves what it has and ends

and the same command is started again (`resume: auto`) until the run has a result. Each command is
a fork of a process that has trained before, so it takes a fraction of a second.

The last line printed is one JSON object: `faults` is the number of disturbed runs, `identical` of
those that end with the state (weights, buffers, optimizer) and the records of the undisturbed run,
apart from times. `worst_lost_steps` is the largest number of steps that the commands of one run
have trained beyond those of the undisturbed run, steps of candidates included; `by_action` has the
same by action, `steps` what an undisturbed run trains, `different` the places (at most ten) whose
runs are not identical, `places` how many there are. --quick: a few places of each kind.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import re
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

from benchmarks.common import run_digest, synthetic_images
from raytrain_opt import Job, run
from raytrain_opt.paths import find_runs
from raytrain_opt.pools import in_process
from raytrain_opt.pools.commands import Command, Evaluate
from raytrain_opt.recording import recorder
from raytrain_opt.report import page
from raytrain_opt.storage import append_lines

POLICIES: dict[str, dict[str, Any]] = {
    "stpt": {"candidates": [1.0, 0.5], "alpha": 5},
    "stpt_horizon": {"max_search_cost": 1.0},
}
RECORDS = ("rounds.jsonl", "epochs.jsonl", "schedule.jsonl", "predictions.json", "result.json")
ACTIONS = ("kill", "tear", "again", "sigterm")
SAMPLES, TEST_SAMPLES, EPOCHS, BATCH, CHECKPOINT_STEPS = 360, 40, 5, 8, 10
# A run needs two after a fault, three where it happens again; more mean that it never ends.
MAX_COMMANDS = 5
# Audit events of Python that change files, and where their arguments have paths and directories.
CHANGES = {
    "os.rename": ((0, 2), (1, 3)),
    "os.remove": ((0, 1),),
    "os.rmdir": ((0, 1),),
    "os.mkdir": ((0, 2),),
    "os.chmod": ((0, None),),
    "os.truncate": ((0, None),),
}
# What differs between runs in names of files: of the run, temporary ones, and of TensorBoard.
NAMES = {
    r"^\w+-\d{8}-\d{6}-[0-9a-f]{16}/?": "",
    r"\.\d+\.tmp": ".tmp",
    r"tensorboard/.*": "tensorboard",
}


class Network(nn.Sequential):
    """A small network with state that training changes beside the weights."""

    def __init__(self, num_classes: int, sample_shape: tuple[int, ...]) -> None:
        layers = (nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1))
        super().__init__(nn.Flatten(), *layers, nn.Linear(8, num_classes))


@dataclass(frozen=True)
class Fault:
    """What happens at the n-th time that a run comes to a place; `place` None: to any place."""

    place: str | None
    number: int
    action: str


@dataclass
class Watch:
    """The places that a command passes, and the fault that it meets at one of them.

    `trained`: memory that the command shares with the process that has started it.
    """

    folder: Path
    fault: Fault | None = None
    trained: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, 8))
    passed: Counter[str | None] = field(default_factory=Counter)

    @property
    def steps(self) -> int:
        """The steps that commands have trained."""
        return int.from_bytes(self.trained[:8], "little")

    def count_step(self) -> None:
        """Count a step, also if this process ends right after it."""
        self.trained[:8] = (self.steps + 1).to_bytes(8, "little")

    def meet(self, place: str, tear: Callable[[], None] = lambda: None) -> None:
        """Pass a place; `tear` does half of what comes next."""
        for key in (place, None):
            self.passed[key] += 1
            fault = self.fault
            if fault is None or (fault.place, fault.number) != (key, self.passed[key]):
                continue
            if fault.action == "sigterm":
                os.kill(os.getpid(), signal.SIGTERM)
                continue
            if fault.action == "tear":
                tear()
            os._exit(-signal.SIGKILL % 256)

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Meet what changes a file below the folder."""
        if event == "open":
            path, mode, flags = arguments
            writes = flags & (os.O_WRONLY | os.O_RDWR) if mode is None else set(mode) & set("wax+")
            if writes:
                self._change("open", path)
        for path, directory in CHANGES.get(event, ()):
            self._change(
                event, arguments[path], None if directory is None else arguments[directory]
            )

    def _change(self, operation: str, path: object, directory: int | None = None) -> None:
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        name = os.fsdecode(path)  # type: ignore[arg-type]
        if directory not in (None, -1):
            name = os.path.join(os.readlink(f"/proc/self/fd/{directory}"), name)
        if name.startswith(f"{self.folder}/"):
            name = name.removeprefix(f"{self.folder}/")
            for pattern, replacement in NAMES.items():
                name = re.sub(pattern, replacement, name)
            self.meet(f"{operation} {name}")

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch this process, in which one command runs."""
        sync, watch = os.fsync, self

        class WatchedPool(in_process.InProcessPool):
            def command(self, command: Command, expected: Sequence[int] | None = None) -> Any:
                self.trains = not isinstance(command, Evaluate)
                watch.meet(f"before {command.name} of {self.name}")
                reply = super().command(command, expected)
                watch.meet(f"after {command.name} of {self.name}")
                return reply

            def _on_step(self, done: int, total: int) -> None:
                watch.meet(f"step of {self.name}")
                super()._on_step(done, total)
                if self.trains:
                    watch.count_step()

        def fsync(descriptor: int) -> None:
            watch._change("fsync", descriptor)
            sync(descriptor)

        def append(path: Path, lines: Sequence[str]) -> None:
            def tear() -> None:
                append_lines(path, lines)
                os.truncate(path, path.stat().st_size - len(lines[-1]) // 2)

            if lines:
                watch.meet(f"append {path.name}", tear)
            append_lines(path, lines)

        sys.addaudithook(self.audit)
        with (
            mock.patch.object(in_process, "InProcessPool", WatchedPool),
            mock.patch.object(recorder, "append_lines", append),
            mock.patch.object(os, "fsync", fsync),
        ):
            yield


def job_of(policy: str, data: Path, folder: Path) -> Job:
    """Return the job of a policy, with arrays in the folder `data`."""
    arrays = {s: [f"{data}/{s}-{part}.npy" for part in "xy"] for s in ("train", "test")}
    return Job.model_validate(
        {
            "name": "faults",
            "model": Network,
            "data": {"name": "arrays", "validation_fraction": 0.1, **arrays},
            "epochs": EPOCHS,
            "global_batch_size": BATCH,
            "learning_rate": {"policy": policy, "initial": 0.1, **POLICIES[policy]},
            "optimizer": "Muon",
            "average": 0.5,
            "checkpoint": {"every": CHECKPOINT_STEPS},
            "workers": {"count": 1, "threads": 1},
            "storage_path": str(folder),
            "resume": "auto",
        }
    )


def write_data(folder: Path) -> None:
    """Write the arrays of the jobs."""
    x, y = synthetic_images(SAMPLES + TEST_SAMPLES, (4, 4, 1), 4)
    for split, part in (("train", slice(SAMPLES)), ("test", slice(SAMPLES, None))):
        np.save(folder / f"{split}-x.npy", x[part])
        np.save(folder / f"{split}-y.npy", y[part])


def execute(job: Job, watch: Watch) -> int:
    """Run the job in a fork of this process; return its exit code, negative for a signal."""
    process = os.fork()
    if process:
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    code = 1
    try:
        log = os.open(watch.folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(log, stream)
        with watch.watching():
            run(job, in_process=True)
        code = 0
        if watch.fault is None:
            places = json.dumps({place: n for place, n in watch.passed.items() if place})
            (watch.folder / "places.json").write_text(places)
    except KeyboardInterrupt:
        code = 143
    except BaseException:  # noqa: BLE001 - a fork must not return
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def digest_of(folder: Path) -> str:
    """Return a digest of everything of the latest run that must not depend on a fault."""
    return run_digest(find_runs(str(folder))[0].run_dir, RECORDS)


@dataclass(frozen=True)
class Undisturbed:
    """The undisturbed run of a policy."""

    digest: str
    steps: int
    places: dict[str, int]

    @classmethod
    def train(cls, policy: str, data: Path, folder: Path) -> Undisturbed:
        """Train it in the folder."""
        watch = Watch(folder)
        if execute(job_of(policy, data, folder), watch):
            raise SystemExit((folder / "log.txt").read_text())
        places = json.loads((folder / "places.json").read_text())
        return cls(digest_of(folder), watch.steps, places)

    def faults(self, actions: Sequence[str], every: int, *, quick: bool) -> list[Fault]:
        """Return each action at each n-th place, or once for each kind of place (`quick`)."""
        places = [(place, n + 1) for place, times in self.places.items() for n in range(times)]
        places = places[::every]
        if quick:
            places = list({place.split()[0]: (place, n) for place, n in places}.values())
        return [
            Fault(place, number, action)
            for action in actions
            for place, number in places
            if action != "tear" or place.startswith("append")
        ]


@dataclass(frozen=True)
class Outcome:
    """What became of one disturbed run. `lost`: steps trained beyond the undisturbed run's."""

    fault: Fault
    identical: bool
    lost: int


def disturb(policy: str, data: Path, undisturbed: Undisturbed, fault: Fault) -> Outcome:
    """Disturb a run, and start the command again until it has a result."""
    with tempfile.TemporaryDirectory(dir=data) as name:
        folder = Path(name)
        job, watch = job_of(policy, data, folder), Watch(folder, fault)
        identical = False
        for _ in range(MAX_COMMANDS):
            if execute(job, watch) == 0:
                identical = digest_of(folder) == undisturbed.digest
                break
            repeats = fault.action == "again" and watch.fault is fault
            passed = sum(undisturbed.places.values())
            number = random.Random(f"{fault}").randrange(1, passed)
            watch.fault = Fault(None, number, "kill") if repeats else None
            watch.passed.clear()
        return Outcome(fault, identical, watch.steps - undisturbed.steps)


def main() -> None:
    args = _arguments()
    torch.set_num_threads(1)
    vars(page)["report_page"] = lambda _: "no plots"  # they take longer than the training
    memory = Path("/dev/shm")  # a killed process loses no file that it has written
    outcomes: list[Outcome] = []
    summary: dict[str, Any] = {"places": {}, "steps": {}}
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        data = Path(name)
        write_data(data)
        for policy in args.policies:
            (folder := data / policy).mkdir()
            with (folder / "warm-up.txt").open("w") as log, mock.patch.object(sys, "stdout", log):
                run(job_of(policy, data, folder / "warm-up"), in_process=True)
            undisturbed = Undisturbed.train(policy, data, folder)
            faults = undisturbed.faults(args.actions, args.every, quick=args.quick)
            with get_context("fork").Pool(args.processes) as pool:
                one = partial(disturb, policy, data, undisturbed)
                for done, outcome in enumerate(pool.imap_unordered(one, faults), start=1):
                    outcomes.append(outcome)
                    if done % 100 == 0 or not outcome.identical:
                        print(f"{policy}: {done} of {len(faults)}, {outcome}", flush=True)
            summary["places"][policy] = sum(undisturbed.places.values())
            summary["steps"][policy] = undisturbed.steps
    print(json.dumps({**_figures(outcomes), **summary}))


def _figures(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    def of(some: Sequence[Outcome]) -> dict[str, int]:
        return {
            "faults": len(some),
            "identical": sum(outcome.identical for outcome in some),
            "worst_lost_steps": max((outcome.lost for outcome in some), default=0),
        }

    actions = dict.fromkeys(outcome.fault.action for outcome in outcomes)
    by_action = {a: of([o for o in outcomes if o.fault.action == a]) for a in actions}
    different = (str(outcome.fault) for outcome in outcomes if not outcome.identical)
    return {**of(outcomes), "by_action": by_action, "different": list(islice(different, 10))}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Disturb a run at every place, and resume it.")
    parser.add_argument("--quick", action="store_true", help="one place of each kind")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--actions", nargs="+", choices=ACTIONS, default=ACTIONS)
    parser.add_argument("--every", type=int, default=1, help="only each N-th place")
    parser.add_argument("--processes", type=int, default=2, help="runs at the same time")
    return parser.parse_args()


if __name__ == "__main__":
    main()
