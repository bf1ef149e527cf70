"""Runs of the quickstart job, each with a `kill -9` at a random time of a random process.

    python benchmarks/chaos.py [--runs 20] [--first 1] [--into FILE] [--seed 0] [--only ROLE ...]

Roles: a worker, a candidate's slot, the mailbox, the host of the pools, and the driver. A run
that dies of it is started again with the same command (`resume: auto`), as a shell loop or a
cluster would; the others go on by themselves. Each is compared with one that nobody disturbed.

    runs, kills         made, and processes killed
    completed           ended with a result
    bit_identical       the same weights and the same numbers in rounds.jsonl as undisturbed
    lost_commits        runs that were resumed from before what their index named at the kill
    leaked_processes    of all that a command started, still alive 90 s after the run's end (Ray's
                        own agents take a minute to notice that a driver was killed)
    median_recovery_s   from the kill until the run's records are written again: the time of
                        restarts, and what was trained again of the phase that was hit; by role
                        in `recovery_s`
    started_again       by us, after the whole command died

Each kill comes after a random one of the run's records (lines of epochs.jsonl and rounds.jsonl,
but the last), by a random part of the time that a record took so far; the seed and N decide both
for run N, whichever come before it. On 2 cores a run takes 1 to 3 minutes, so they can be made in
pieces: `--into FILE` keeps each outcome as a line of JSON, and `--first 6 --runs 5` adds the runs
6 to 10. The last line is one JSON object, over all runs in FILE.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import uuid
from collections import defaultdict
from dataclasses import asdict, dataclass, field
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
LEAVE_S = 90.0


@dataclass
class Outcome:
    """Of one run."""

    number: int
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
        self._marks: list[str] = []

    def start(self) -> subprocess.Popen[bytes]:
        """The command; the same one goes on with what an earlier one left."""
        settings = {"storage_path": self.storage, "epochs": self._epochs, "resume": "auto"}
        given = [part for at in settings.items() for part in ("--set", "{}={}".format(*at))]
        # All that a command starts inherits it.
        self._marks.append(uuid.uuid4().hex)
        with (self.storage / "log.txt").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "raytrain_opt", "run", "jobs/quickstart.yaml", *given],
                cwd=ROOT,
                env={**os.environ, MARK: self._marks[-1]},
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

    def reached(self) -> tuple[int, int]:
        """Whole epochs, and rounds after them, up to the latest commit."""
        return max(((commit.epoch, commit.rounds) for commit in self.commits()), default=(0, 0))

    def told(self) -> str:
        """What the commands printed."""
        return (self.storage / "log.txt").read_text()

    def records(self) -> int:
        """How many there are: grows when the run gets on."""
        files = [*self.storage.glob("*/epochs.jsonl"), *self.storage.glob("*/rounds.jsonl")]
        return sum(len(path.read_bytes().splitlines()) for path in files)

    def processes(self) -> list[psutil.Process]:
        """Those of the latest command that live."""
        return _marked(self._marks[-1:])

    def leaked(self) -> list[str]:
        """What lives on some time after the end, of all commands."""
        deadline_s = monotonic_s() + LEAVE_S
        while (left := _marked(self._marks)) and monotonic_s() < deadline_s:
            sleep(0.5)
        names = [process.name() for process in left]
        for process in left:
            process.kill()
        return names

    def result(self) -> str:
        """A digest of what must not depend on a kill."""
        assert self.folder is not None
        rounds = [json.loads(at) for at in (self.folder / "rounds.jsonl").read_text().splitlines()]
        for line in rounds:
            del line["parts_s"]
            for candidate in line["candidates"]:
                del candidate["seconds"]
        weights = read_weights(self.folder / f"checkpoints/{self.commits()[-1].folder}")
        digest = hashlib.sha256(json.dumps(rounds).encode())
        for name, tensor in sorted(weights.items()):
            digest.update(name.encode() + tensor.numpy().tobytes())
        return digest.hexdigest()


def _marked(marks: list[str]) -> list[psutil.Process]:
    def is_ours(process: psutil.Process) -> bool:
        try:
            ended = process.status() == psutil.STATUS_ZOMBIE
            return not ended and process.environ().get(MARK) in marks
        except psutil.Error:
            return False

    return [process for process in psutil.process_iter() if is_ours(process)]


@dataclass(frozen=True)
class Quiet:
    """A run that nobody disturbed."""

    epochs: int
    result: str
    records: int


def main() -> None:
    args = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        into = args.into or Path(folder) / "outcomes.jsonl"
        if not into.exists():
            _append(into, undisturbed(Path(folder), args.epochs))
        quiet, _ = read(into)
        if quiet.epochs != args.epochs:
            raise SystemExit(f"{into} holds runs of {quiet.epochs} epochs, not {args.epochs}")
        for number in range(args.first, args.first + args.runs):
            run = Run(_made(Path(folder) / str(number)), args.epochs)
            outcome = Outcome(number, args.only[(number - 1) % len(args.only)])
            disturb(run, outcome, random.Random(f"{args.seed} {number}"), quiet)
            _append(into, outcome)
            print(outcome, flush=True)
        _, outcomes = read(into)
    print(json.dumps({**summary(outcomes), "machine": machine(), "versions": versions()}))


def undisturbed(folder: Path, epochs: int) -> Quiet:
    run = Run(_made(folder / "quiet"), epochs)
    if run.start().wait(LIMIT_S):
        raise SystemExit(run.told())
    return Quiet(epochs, run.result(), run.records())


def _append(into: Path, value: Quiet | Outcome) -> None:
    with into.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(value)) + "\n")


def read(into: Path) -> tuple[Quiet, list[Outcome]]:
    """The undisturbed run, and the disturbed ones so far."""
    first, *others = [json.loads(line) for line in into.read_text().splitlines()]
    return Quiet(**first), [Outcome(**each) for each in others]


def disturb(run: Run, outcome: Outcome, chance: random.Random, quiet: Quiet) -> None:
    """One run with one kill; started again until it is done."""
    command = run.start()
    _wait(run, command, chance, quiet)
    before = run.reached()
    outcome.killed, killed_s = _kill(run, command, outcome.role, chance), monotonic_s()
    records = run.records()
    while outcome.recovery_s is None or command.poll() is None:
        if command.poll() not in (None, 0):
            outcome.lost_commit |= run.reached() < before
            if outcome.started_again == 3:
                break
            outcome.started_again += 1
            command = run.start()
        if outcome.recovery_s is None and (run.records() > records or command.poll() == 0):
            outcome.recovery_s = monotonic_s() - killed_s
        if monotonic_s() - killed_s > LIMIT_S:
            command.kill()
            break
        sleep(0.05)
    outcome.lost_commit |= "the one before is used" in run.told()
    outcome.leaked = run.leaked()
    outcome.completed = command.poll() == 0
    outcome.identical = outcome.completed and run.result() == quiet.result


def _wait(run: Run, command: subprocess.Popen[bytes], chance: random.Random, quiet: Quiet) -> None:
    """Until the moment of the kill, or the end of a run that failed."""
    wanted, part = chance.randrange(1, quiet.records), chance.random()
    first_s: float | None = None
    while command.poll() is None and not (run.commits() and run.records() >= wanted):
        if first_s is None and run.records():
            first_s = monotonic_s()
        sleep(0.05)
    took_s = monotonic_s() - first_s if first_s is not None else 0.0
    due_s = monotonic_s() + part * took_s / max(1, wanted - 1)
    while command.poll() is None and monotonic_s() < due_s:
        sleep(0.01)


def _kill(run: Run, command: subprocess.Popen[bytes], role: str, chance: random.Random) -> bool:
    """Whether there was one to kill."""
    if command.poll() is not None:
        return False
    if role == "driver":
        command.kill()
        command.wait()
        return True
    there = [p for p in run.processes() if TITLES[role] in " ".join(p.cmdline())]
    if there:
        os.kill(chance.choice(there).pid, signal.SIGKILL)
    return bool(there)


def summary(outcomes: list[Outcome]) -> dict[str, Any]:
    """The figures of the header."""
    recoveries: dict[str, list[float]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.killed and outcome.recovery_s is not None:
            recoveries[outcome.role].append(outcome.recovery_s)
    all_of_them = [seconds for each in recoveries.values() for seconds in each]
    return {
        "runs": len(outcomes),
        "kills": sum(o.killed for o in outcomes),
        "completed": sum(o.completed for o in outcomes),
        "bit_identical": sum(o.identical for o in outcomes),
        "lost_commits": sum(o.lost_commit for o in outcomes),
        "leaked_processes": sum(len(o.leaked) for o in outcomes),
        "median_recovery_s": round(median(all_of_them), 1) if all_of_them else None,
        "recovery_s": {role: round(median(each), 1) for role, each in recoveries.items()},
        "started_again": sum(o.started_again for o in outcomes),
        "roles": {role: sum(o.role == role for o in outcomes) for role in ROLES},
    }


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Kill processes of runs, at random.")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--first", type=int, default=1, help="Number of the first run.")
    parser.add_argument("--into", type=Path, help="Keep outcomes here, and add to those there.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--only", nargs="+", choices=ROLES, default=list(ROLES))
    return parser.parse_args()


if __name__ == "__main__":
    main()
