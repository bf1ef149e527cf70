"""Runs of the quickstart job, each with a `kill -9` at a random time of a random process.

    python benchmarks/chaos.py [--runs 20] [--seed 0] [--epochs 8] [--only ROLE ...]

Roles: a worker, a candidate's slot, the mailbox, the host of the pools, and the driver. A run
that dies of it is started again with the same command (`resume: auto`), as a shell loop or a
cluster would; the others go on by themselves. Each is compared with one that nobody disturbed.

    runs, kills         asked for, and processes killed
    completed           ended with a result
    bit_identical       the same weights and the same numbers in rounds.jsonl as undisturbed
    lost_commits        runs that were resumed from before what their index named at the kill
    leaked_processes    of all that a command started, still alive 20 s after its end
    median_recovery_s   from the kill until the run's records are written again: the time of
                        restarts, and what was trained again of the phase that was hit
    started_again       by us, after the whole command died

Each kill comes at a random time between the first commit and what is left of the undisturbed
run's duration. On 2 cores a run takes 1 to 2 minutes. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import sleep
from typing import Any

import psutil
from common import machine

from raytrain_opt.clock import monotonic_s
from raytrain_opt.telemetry.records import versions
from raytrain_opt.train.checkpoint import Commit, read_index, read_weights

ROOT = Path(__file__).parents[1]
# How Ray writes each into its command line; the driver is the command itself.
TITLES = {
    "worker": "ray::RayTrainWorker",
    "slot": "ray::ImplicitFunc",
    "mailbox": "ray::Mailbox",
    "host": "ray::Host",
}
ROLES = (*TITLES, "driver")
MARK = "RAYTRAIN_OPT_CHAOS"
LIMIT_S = 900.0


@dataclass
class Outcome:
    """Of one run."""

    role: str
    completed: bool = False
    killed: bool = False
    identical: bool = False
    lost_commit: bool = False
    leaked: list[str] = field(default_factory=list)
    recovery_s: float | None = None
    started_again: int = 0


class Run:
    """One run directory and the commands that work on it."""

    def __init__(self, storage: Path, epochs: int) -> None:
        self.storage, self._epochs = storage, epochs
        # All that a command starts inherits it.
        self._mark = uuid.uuid4().hex

    def start(self) -> subprocess.Popen[bytes]:
        """The command; the same one goes on with what an earlier one left."""
        settings = {"storage_path": self.storage, "epochs": self._epochs, "resume": "auto"}
        given = [part for at in settings.items() for part in ("--set", "{}={}".format(*at))]
        log = (self.storage / "log.txt").open("ab")
        return subprocess.Popen(
            [sys.executable, "-m", "raytrain_opt", "run", "jobs/quickstart.yaml", *given],
            cwd=ROOT,
            env={**os.environ, MARK: self._mark},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    @property
    def folder(self) -> Path | None:
        """The run directory, once it is there."""
        return next((path for path in self.storage.iterdir() if path.is_dir()), None)

    def commits(self) -> list[Commit]:
        """Those that the index names."""
        return read_index(self.folder / "checkpoints") if self.folder else []

    def progress(self) -> tuple[int, int]:
        """Of the records: grows when the run gets on."""
        return tuple(  # type: ignore[return-value]
            sum(len(p.read_bytes().splitlines()) for p in self.storage.glob(f"*/{name}.jsonl"))
            for name in ("epochs", "rounds")
        )

    def processes(self) -> list[psutil.Process]:
        """All that the commands started and that still live."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            ended = process.status() == psutil.STATUS_ZOMBIE
            return not ended and process.environ().get(MARK) == self._mark
        except psutil.Error:
            return False

    def leaked(self) -> list[str]:
        """What lives on after the end, given some seconds."""
        deadline_s = monotonic_s() + 20
        while (left := self.processes()) and monotonic_s() < deadline_s:
            sleep(0.5)
        names = [process.name() for process in left]
        for process in left:
            process.kill()
        return names

    def result(self) -> dict[str, Any]:
        """What must not depend on a kill."""
        assert self.folder is not None
        rounds = [json.loads(at) for at in (self.folder / "rounds.jsonl").read_text().splitlines()]
        for line in rounds:
            del line["parts_s"]
            for candidate in line["candidates"]:
                del candidate["seconds"]
        weights = read_weights(self.folder / f"checkpoints/{self.commits()[-1].folder}")
        digests = {name: tensor.numpy().tobytes() for name, tensor in weights.items()}
        return {"rounds": rounds, "weights": digests}


