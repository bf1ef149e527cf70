"""A run that is cut and resumed ends as one that was not, bit by bit: the run itself, with real
learners, data, policies and commits. Only the processes are pretended, and what Ray stores.
"""

from __future__ import annotations

import copy
import io
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from full_disk import files_at_most
from rich.console import Console
from small_jobs import read_lines, small_job, without_times

from raytrain_opt import Job
from raytrain_opt.data import load_shared
from raytrain_opt.driver import train
from raytrain_opt.errors import CommitError, PoolError
from raytrain_opt.main_training import Together
from raytrain_opt.optim.batch_ramp import epoch_steps
from raytrain_opt.paths import RunPaths
from raytrain_opt.pools.commands import Command, Pretrain
from raytrain_opt.pools.pool import Vault
from raytrain_opt.pools.slot import Slot
from raytrain_opt.pools.worker import Worker
from raytrain_opt.position import Position
from raytrain_opt.search import build_policy, most_candidates
from raytrain_opt.telemetry.terminal import Lines
from raytrain_opt.telemetry.timeline import Event, Span
from raytrain_opt.train.checkpoint import Checkpoints, read_checkpoint, read_index
from raytrain_opt.train.learner import Learner
from raytrain_opt.training_run import Startup, TrainingRun

JOBS: dict[str, dict[str, Any]] = {
    "stpt": {
        "epochs": 3,
        "learning_rate": {"policy": "stpt", "candidates": [1.0, 0.5], "alpha": 3},
    },
    "stpt averaged": {
        "epochs": 2,
        "learning_rate": {
            "policy": "stpt",
            "candidates": [2.0, 1.0],
            "alpha": 3,
            "combine": "average",
        },
        "optimizer": {"name": "AdamW", "args": {}},
    },
    "stpt_horizon": {
        "epochs": 10,
        "global_batch_size": 128,
        "learning_rate": {
            "policy": "stpt_horizon",
            "initial": 1.0,
            "horizon": 0.4,
            "budget": 1.0,
            "rounds_at": [0.3],
        },
    },
    "schedule": {
        "epochs": 4,
        "learning_rate": {"policy": "schedule", "shape": "linear"},
    },
}
MOVES = ("pretrain", "take_state", "commit_round", "main_train", "evaluate", "commit")
# Those after which something is on disk.
COMMITS = ("commit_round", "commit")


@pytest.fixture(scope="module", autouse=True)
def objects() -> Iterator[None]:
    """Ray's store within this process: what is put is copied, and read in place."""
    stored: list[Any] = []

    def put(value: Any) -> int:
        stored.append(copy.deepcopy(value))
        return len(stored) - 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "put", put)
        patch.setattr(ray, "get", lambda ref: stored[ref])
        yield


@dataclass
class PretendedPool:
    """What a run uses of a `Pool`; its members work one after the other."""

    name: str
    members: Sequence[Slot | Worker]

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def mailbox(self) -> Any:
        return SimpleNamespace(first_step=SimpleNamespace(remote=lambda: None))

    def alive(self) -> tuple[int, ...]:
        return tuple(range(self.size))

    def start(self) -> None: ...

    def wait_until_ready(self, limit_s: float) -> None: ...

    def take_log(self) -> tuple[list[Span], list[Event]]:
        return [Span(f"{self.name} 0", "pretended", time.monotonic(), 0.0)], []

    def command(self, command: Command, expected: Sequence[int] | None = None) -> dict[int, Any]:
        replies = [member.handle(command, lambda _done, _total: None) for member in self.members]
        return {index: replies[index] for index in expected or range(self.size)}


class Cut(Exception):  # noqa: N818 - not an error of the run
    """The run dies here."""


@dataclass
class Process:
    """One execution: what it did until it ended or was cut, and what it told."""

    moves: list[str]
    told: str
    finished: bool


