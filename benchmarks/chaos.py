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
    bit_identical       runs with the same weights and the same numbers in rounds.jsonl as the
                        undisturbed run
    lost_checkpoints    runs that resumed from before the checkpoint their index named at the kill
    leaked_processes    processes of a command that are alive 90 s after the run's end (Ray's own
                        agents take a minute to notice that a driver was killed)
    leaked_groups       placement groups that a cluster still has after the run (of `node` and
                        `hung_node`; the cluster of the other runs ends with them)
    median_recovery_s, worst_recovery_s
                        from the first fault until the run writes records again: the time of
                        restarts, and of repeating the interrupted phase; `recovery_s`: median by
                        role. Under S3, a killed driver's lease lasts 60 s
    restarts            commands started again because the previous one died
    roles, storages, policies
                        runs by role, by kind of storage, by policy

The first fault comes after a random one of the run's records (lines of epochs.jsonl and
rounds.jsonl, except the last), delayed by a random fraction of the mean time per record so far;
seed and N decide both for run N, independent of other runs. On 2 cores a run takes 1 to 3 minutes,
so a series can be made in pieces: `--into FILE` keeps each outcome as a line of JSON, and
`--first 6 --runs 5` adds the runs 6 to 10. Beside FILE stay the undisturbed runs, and those that
do not equal them. The last line is one JSON object over all runs in FILE.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from time import sleep
from typing import Any

import obstore
import psutil
import ray
from ray.cluster_utils import Cluster

from benchmarks.common import machine
from raytrain_opt import storage
from raytrain_opt.clock import monotonic_s
from raytrain_opt.cluster.ray_private import read_placement_groups
from raytrain_opt.errors import StorageError
from raytrain_opt.paths import RunPaths
from raytrain_opt.recording.recorder import versions
from raytrain_opt.storage import open_store
from raytrain_opt.train.checkpoint import read_weights
from tests.support.machines import PLACE, Machines
from tests.support.s3_server import Fault, S3Server, cut, delay, refuse

ROOT = Path(__file__).parents[1]
# The process titles that Ray sets; the driver is the command itself.
TITLES = {
    "worker": "ray::RayTrainWorker",
    "slot": "ray::ImplicitFunc",
    "mailbox": "ray::Mailbox",
    "launcher": "ray::PoolLauncher",
}
NODE_ROLES = ("node", "hung_node")
ROLES = (*TITLES, "driver", "sigterm", "connection", "full_disk", "clock", "storage", *NODE_ROLES)
STORAGES = ("disk", "no_locks", "s3")
# Roles that need one kind of storage.
STORAGE_OF = {"full_disk": "small_disk", "storage": "s3"}
# What a run of three epochs has room for.
SEARCH = (
    "learning_rate={policy: stpt_horizon, search_on: workers, initial: 0.2, horizon: 0.2, "
    "max_search_cost: 1.0}"
)
POLICIES = {"stpt": (), "stpt_horizon": (SEARCH, "slots.count=null", "global_batch_size=32")}
# Bytes of the small file system: a run of the quickstart needs a tenth.
SMALL_DISK = 64 * 2**20
# Seconds after which the space of a full disk is given back at the latest.
FULL_DISK_LIMIT_S = 120.0
# The longest error of a clock.
CLOCK_ERROR_S = 10 * 86400
# Roles that are disturbed again after each further record.
REPEATED, REPETITIONS = ("connection", "storage"), 5
# An environment variable that every process of a command inherits.
MARK = "RAYTRAIN_OPT_CHAOS"
# Many times what a run takes, restarts included.
RUN_LIMIT_S = 900.0
# Ray's agents need a minute to notice a killed driver.
EXIT_LIMIT_S = 90.0
# A run that dies of its kill recovers with one restart; more mean that it never will. Under S3 the
# lease of the killed driver refuses some before.
MAX_RESTARTS = 12


@dataclass
class Outcome:
    """What happened to one run."""

    number: int
    role: str
    completed: bool = False
    faults: int = 0
    identical: bool = False
    lost_checkpoint: bool = False
    leaked: list[str] = field(default_factory=list)
    recovery_s: float | None = None
    restarts: int = 0
    storage: str = "disk"
    policy: str = "stpt"
    leaked_groups: int = 0