def main() -> None:
    args = _arguments()
    chance = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        quiet = Run(_made(Path(folder) / "quiet"), args.epochs)
        started_s = monotonic_s()
        if quiet.start().wait(LIMIT_S):
            raise SystemExit((quiet.storage / "log.txt").read_text())
        training_s = monotonic_s() - started_s
        expected, outcomes = quiet.result(), []
        for number in range(args.runs):
            role = args.only[number % len(args.only)]
            run = Run(_made(Path(folder) / str(number)), args.epochs)
            outcomes.append(disturbed(run, role, chance.random(), training_s, expected))
            print(f"{number + 1}/{args.runs} {outcomes[-1]}", flush=True)
    print(json.dumps({**summary(outcomes), "machine": machine(), "versions": versions()}))


def disturbed(
    run: Run, role: str, chance: float, training_s: float, expected: dict[str, Any]
) -> Outcome:
    """One run with one kill; started again until it is done."""
    outcome, began_s = Outcome(role), monotonic_s()
    command = run.start()
    while not run.commits() and command.poll() is None:
        sleep(0.1)
    # What is left of it is known roughly; a run that is over cannot be hit.
    left_s = max(1.0, 0.8 * (training_s - (monotonic_s() - began_s)))
    due_s = monotonic_s() + chance * left_s
    while command.poll() is None and monotonic_s() < due_s:
        sleep(0.05)
    before = run.commits()
    outcome.killed, killed_s = _kill(run, command, role), monotonic_s()
    progress = run.progress()
    while outcome.recovery_s is None or command.poll() is None:
        if command.poll() not in (None, 0):
            outcome.leaked += run.leaked()
            if run.commits()[: len(before)] != before[: len(run.commits())]:
                outcome.lost_commit = True
            if outcome.started_again == 3:
                return outcome
            outcome.started_again += 1
            command = run.start()
        if outcome.recovery_s is None and (run.progress() > progress or command.poll() == 0):
            outcome.recovery_s = monotonic_s() - killed_s
        if monotonic_s() - killed_s > LIMIT_S:
            command.kill()
            return outcome
        sleep(0.05)
    outcome.leaked += run.leaked()
    outcome.completed = command.poll() == 0
    outcome.identical = outcome.completed and run.result() == expected
    return outcome


def _kill(run: Run, command: subprocess.Popen[bytes], role: str) -> bool:
    if role == "driver":
        command.kill()
        return True
    for process in run.processes():
        if TITLES[role] in " ".join(process.cmdline()):
            os.kill(process.pid, signal.SIGKILL)
            return True
    return False


def summary(outcomes: list[Outcome]) -> dict[str, Any]:
    """The figures of the header."""
    recoveries = [o.recovery_s for o in outcomes if o.killed and o.recovery_s is not None]
    return {
        "runs": len(outcomes),
        "kills": sum(o.killed for o in outcomes),
        "completed": sum(o.completed for o in outcomes),
        "bit_identical": sum(o.identical for o in outcomes),
        "lost_commits": sum(o.lost_commit for o in outcomes),
        "leaked_processes": sum(len(o.leaked) for o in outcomes),
        "median_recovery_s": round(median(recoveries), 1) if recoveries else None,
        "started_again": sum(o.started_again for o in outcomes),
        "roles": {role: sum(o.role == role for o in outcomes) for role in ROLES},
    }


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Kill processes of runs, at random.")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--only", nargs="+", choices=ROLES, default=list(ROLES))
    return parser.parse_args()


if __name__ == "__main__":
    main()