def execute(job: Job, paths: RunPaths, is_cut: Callable[[list[str]], bool]) -> Process:
    """As far as `is_cut` lets it, which sees the moves so far. Like every new process it knows
    nothing but the run directory.
    """
    shared, cpu, output = load_shared(job.data), torch.device("cpu"), io.StringIO()
    learners = [Learner(job, shared, cpu) for _ in range(2)]
    checkpoints = Checkpoints(paths.checkpoints, job.checkpoint)
    checkpoints.forget_damaged()
    steps = epoch_steps(learners[0].info.train_size, job.global_batch_size, job.batch_ramp)
    slots = PretendedPool("slot", [Slot(learners[0], 0)]) if most_candidates(job) else None
    workers: Any = PretendedPool("worker", [Worker(learners[1], 0, 1, 0.0)])
    this = TrainingRun(
        job,
        paths,
        checkpoints,
        build_policy(job, steps),
        steps,
        workers,
        slots,  # type: ignore[arg-type]
        Vault(),
        Lines(Console(file=output)),
        Startup(0.0),
        uses_gpu=False,
        main=Together(workers),
    )
    process = Process([], "", finished=False)
    for name in MOVES:
        setattr(this, name, counted(name, getattr(this, name), process.moves, is_cut))
    try:
        train(job, this)
        this.wait_for_commit()
        process.finished = True
    except Cut:
        pass
    finally:
        this.close()
        for learner in learners:
            learner.close()
    process.told = output.getvalue()
    return process


def counted(
    name: str, move: Callable[..., Any], moves: list[str], is_cut: Callable[[list[str]], bool]
) -> Callable[..., Any]:
    def make(*arguments: Any) -> Any:
        result = move(*arguments)
        moves.append(name)
        if is_cut(moves):
            raise Cut
        return result

    return make


def outcome(paths: RunPaths) -> dict[str, Any]:
    """All numbers that a run leaves, but for times."""
    latest = Checkpoints(paths.checkpoints, small_job(paths.local).checkpoint).latest
    assert latest is not None
    state, plain = read_checkpoint(paths.checkpoints / latest.folder)
    position = Position.from_plain(plain)
    rounds = read_lines(str(paths.local), "rounds") if paths.rounds.exists() else []
    epochs = read_lines(str(paths.local), "epochs")
    parts = [sorted(line["parts_s"]) for line in (*rounds, *epochs)]
    for line in epochs:
        for name in ("seconds", "samples_per_s", "parts_s"):
            del line[name]
    return {
        "commit": latest.reached,
        "state": state.digest(),
        "lrs": position.lrs,
        "samples": (position.search_samples, position.main_samples),
        "rounds": without_times(rounds),
        "epochs": epochs,
        "parts": parts,
        "schedule": json.loads(paths.schedule.read_text()),
    }


@dataclass
class Whole:
    """A run that was not cut."""

    job: Job
    moves: list[str]
    outcome: dict[str, Any]


def tiny_job(storage: Path, **changes: Any) -> Job:
    model = {"name": "small_cnn", "args": {"width": 2}}
    return small_job(storage, model=model, workers={"count": 1}, **changes)


@pytest.fixture(scope="module", params=JOBS)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    job = tiny_job(tmp_path_factory.mktemp("whole"), **JOBS[request.param])
    paths = RunPaths.create(job.storage_path, job.name)
    process = execute(job, paths, lambda _: False)
    found = Whole(job, process.moves, outcome(paths))
    assert found.moves.count("commit") == job.epochs
    # Steps of a round are kept, with stpt_horizon in a later one.
    kept = [line for line in found.outcome["rounds"] if line["kept_steps"]]
    assert bool(kept) == bool(most_candidates(job))
    return found


def resumed_until_finished(
    job: Job, paths: RunPaths, is_cut: Callable[[list[str]], bool]
) -> list[Process]:
    processes = [execute(job, paths, is_cut)]
    while not processes[-1].finished:
        assert len(processes) < 100
        processes.append(execute(job, paths, is_cut))
    return processes


@pytest.mark.parametrize("further", [0, 1, 2])
def test_a_run_that_is_cut_after_every_commit_ends_as_one_that_was_not(
    whole: Whole, further: int, tmp_path: Path
) -> None:
    """Each process makes one more commit and then `further` moves, which are lost."""

    def is_cut(moves: list[str]) -> bool:
        commits = [number for number, name in enumerate(moves) if name in COMMITS]
        return bool(commits) and len(moves) - 1 == commits[0] + further

    paths = RunPaths.create(str(tmp_path), "cut")
    processes = resumed_until_finished(whole.job, paths, is_cut)
    made = [move for process in processes for move in process.moves]
    commits = sum(move in COMMITS for move in whole.moves)
    assert sum(move in COMMITS for move in made) == commits
    assert len(processes) == commits + (further == 0)
    assert outcome(paths) == whole.outcome
    if further == 0:
        assert made == whole.moves


