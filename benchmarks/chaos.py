"""Runs of the quickstart job, each disturbed at random times.

    python -m benchmarks.chaos [--runs 20] [--first 1] [--into FILE] [--seed 0] [--only ROLE ...]
        [--on STORAGE ...] [--policies POLICY ...]

Roles that are ended by `kill -9`: a worker, a slot, the mailbox, the launcher of the pools, the
driver. `sigterm` ends the driver as a cluster does. `connection` cuts five TCP connections of the
run's processes with `ss -K`, one after each further record. `full_disk` fills the disk until the
run ends. `clock` sets the driver's date wrong by up to ten days in either direction and kills the
driver; the command that resumes the run has another wrong date. `storage` lets an S3 endpoint
refuse, cut off or hang requests after each of five records. `node` ends one of three nodes, each a
raylet with at most one worker, and `hung_node` stops all its processes, whose connections stay.

Runs are kept in a folder (`disk`), in a small file system of its own (for `full_disk`), in a
folder without locks as some network file systems are (`no_locks`), or under the URI of an S3
endpoint over HTTP (`s3`, moto). They follow `stpt`, whose slots train candidates, or
`stpt_horizon`, whose workers do. `connection` and `full_disk` need root.

A run that dies is started again with the same command (`resume: auto`), as a shell loop or a
cluster would do; the others recover by themselves. Each run is compared with an undisturbed one.

    runs, faults        runs made, and processes killed, connections cut, times of bad storage
    completed           runs that ended with a result
    bit_identical       runs with the same state (weights, optimizer) and the same numbers in
                        rounds.jsonl as the undisturbed run
    lost_checkpoints    runs that resumed from before the checkpoint their index named at the kill
    worst_lost_s        the longest time from a checkpoint until a fault: what is repeated at most
    leaked_processes    processes of a command that are alive 90 s after the run's end (Ray's own
                        agents take a minute to notice that a driver was killed)
    leaked_groups       placement groups that the cluster of nodes still has after the run
    median_recovery_s, worst_recovery_s
                        from the first fault until the run writes records again: the time of
                        restarts, and of repeating the interrupted phase; `recovery_s`: median by
                        role
    restarts            commands started again because the previous one died
    roles, storages, policies    runs by each

The first fault comes after a random one of the run's records (lines of epochs.jsonl and
rounds.jsonl, except the last), delayed by a random fraction of the mean time per record so far;
seed and N decide both for run N, independent of other runs. On 2 cores a run takes 1 to 3 minutes,
so a series can be made in pieces: `--into FILE` keeps each outcome as a line of JSON, and
`--first 6 --runs 5` adds the runs 6 to 10. Runs that differ are kept beside FILE. The last line is
one JSON object over all runs in FILE.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from statistics import median
from time import sleep
from typing import Any

import obstore
import psutil

from benchmarks.chaos_faults import NODE_ROLES, NOTICE_S, ROLES, Nodes, disturb_once, new_folder
from benchmarks.common import machine, run_digest
from raytrain_opt import storage
from raytrain_opt.clock import monotonic_s
from raytrain_opt.errors import StorageError
from raytrain_opt.recording.recorder import versions
from raytrain_opt.run_copy import INDEX
from raytrain_opt.storage import open_store
from tests.support.machines import PLACE
from tests.support.s3_server import S3Server

ROOT = Path(__file__).parents[1]
STORAGES = ("disk", "no_locks", "s3")
# Roles that need one kind of storage.
STORAGE_OF = {"full_disk": "small_disk", "storage": "s3"} | dict.fromkeys(NODE_ROLES, "disk")
# Roles that need one policy: nodes have no place for slots.
POLICY_OF = {"slot": "stpt"} | dict.fromkeys(NODE_ROLES, "stpt_horizon")
# What a run of three epochs has room for.
SEARCH = (
    "learning_rate={policy: stpt_horizon, search_on: workers, initial: 0.2, max_search_cost: 1.0}"
)
POLICIES = {"stpt": (), "stpt_horizon": (SEARCH, "slots.count=null", "global_batch_size=32")}
# Seconds after which the space of a full disk is given back at the latest.
FULL_DISK_LIMIT_S = 120.0
# Roles that are disturbed again after each further record.
REPEATED, REPETITIONS = ("connection", "storage"), 5
# An environment variable that every process of a command inherits.
MARK = "RAYTRAIN_OPT_CHAOS"
# Many times what a run takes, restarts included.
RUN_LIMIT_S = 900.0
# Ray's agents need a minute to notice a killed driver.
EXIT_LIMIT_S = 90.0
# A run that dies of its kill recovers with one restart; more mean that it never will.
MAX_RESTARTS = 12


@dataclass
class Outcome:
    """What happened to one run; `records` and `digest`: of an undisturbed one, without a role."""

    number: int
    role: str
    policy: str = "stpt"
    storage: str = "disk"
    completed: bool = False
    faults: int = 0
    identical: bool = False
    lost_checkpoint: bool = False
    lost_s: float = 0.0
    leaked: list[str] = field(default_factory=list)
    leaked_groups: int = 0
    recovery_s: float | None = None
    restarts: int = 0
    records: int = 0
    digest: str = ""


@dataclass
class Run:
    """One run directory and the commands that work on it.

    `server`: the S3 endpoint, for runs that are kept there. `nodes`: what the workers are on; by
    default each command has a Ray of its own. `clock_error_s`: of the commands that start next.
    """

    folder: Path
    outcome: Outcome
    epochs: int
    server: S3Server | None = None
    nodes: Nodes | None = None
    clock_error_s: float = 0.0
    marks: list[str] = field(default_factory=list)

    @cached_property
    def storage_path(self) -> str:
        """The folder or URI of the run directory."""
        return self.server.new_uri() if self.server else str(self.folder)

    def start(self) -> subprocess.Popen[bytes]:
        """Start the command, which resumes the run of an earlier one if there is one."""
        values = [f"storage_path={self.storage_path}", f"epochs={self.epochs}", "resume=auto"]
        values += POLICIES[self.outcome.policy]
        arguments = ["run", "jobs/quickstart.yaml"]
        if self.nodes:
            values.append(f"workers.resources={PLACE}")
            arguments += ["--address", self.nodes.address]
        arguments += [part for value in values for part in ("--set", value)]
        locks = ["no_locks"] if self.outcome.storage == "no_locks" else []
        faults = ",".join([*locks, str(self.clock_error_s)])
        self.marks.append(uuid.uuid4().hex)
        with (self.folder / "log.txt").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "benchmarks.chaos_command", faults, *arguments],
                cwd=ROOT,
                env={**os.environ, MARK: self.marks[-1]},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @cached_property
    def run_dir(self) -> str:
        """The run directory; raises ValueError before it exists."""
        if self.server:
            [name] = obstore.list_with_delimiter(open_store(self.storage_path))["common_prefixes"]
        else:
            [name] = [path.name for path in self.folder.iterdir() if path.is_dir()]
        return storage.join(self.storage_path, name)

    @property
    def ballast(self) -> Path:
        """A file that fills the disk."""
        return self.folder / "ballast"

    def read(self, name: str) -> bytes:
        """Return the content of a file of the run, nothing before it exists."""
        try:
            return storage.read(self.run_dir, name) or b""
        except (StorageError, ValueError):  # under S3 also: while the storage refuses requests
            return b""

    def reached(self) -> list[int]:
        """Return complete epochs, and later rounds and steps, up to the latest checkpoint."""
        index = json.loads(self.read(INDEX) or '{"checkpoints": []}')
        parts = ("epoch", "rounds", "steps")
        return max(([c[part] for part in parts] for c in index["checkpoints"]), default=[])

    def unsaved_s(self) -> float:
        """Return the seconds since the latest checkpoint; there is one."""
        if self.server:
            saved = obstore.head(open_store(self.run_dir), INDEX)["last_modified"]
        else:
            saved = datetime.fromtimestamp((Path(self.run_dir) / INDEX).stat().st_mtime, UTC)
        return (datetime.now(UTC) - saved).total_seconds()

    def records(self) -> int:
        """Return the number of records; it grows as the run progresses."""
        files = ("epochs.jsonl", "rounds.jsonl")
        return sum(len(self.read(name).splitlines()) for name in files)

    def digest(self) -> str:
        """Return a digest of everything that must not depend on a fault."""
        return run_digest(self.run_dir, ["rounds.jsonl"])

    def processes(self, *, of_all: bool = False) -> list[psutil.Process]:
        """Return the living processes of the latest command, or of all of them."""
        marks = self.marks if of_all else self.marks[-1:]

        def is_ours(process: psutil.Process) -> bool:
            try:
                dead = process.status() == psutil.STATUS_ZOMBIE
                return not dead and process.environ().get(MARK) in marks
            except psutil.Error:
                return False

        return [process for process in psutil.process_iter() if is_ours(process)]

    def leaked(self) -> list[str]:
        """Kill what is alive of all commands after EXIT_LIMIT_S and return the names."""
        deadline_s = monotonic_s() + EXIT_LIMIT_S
        while (alive := self.processes(of_all=True)) and monotonic_s() < deadline_s:
            sleep(0.5)
        names = [process.name() for process in alive]
        for process in alive:
            process.kill()
        return names


def main() -> None:
    args = _arguments()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(S3Server().running())
        os.environ |= {"AWS_ACCESS_KEY_ID": "KEY", "AWS_SECRET_ACCESS_KEY": "SECRET"}
        into = args.into or folder / "outcomes.jsonl"
        into.touch()
        for number in range(args.first, args.first + args.runs):
            chance = random.Random(f"{args.seed} {number}")
            role = args.only[(number - 1) % len(args.only)]
            kind = STORAGE_OF.get(role) or chance.choice(args.on)
            policy = POLICY_OF.get(role) or chance.choice(args.policies)
            outcome = Outcome(number, role, policy, kind)
            undisturbed = _undisturbed(into, folder, args.epochs, policy)
            with (
                new_folder(folder / str(number), small=kind == "small_disk") as own,
                Nodes.running() if role in NODE_ROLES else nullcontext() as nodes,
            ):
                run = Run(own, outcome, args.epochs, server if kind == "s3" else None, nodes)
                disturb(run, chance, undisturbed)
                if not outcome.identical:
                    shutil.copytree(own, kept := into.with_name(f"{into.name}-{number}"))
                    print(f"the run is kept in {kept}")
            _append(into, outcome)
            print(outcome, flush=True)
        outcomes = [outcome for outcome in read(into) if outcome.role]
    print(json.dumps({**summary(outcomes), "machine": machine(), "versions": versions()}))


def _undisturbed(into: Path, folder: Path, epochs: int, policy: str) -> Outcome:
    """Return the undisturbed run of a policy, made when it is needed first."""
    for known in read(into):
        if (known.role, known.number, known.policy) == ("", epochs, policy):
            return known
    made = Outcome(epochs, "", policy)
    with new_folder(folder / f"undisturbed-{policy}") as own:
        run = Run(own, made, epochs)
        if run.start().wait(RUN_LIMIT_S):
            raise SystemExit((own / "log.txt").read_text())
        made.records, made.digest = run.records(), run.digest()
    _append(into, made)
    return made


def _append(into: Path, outcome: Outcome) -> None:
    with into.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(outcome)) + "\n")


def read(into: Path) -> list[Outcome]:
    """Return the outcomes so far, with those of the undisturbed runs."""
    return [Outcome(**json.loads(line)) for line in into.read_text().splitlines()]


def disturb(run: Run, chance: random.Random, undisturbed: Outcome) -> None:
    """Disturb one run, restarting the command until it is done."""
    command, outcome = run.start(), run.outcome
    _wait(run, command, chance, undisturbed.records)
    before = run.reached()
    outcome.faults = int(_disturb_once(run, command, chance))
    killed_s = monotonic_s()
    records = disturbed_records = run.records()
    while outcome.recovery_s is None or command.poll() != 0:
        # A command that finds its latest checkpoint damaged drops it from the index.
        outcome.lost_checkpoint |= run.reached() < before
        if command.poll() is not None or monotonic_s() - killed_s > FULL_DISK_LIMIT_S:
            run.ballast.unlink(missing_ok=True)
        if command.poll() not in (None, 0):
            if outcome.restarts == MAX_RESTARTS:
                break
            outcome.restarts += 1
            command = run.start()
        repeats = outcome.role in REPEATED and outcome.faults < REPETITIONS
        if repeats and run.records() > disturbed_records:
            disturbed_records = run.records()
            outcome.faults += _disturb_once(run, command, chance)
        if outcome.recovery_s is None and (run.records() > records or command.poll() == 0):
            outcome.recovery_s = monotonic_s() - killed_s
        if monotonic_s() - killed_s > RUN_LIMIT_S:
            command.kill()
            break
        sleep(0.5 if run.server else 0.05)
    if run.server:
        run.server.reset()
    outcome.leaked = run.leaked()
    outcome.leaked_groups = run.nodes.groups() if run.nodes else 0
    outcome.completed = command.poll() == 0
    outcome.identical = outcome.completed and run.digest() == undisturbed.digest


def _disturb_once(run: Run, command: subprocess.Popen[bytes], chance: random.Random) -> bool:
    if command.poll() is not None:
        return False
    if run.nodes and run.outcome.role == "preempted_node":
        if not run.nodes.machines.preempt_one_with_a_worker(NOTICE_S):
            return False
        sleep(NOTICE_S)
    run.outcome.lost_s = max(run.outcome.lost_s, run.unsaved_s())
    return disturb_once(run, command, chance)


def _wait(run: Run, command: subprocess.Popen[bytes], chance: random.Random, records: int) -> None:
    """Wait until the moment of the kill, or the end of a run that failed."""
    target, fraction = chance.randrange(1, records), chance.random()
    first_s: float | None = None
    while command.poll() is None and not (run.read(INDEX) and run.records() >= target):
        if first_s is None and run.records():
            first_s = monotonic_s()
        sleep(0.05)
    elapsed_s = monotonic_s() - first_s if first_s is not None else 0.0
    due_s = monotonic_s() + fraction * elapsed_s / max(1, target - 1)
    while command.poll() is None and monotonic_s() < due_s:
        sleep(0.01)


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the figures of the module's docstring."""
    recoveries: dict[str, list[float]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.faults and outcome.recovery_s is not None:
            recoveries[outcome.role].append(outcome.recovery_s)
    all_s = [recovery_s for values in recoveries.values() for recovery_s in values]
    return {
        "runs": len(outcomes),
        "faults": sum(o.faults for o in outcomes),
        "completed": sum(o.completed for o in outcomes),
        "bit_identical": sum(o.identical for o in outcomes),
        "lost_checkpoints": sum(o.lost_checkpoint for o in outcomes),
        "worst_lost_s": round(max((o.lost_s for o in outcomes), default=0.0), 1),
        "leaked_processes": sum(len(o.leaked) for o in outcomes),
        "leaked_groups": sum(o.leaked_groups for o in outcomes),
        "median_recovery_s": round(median(all_s), 1) if all_s else None,
        "worst_recovery_s": round(max(all_s), 1) if all_s else None,
        "recovery_s": {role: round(median(values), 1) for role, values in recoveries.items()},
        "restarts": sum(o.restarts for o in outcomes),
        "roles": dict(Counter(o.role for o in outcomes)),
        "storages": dict(Counter(o.storage for o in outcomes)),
        "policies": dict(Counter(o.policy for o in outcomes)),
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Kill random processes of runs at random times.")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--first", type=int, default=1, help="number of the first run")
    parser.add_argument("--into", type=Path, help="keep outcomes in this file and add to it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--only", nargs="+", choices=ROLES, default=ROLES)
    parser.add_argument("--on", nargs="+", choices=STORAGES, default=STORAGES)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    return parser.parse_args()


if __name__ == "__main__":
    main()