class Run:
    """One run directory and the commands that work on it.

    `has_locks`: whether its file system has. `clock_error_s`: of the commands that start next.
    `nodes`: what the workers are on, and their cluster; by default each command has a Ray of its
    own.
    """

    def __init__(
        self,
        folder: Path,
        epochs: int,
        server: S3Server | None = None,
        policy: str = "stpt",
        *,
        has_locks: bool = True,
        nodes: Nodes | None = None,
    ) -> None:
        self.folder, self._epochs, self.server, self.nodes = folder, epochs, server, nodes
        self._settings, self._has_locks = POLICIES[policy], has_locks
        self._storage_path = server.new_uri() if server else str(folder)
        self._marks: list[str] = []
        self.clock_error_s = 0.0

    def start(self) -> subprocess.Popen[bytes]:
        """Start the command, which resumes the run of an earlier one if there is one."""
        settings = {"storage_path": self._storage_path, "epochs": self._epochs, "resume": "auto"}
        values = [*map("{0[0]}={0[1]}".format, settings.items()), *self._settings]
        options = [part for value in values for part in ("--set", value)]
        if self.nodes:
            options += ["--address", self.nodes.address, "--set", f"workers.resources={PLACE}"]
        faults = [*([] if self._has_locks else ["no_locks"]), str(self.clock_error_s)]
        self._marks.append(uuid.uuid4().hex)
        with (self.folder / "log.txt").open("ab") as log:
            return subprocess.Popen(
                [
                    *(sys.executable, "-m", "benchmarks.chaos_command", ",".join(faults)),
                    *("run", "jobs/quickstart.yaml", *options),
                ],
                cwd=ROOT,
                env={**os.environ, MARK: self._marks[-1]},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @cached_property
    def run_dir(self) -> str:
        """The run directory; raises ValueError before it exists."""
        if self.server:
            [name] = obstore.list_with_delimiter(open_store(self._storage_path))["common_prefixes"]
        else:
            [name] = [path.name for path in self.folder.iterdir() if path.is_dir()]
        return storage.join(self._storage_path, name)

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

    def checkpoints(self) -> list[dict[str, Any]]:
        """Return the checkpoints that the index names."""
        index = self.read("checkpoints/index.json")
        checkpoints: list[dict[str, Any]] = json.loads(index)["checkpoints"] if index else []
        return checkpoints

    def reached(self) -> tuple[int, int]:
        """Return complete epochs and later rounds up to the latest checkpoint."""
        return max(((c["epoch"], c.get("rounds", 0)) for c in self.checkpoints()), default=(0, 0))

    def output(self) -> str:
        """Return what the commands printed."""
        return (self.folder / "log.txt").read_text()

    def records(self) -> int:
        """Return the number of records; it grows as the run progresses."""
        files = ("epochs.jsonl", "rounds.jsonl")
        return sum(len(self.read(name).splitlines()) for name in files)

    def processes(self) -> list[psutil.Process]:
        """Return the living processes of the latest command."""
        return _marked(self._marks[-1:])

    def leaked(self) -> list[str]:
        """Kill what is alive of all commands after EXIT_LIMIT_S and return the names."""
        deadline_s = monotonic_s() + EXIT_LIMIT_S
        while (alive := _marked(self._marks)) and monotonic_s() < deadline_s:
            sleep(0.5)
        names = [process.name() for process in alive]
        for process in alive:
            process.kill()
        return names

    def result(self) -> str:
        """Return a digest of everything that must not depend on a kill."""
        rounds = [json.loads(line) for line in self.read("rounds.jsonl").splitlines()]
        for line in rounds:
            del line["timings_s"]
            for candidate in line["candidates"]:
                del candidate["duration_s"]
        checkpoints = RunPaths.existing(self.run_dir, write=False).checkpoints
        weights = read_weights(checkpoints / self.checkpoints()[-1]["folder"])
        digest = hashlib.sha256(json.dumps(rounds).encode())
        for name, tensor in sorted(weights.items()):
            digest.update(name.encode() + tensor.numpy().tobytes())
        return digest.hexdigest()


def _marked(marks: list[str]) -> list[psutil.Process]:
    def is_ours(process: psutil.Process) -> bool:
        try:
            dead = process.status() == psutil.STATUS_ZOMBIE
            return not dead and process.environ().get(MARK) in marks
        except psutil.Error:
            return False

    return [process for process in psutil.process_iter() if is_ours(process)]


@dataclass(frozen=True)
class Nodes:
    """A cluster whose head takes no workers, and nodes of it that do."""

    cluster: Cluster
    machines: Machines

    @property
    def address(self) -> str:
        """Address of the head."""
        return str(self.cluster.address)

    def groups(self) -> int:
        """Return how many placement groups the cluster has."""
        ray.init(self.address, log_to_driver=False, logging_level=logging.ERROR)
        try:
            return len(read_placement_groups())
        finally:
            ray.shutdown()

    @classmethod
    @contextmanager
    def running(cls) -> Iterator[Nodes]:
        """Start a cluster with one node more than a run has workers."""
        head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 2**28}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        machines = Machines(cluster)
        try:
            machines.add(3)
            yield cls(cluster, machines)
        finally:
            machines.remove_all()
            cluster.shutdown()  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Undisturbed:
    """The undisturbed run of a policy."""

    epochs: int
    result: str
    records: int
    policy: str = "stpt"