def test_the_user_is_told_from_where_it_goes_on(tmp_path: Path) -> None:
    job, paths = tiny_job(tmp_path, **JOBS["stpt"]), RunPaths.create(str(tmp_path), "cut")
    processes = resumed_until_finished(job, paths, lambda moves: moves[-1] in COMMITS)
    told = [line for process in processes for line in process.told.splitlines()]
    assert [line for line in told if line.startswith("resumed")] == [
        "resumed after round 1 of epoch 1",
        "resumed after epoch 1",
        "resumed after round 1 of epoch 2",
        "resumed after epoch 2",
        "resumed after round 1 of epoch 3",
        "resumed after epoch 3",
    ]


@pytest.mark.parametrize("name", ["stpt", "schedule"])
def test_epochs_without_a_commit_are_trained_again(name: str, tmp_path: Path) -> None:
    """What was written of them is forgotten; the round after them is not repeated."""
    job = tiny_job(tmp_path, **{**JOBS[name], "epochs": 4}, checkpoint={"every_epochs": 2})
    whole, cut = (RunPaths.create(str(tmp_path), kind) for kind in ("whole", "cut"))
    execute(job, whole, lambda _: False)
    execute(job, cut, lambda moves: moves.count("commit") == 3)
    rest = execute(job, cut, lambda _: False)
    assert rest.moves.count("commit") == 2
    assert rest.moves[0] == "main_train"
    assert outcome(cut) == outcome(whole)


def test_a_damaged_commit_costs_what_came_after_the_one_before(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, **JOBS["stpt"])
    whole, cut = (RunPaths.create(str(tmp_path), kind) for kind in ("whole", "cut"))
    execute(job, whole, lambda _: False)
    execute(job, cut, lambda moves: moves.count("commit_round") == 3)
    (cut.checkpoints / "epoch-0002-round-01" / "rest.pt").write_bytes(b"")
    rest = execute(job, cut, lambda _: False)
    assert "resumed after epoch 2" in rest.told
    assert rest.moves[0] == "pretrain"
    assert outcome(cut) == outcome(whole)


# Storage that fails while a run writes to it.


def failing_after(epochs: int, fail: Callable[[], None]) -> Callable[[list[str]], bool]:
    """Nothing is cut, but after so many epochs `fail` is called once."""
    due = [fail]

    def is_cut(moves: list[str]) -> bool:
        if due and moves.count("commit") == epochs:
            due.pop()()
        return False

    return is_cut


@pytest.mark.parametrize("room", [0, 1500, 6000])
def test_a_full_disk_ends_the_run_and_costs_nothing_that_was_committed(
    room: int, tmp_path: Path
) -> None:
    """Whether it refuses the weights, or the end of a line of a record."""
    job = tiny_job(tmp_path, **JOBS["stpt"])
    whole, cut = (RunPaths.create(str(tmp_path), kind) for kind in ("whole", "cut"))
    execute(job, whole, lambda _: False)
    with ExitStack() as full:
        fill = failing_after(2, lambda: full.enter_context(files_at_most(room)))
        with pytest.raises(CommitError, match=rf"^{cut.local}.* cannot be written: "):
            execute(job, cut, fill)
    assert read_index(cut.checkpoints)[-1].epoch >= 1
    resumed_until_finished(job, cut, lambda _: False)
    assert outcome(cut) == outcome(whole)


@pytest.mark.parametrize("name", ["stpt", "schedule"])
def test_a_run_whose_directory_vanishes_ends_and_makes_no_new_one(
    name: str, tmp_path: Path
) -> None:
    job = tiny_job(tmp_path, **JOBS[name])
    paths = RunPaths.create(str(tmp_path), "run")
    vanish = failing_after(1, lambda: shutil.rmtree(paths.local))
    with pytest.raises(CommitError, match=rf"^{paths.local}\S* cannot be written"):
        execute(job, paths, vanish)
    assert not paths.local.exists()


def test_a_round_in_which_every_slot_died_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once one has died too often, its pool does without its reply."""
    command = PretendedPool.command

    def answer(pool: PretendedPool, given: Command, expected: Any = None) -> dict[int, Any]:
        return {} if isinstance(given, Pretrain) else command(pool, given, expected)

    monkeypatch.setattr(PretendedPool, "command", answer)
    paths = RunPaths.create(str(tmp_path), "run")
    with pytest.raises(PoolError, match="epoch 1: every slot died more often than limits.max_re"):
        execute(tiny_job(tmp_path, **JOBS["stpt"]), paths, lambda _: False)