def main() -> None:
    args = _arguments()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        server = stack.enter_context(S3Server().running())
        os.environ |= {"AWS_ACCESS_KEY_ID": "KEY", "AWS_SECRET_ACCESS_KEY": "SECRET"}
        into = args.into or Path(folder) / "outcomes.jsonl"
        into.touch()
        for number in range(args.first, args.first + args.runs):
            chance = random.Random(f"{args.seed} {number}")
            role = args.only[(number - 1) % len(args.only)]
            kind = STORAGE_OF.get(role) or chance.choice(args.on)
            policy = "stpt" if role == "slot" else chance.choice(args.policies)
            if role in NODE_ROLES:  # whose slots have no place
                kind, policy = "disk", "stpt_horizon"
            outcome = Outcome(number, role, storage=kind, policy=policy)
            undisturbed_run = _undisturbed(into, Path(folder), args.epochs, policy)
            with (
                _new_folder(Path(folder) / str(number), small=kind == "small_disk") as own,
                Nodes.running() if role in NODE_ROLES else nullcontext() as nodes,
            ):
                s3 = server if kind == "s3" else None
                locks = kind != "no_locks"
                run = Run(own, args.epochs, s3, policy, has_locks=locks, nodes=nodes)
                disturb(run, outcome, chance, undisturbed_run)
                if not outcome.identical:
                    shutil.copytree(own, kept := into.with_name(f"{into.name}-{number}"))
                    print(f"the run is kept in {kept}")
            _append(into, outcome)
            print(outcome, flush=True)
        _, outcomes = read(into)
    print(json.dumps({**summary(outcomes), "machine": machine(), "versions": versions()}))


def _undisturbed(into: Path, folder: Path, epochs: int, policy: str) -> Undisturbed:
    """Return the undisturbed run of a policy, made when it is needed first."""
    for known in read(into)[0]:
        if known.epochs != epochs:
            raise SystemExit(f"{into} holds runs of {known.epochs} epochs, not {epochs}")
        if known.policy == policy:
            return known
    with _new_folder(folder / f"undisturbed-{policy}") as own:
        run = Run(own, epochs, policy=policy)
        if run.start().wait(RUN_LIMIT_S):
            raise SystemExit(run.output())
        shutil.copytree(own, into.with_name(f"{into.name}-undisturbed-{policy}"))
        made = Undisturbed(epochs, run.result(), run.records(), policy)
    _append(into, made)
    return made


def _append(into: Path, value: Undisturbed | Outcome) -> None:
    with into.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(value)) + "\n")


def read(into: Path) -> tuple[list[Undisturbed], list[Outcome]]:
    """Return the undisturbed runs and the outcomes so far."""
    lines = [json.loads(line) for line in into.read_text().splitlines()]
    undisturbed_runs = [Undisturbed(**line) for line in lines if "result" in line]
    return undisturbed_runs, [Outcome(**line) for line in lines if "role" in line]


def disturb(
    run: Run, outcome: Outcome, chance: random.Random, undisturbed_run: Undisturbed
) -> None:
    """Disturb one run, restarting the command until it is done."""
    command = run.start()
    _wait(run, command, chance, undisturbed_run)
    before = run.reached()
    outcome.faults = int(_disturb_once(run, command, outcome.role, chance))
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
            outcome.faults += _disturb_once(run, command, outcome.role, chance)
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
    outcome.identical = outcome.completed and run.result() == undisturbed_run.result


def _wait(
    run: Run, command: subprocess.Popen[bytes], chance: random.Random, undisturbed_run: Undisturbed
) -> None:
    """Wait until the moment of the kill, or the end of a run that failed."""
    target, fraction = chance.randrange(1, undisturbed_run.records), chance.random()
    first_s: float | None = None
    while command.poll() is None and not (run.checkpoints() and run.records() >= target):
        if first_s is None and run.records():
            first_s = monotonic_s()
        sleep(0.05)
    elapsed_s = monotonic_s() - first_s if first_s is not None else 0.0
    due_s = monotonic_s() + fraction * elapsed_s / max(1, target - 1)
    while command.poll() is None and monotonic_s() < due_s:
        sleep(0.01)


def _disturb_once(
    run: Run, command: subprocess.Popen[bytes], role: str, chance: random.Random
) -> bool:
    """Disturb the run once; return whether there was something to disturb."""
    if command.poll() is not None:
        return False
    if role == "full_disk":
        _fill(run.ballast)
        return True
    if role == "clock":
        run.clock_error_s = chance.uniform(-CLOCK_ERROR_S, CLOCK_ERROR_S)
    if role in ("driver", "sigterm", "clock"):
        command.send_signal(signal.SIGTERM if role == "sigterm" else signal.SIGKILL)
        command.wait()
        return True
    if role == "storage":
        assert run.server is not None
        # More refusals than a request is repeated, cut connections, and an answer too late.
        faults: list[list[Fault]] = [[refuse("SlowDown")] * 30, [cut] * 10, [delay(40.0)]]
        run.server.applies_to = lambda request: request.method == "PUT"
        run.server.faults.extend(chance.choice(faults))
        return True
    if role in NODE_ROLES:
        assert run.nodes is not None
        hang = role == "hung_node"
        return run.nodes.machines.end_one_with_a_worker(hang=hang) is not None
    if role == "connection":
        return _cut_connection(run.processes(), chance)
    candidates = [p for p in run.processes() if TITLES[role] in " ".join(p.cmdline())]
    if candidates:
        os.kill(chance.choice(candidates).pid, signal.SIGKILL)
    return bool(candidates)


def _cut_connection(processes: list[psutil.Process], chance: random.Random) -> bool:
    """Cut a TCP connection between two of the processes; return whether there was one."""
    connections = []
    for process in processes:
        with suppress(psutil.Error):
            connections += process.net_connections("tcp")
    ports = {c.laddr.port for c in connections}
    inner = [
        (c.laddr.port, c.raddr.port)
        for c in connections
        if c.status == psutil.CONN_ESTABLISHED and c.raddr.port in ports
    ]
    if not inner:
        return False
    local, remote = chance.choice(inner)
    command = ["ss", "-K", "-t", "-n", f"sport = :{local} and dport = :{remote}"]
    cut_sockets = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return f":{local}" in cut_sockets


def summary(outcomes: list[Outcome]) -> dict[str, Any]:
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


@contextmanager
def _new_folder(folder: Path, *, small: bool = False) -> Iterator[Path]:
    """Make a folder, on request in a small file system of its own."""
    folder.mkdir()
    if not small:
        yield folder
        return
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK}", "chaos", str(folder)]
    subprocess.run(mount, check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def _fill(ballast: Path) -> None:
    """Write until the disk is full."""
    with suppress(OSError), ballast.open("ab", buffering=0) as file:
        while True:
            file.write(bytes(4096))


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
