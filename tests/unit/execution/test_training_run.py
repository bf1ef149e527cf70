"""A run that is interrupted and resumed ends bit for bit as one that was not.

With real learners, data, policies, records and checkpoints, in one process without Ray.
"""

from __future__ import annotations

import io
import itertools
import math
import random
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raytrain_opt import Job
from raytrain_opt.config.schema import CheckpointSection
from raytrain_opt.data import load_shared_data
from raytrain_opt.driver import open_run, train
from raytrain_opt.errors import JobError, PoolError, RecordError, StorageError
from raytrain_opt.execution.checkpoint_schedule import Interval
from raytrain_opt.execution.progress import RunProgress
from raytrain_opt.execution.signals import Terminated
from raytrain_opt.execution.training_run import TrainingRun
from raytrain_opt.paths import RunPaths
from raytrain_opt.pools import in_process, interface
from raytrain_opt.pools.commands import Command, MainTrain, Pretrain, Progress
from raytrain_opt.pools.in_process import InProcessPool, in_process_pools
from raytrain_opt.pools.interface import Pools, SynchronousTraining, TrainingOutcome
from raytrain_opt.pools.worker import Slot, Worker
from raytrain_opt.train.checkpoint import Checkpoints, Point, read_checkpoint, read_index
from raytrain_opt.train.learner import Learner
from tests.support.full_disk import limit_file_size
from tests.support.samples import Samples
from tests.support.small_jobs import read_lines, small_job, without_times

MUON = {"name": "Muon", "args": {"weight_decay": "auto"}}
FRAGILE = "tests.support.broken_parts:Fragile"
CNN = {"name": "small_cnn", "args": {"width": 2}}
COLLAPSING: dict[str, Any] = {
    "epochs": 8,
    "global_batch_size": 128,
    "learning_rate": {"policy": "stpt_horizon", "initial": 0.1, "max_search_cost": 1.0},
}
JOBS: dict[str, dict[str, Any]] = {
    "stpt": {
        "epochs": 3,
        "learning_rate": {"policy": "stpt", "candidates": [1.0, 0.5], "alpha": 3},
        "loss": {"class_weights": "balanced"},
    },
    "stpt on workers": {
        "epochs": 3,
        "data": {"name": "digits", "sampler": "balanced"},
        "learning_rate": {
            "policy": "stpt",
            "candidates": [1.0, 0.5, 0.7],
            "alpha": 3,
            "search_on": "workers",
        },
    },
    "stpt local": {
        "epochs": 2,
        "workers": {"count": 2},
        "parallel": {"micro_batches": 4},
        "learning_rate": {
            "policy": "stpt",
            "candidates": [1.0, 0.5],
            "alpha": 3,
            "candidate_batch": "local",
        },
    },
    "stpt_horizon": {
        "epochs": 10,
        "global_batch_size": 128,
        "learning_rate": {
            "policy": "stpt_horizon",
            "initial": 1.0,
            "max_search_cost": 1.0,
            "search_on": "slots",
        },
    },
    "schedule-free": {
        "epochs": 2,
        "optimizer": "ScheduleFreeAdamW",
        "learning_rate": {"policy": "schedule", "shape": "constant", "initial": 0.0025},
    },
    "optimizers": {  # the second one is chosen
        "model": CNN,
        "epochs": 16,
        "global_batch_size": 128,
        "optimizer": {"name": "auto", "candidates": ["Adagrad", MUON]},
        "learning_rate": {"policy": "stpt_horizon", "max_search_cost": 1.0},
    },
    "diverged": {  # in the second epoch, then in the fourth; trains at a rate ten times lower
        **COLLAPSING,
        "optimizer": {"name": FRAGILE, "args": {"limit": 0.2}},
    },
    "ruined": {  # by the last step of an epoch, so that the training loss does not show it
        **COLLAPSING,
        "global_batch_size": 89,
        "optimizer": {"name": FRAGILE, "args": {"limit": 0.5}},
    },
    "collapsed": {  # seen after the second epoch
        **COLLAPSING,
        "model": CNN,
        "optimizer": {"name": FRAGILE, "args": {"limit": 5.0, "ruin": 0.0}},
    },
    "schedule": {"epochs": 4, "learning_rate": {"policy": "schedule", "shape": "linear"}},
    "plateau": {
        "epochs": 4,
        "data": {"name": "digits", "drop_last": False},
        "optimizer": {"name": "Muon", "lr_multipliers": {"0.*": 0.5}},
        "learning_rate": {"policy": "schedule", "shape": "plateau", "patience": 1},
    },
}
MOVES = (
    *("pretrain", "state_after", "start_again", "checkpoint_search"),
    *("train_epoch", "evaluate", "checkpoint_epoch"),
)
IN_EVALUATION = 0


class Moves(list[str]):
    """Names of moves; `first_save`: the position of the first that began a checkpoint."""

    first_save = 10**9


class Interrupted(Exception):  # noqa: N818 - not an error of the run
    """The process ends here."""


# Receives the moves of a process so far; True interrupts the process after the last one.
Interrupt = Callable[[Moves], bool]


def never(_moves: list[str]) -> bool:
    return False


@dataclass
class Process:
    """One execution: its moves until it ended or was interrupted, and its output."""

    moves: Moves
    output: str = ""
    finished: bool = False


def execute(
    job: Job,
    folder: Path,
    interrupt: Interrupt = never,
    kills: random.Random | None = None,
    stop_in: int | None = None,
    kill_in: tuple[int, int] | None = None,
) -> Process:
    """Execute the run in a folder until it is interrupted, or resume it.

    Like every new process, it knows nothing but the run directory. `kills`: kill the resident in
    each command, at a random step. `stop_in`: a signal arrives in this step of the main training.
    `kill_in`: the process is killed in it; the second number is `checkpoint.every`.
    """
    job = job.model_copy(update={"storage_path": str(folder), "resume": "auto"})
    process = Process(Moves())
    with (
        redirect_stdout(io.StringIO()) as output,
        pytest.MonkeyPatch.context() as patch,
        suppress(Interrupted, Terminated, Killed),
    ):
        if kills is not None:
            patch.setattr(in_process, "in_process_pools", partial(mortal_pools, kills))
        with open_run(job, in_process=True) as run:
            interrupt_moves(run, process.moves, interrupt)
            if stop_in is not None:
                signal_in_step(run, stop_in)
            if kill_in is not None:
                kill_in_step(run, *kill_in)
            train(run)
            run.checkpoints.wait()
            process.finished = True
    process.output = output.getvalue()
    return process


def paths_of(folder: Path) -> RunPaths:
    """Return the files of the run in a folder; what was stopped before a checkpoint is no run."""
    jobs = folder.glob("*/job.yaml")
    return RunPaths(max(jobs, key=lambda job: job.stat().st_mtime_ns).parent)


class MortalPool(InProcessPool):
    """Its resident dies in every command; as on Ray, a new one repeats the command."""

    def __init__(
        self, name: str, make: Callable[[], Slot | Worker], chance: random.Random
    ) -> None:
        super().__init__(name, make())
        self._make, self._chance = make, chance

    def command(self, command: Command, expected: Any = None) -> dict[int, Any]:
        last = self._chance.randrange(6)

        def die(done: int, _total: int) -> None:
            if done >= last:
                raise Interrupted

        with suppress(Interrupted):  # or it dies before its reply is sent
            self.resident.handle(command, die)
        self.resident.learner.close()
        self.resident = self._make()  # it knows nothing of the commands before
        return super().command(command, expected)


def mortal_pools(chance: random.Random, learner: Learner, **options: Any) -> Pools:
    pools, config = in_process_pools(learner, **options), learner.config

    def make_learner() -> Learner:
        return Learner(config, load_shared_data(config.data), torch.device("cpu"))

    def make_worker() -> Worker:
        return Worker(make_learner(), 0, 1, pools.states)

    def make_slot() -> Slot:
        return Slot(make_learner(), 0, pools.states, options["candidate_batch"])

    workers = MortalPool("worker", make_worker, chance)
    slots = pools.slots and MortalPool("slot", make_slot, chance)
    training = SynchronousTraining(workers)
    return replace(pools, workers=workers, slots=slots, main_training=training)


def interrupt_moves(run: TrainingRun, moves: Moves, interrupt: Interrupt) -> None:
    """Count the moves of the run, and ask after each one whether the process ends there."""

    def counted(name: str, move: Callable[..., Any]) -> Callable[..., Any]:
        def make(*arguments: Any) -> Any:
            before, result = run.checkpoints._saved_folder, move(*arguments)
            moves.append(name)
            if run.checkpoints._saved_folder != before:
                moves.first_save = min(moves.first_save, len(moves) - 1)
            if interrupt(moves):
                raise Interrupted
            return result

        return make

    for name in MOVES:
        setattr(run, name, counted(name, getattr(run, name)))


def signal_in_step(run: TrainingRun, number: int) -> None:
    """Let SIGTERM arrive before the n-th step of the process's main training, or in evaluation."""
    calls, stop = itertools.count(1), run.stop
    workers = run.pools.workers
    show = workers.on_wait
    assert show is not None

    def on_wait(pool: str, progress: Progress | None) -> None:
        if (stop._limit_s is None) == (number == IN_EVALUATION) and next(calls) == max(number, 1):
            stop.make(Terminated())
        show(pool, progress)

    workers.on_wait = on_wait


def test_a_run_that_is_stopped_by_signals_within_epochs_ends_as_one_that_was_not(
    uninterrupted: Uninterrupted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process trains a few steps more and saves its step; the second one is evaluating."""
    monkeypatch.setattr(in_process, "_REPORT_EVERY_S", 0.0)
    monkeypatch.setattr(interface, "_SEGMENT_S", 0.0)  # a step is a segment
    finished, steps = False, []
    for number in [13, IN_EVALUATION, *[13] * 200]:
        if finished := execute(uninterrupted.job, tmp_path, never, stop_in=number).finished:
            break
        steps += [saved.steps for saved in read_index(paths_of(tmp_path).checkpoints)[-1:]]
    assert finished
    assert any(steps)
    assert outcome(tmp_path) == uninterrupted.outcome


class Killed(KeyboardInterrupt):
    """The process is killed here."""


def kill_in_step(run: TrainingRun, number: int, every: int) -> None:
    """Kill the process before its n-th step of main training; count the steps of an interval."""
    workers, steps = run.pools.workers, [0]
    show, interval, restart = workers.on_wait, run.checkpoints.interval, Interval.restart
    assert show is not None
    trained = itertools.count(1)

    def on_wait(pool: str, progress: Progress | None) -> None:
        if run.stop._limit_s is not None and not run._in_round:
            assert steps[0] <= every
            steps[0] += 1
            if next(trained) == number:
                raise Killed
        show(pool, progress)

    def begin_anew() -> None:
        steps[0] = 0
        restart(interval)

    workers.on_wait, interval.restart = on_wait, begin_anew  # type: ignore[method-assign]


def random_job(chance: random.Random, folder: Path) -> Job:
    """Draw from what trainings are made of. Raises JobError for what is refused together."""
    pick = chance.choice
    augment = pick([{}, {"crop_padding": 1, "flip": True}, {"mixup": 0.2}, {"cutmix": 0.3}])
    sampler, drop_last = pick(["random", "balanced"]), pick([True, False])
    rate = pick(
        [
            {"policy": "stpt", "candidates": [1.0, 0.5], "alpha": pick([2, 5])},
            {"policy": "stpt_horizon", "search_on": pick(["workers", "slots"])},
            {"policy": "schedule", "shape": pick(["cosine", "constant", "plateau"])},
        ]
    )
    optimizer = pick(["SGD", "AdamW", "LARS", "Muon", "Adagrad", "ScheduleFreeAdamW", "NAdam"])
    return small_job(
        folder,
        data={"name": "digits", "augment": augment, "sampler": sampler, "drop_last": drop_last},
        epochs=2,
        global_batch_size=pick([96, 128]),
        learning_rate={"initial": 0.02, **rate},
        optimizer={"name": optimizer, **pick([{}, {"clip_norm": 0.5}])},
        average=pick([None, 0.5]),
        batch_norm={"recalibrate_batches": pick([0, 3])},
        parallel={"micro_batches": pick([2, 4]), "compression": pick(["none", "bf16"])},
        evaluate={"every_epochs": pick([1, 2])},
        seed=chance.randrange(10),
    )


@pytest.mark.slow
def test_a_random_job_that_is_killed_ends_as_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samples: Samples
) -> None:
    monkeypatch.setattr(in_process, "_REPORT_EVERY_S", 0.0)
    for seed in samples(30):
        chance = random.Random(seed)
        job = None
        while job is None:
            with suppress(JobError):
                job = random_job(chance, tmp_path)
        every, whole, resumed = chance.randrange(2, 9), tmp_path / f"{seed}", tmp_path / f"{seed}r"
        job = job.model_copy(update={"checkpoint": CheckpointSection(every=every)})
        execute(job, whole)
        execute(job, resumed, kill_in=(chance.randrange(1, 20), every))
        execute(job, resumed)
        assert outcome(resumed) == outcome(whole), job


def test_a_run_that_is_killed_in_its_epochs_repeats_no_more_than_an_interval(
    uninterrupted: Uninterrupted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance, every = random.Random(seed := random.randrange(10**9)), 5
    print(f"seed of the random steps: {seed}")
    monkeypatch.setattr(in_process, "_REPORT_EVERY_S", 0.0)
    job = uninterrupted.job.model_copy(update={"checkpoint": CheckpointSection(every=every)})
    within = 0
    for number in [7, *(chance.randrange(6, max(20, 3 * job.epochs)) for _ in range(200))]:
        process = execute(job, tmp_path, never, kill_in=(number, every))
        within += any(saved.steps for saved in read_index(paths_of(tmp_path).checkpoints)[-1:])
        if process.finished:
            break
    assert process.finished
    assert within
    assert outcome(tmp_path) == uninterrupted.outcome


def test_a_notice_that_a_node_will_be_taken_away_saves_the_next_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_process, "_REPORT_EVERY_S", 0.0)
    monkeypatch.setattr(interface, "_SEGMENT_S", 0.0)  # a step is a segment
    job = tiny_job(tmp_path, **JOBS["schedule"] | {"epochs": 1}, checkpoint={"every": "1h"})
    saved = list[Point]()
    with redirect_stdout(io.StringIO()), open_run(job, in_process=True) as run:
        save, show, steps = run.checkpoints.save, run.pools.workers.on_wait, itertools.count(1)
        assert show is not None

        def note(state: Any, progress: RunProgress, *rest: Any) -> None:
            saved.append(progress.reached)
            save(state, progress, *rest)

        def on_wait(pool: str, progress: Progress | None) -> None:
            run.stop.saves |= next(steps) == 5
            show(pool, progress)

        monkeypatch.setattr(run.checkpoints, "save", note)
        run.pools.workers.on_wait = on_wait
        train(run)
        assert not run.stop.saves
    within, end = saved
    assert (within.epoch, 0 < within.steps < 10, end) == (0, True, Point(1))


@pytest.mark.parametrize("search_on", ["workers", "slots"])
def test_a_search_that_is_killed_trains_no_step_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, search_on: str
) -> None:
    """With a checkpoint after each step; a process is killed after 15 of them."""
    section = JOBS["stpt_horizon"]["learning_rate"] | {"search_on": search_on}
    changes = JOBS["stpt_horizon"] | {"learning_rate": section}
    job = tiny_job(tmp_path, **changes, checkpoint={"every": 1})
    trained, limit, command = list[int](), 10_000, InProcessPool.command

    def train_some(pool: InProcessPool, asked: Command, expected: Any = None) -> dict[int, Any]:
        if isinstance(asked, Pretrain):
            if len(trained) >= limit:
                raise Killed
            trained.append(asked.end)
        return command(pool, asked, expected)

    monkeypatch.setattr(InProcessPool, "command", train_some)
    execute(job, whole := tmp_path / "whole")
    steps, limit = sum(trained), 0
    trained.clear()
    for _ in range(50):
        limit += 15
        if execute(job, resumed := tmp_path / "resumed").finished:
            break
    assert sum(trained) == steps > 60
    assert outcome(resumed) == outcome(whole)


@pytest.mark.parametrize("name", ["stpt", "schedule"])
def test_workers_may_grow_before_each_part_of_the_main_training(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A candidate has trained the first steps of an epoch of `stpt`."""
    grown = list[None]()
    monkeypatch.setattr(InProcessPool, "grow", lambda _: grown.append(None))
    job = tiny_job(tmp_path, **JOBS[name], checkpoint={"every": 4})
    assert execute(job, tmp_path).finished
    [line, *_] = read_lines(str(paths_of(tmp_path).local), "epochs")
    assert len(grown) == job.epochs * math.ceil(line["samples"] / job.global_batch_size / 4)


def test_a_run_that_is_stopped_in_an_evaluation_keeps_the_staleness_of_its_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_steps = SynchronousTraining.train

    def train_asynchronously(
        training: SynchronousTraining, command: MainTrain, **options: Any
    ) -> TrainingOutcome:
        outcome = train_steps(training, command, **options)
        return replace(outcome, staleness=Counter({0: outcome.totals.steps}))

    monkeypatch.setattr(SynchronousTraining, "train", train_asynchronously)
    monkeypatch.setattr(in_process, "_REPORT_EVERY_S", 0.0)
    job = tiny_job(tmp_path, **{**JOBS["schedule"], "epochs": 1})
    assert not execute(job, tmp_path, never, stop_in=IN_EVALUATION).finished
    assert execute(job, tmp_path).finished
    [epoch] = outcome(tmp_path)["epochs"]
    assert epoch["staleness"] == {"0": len(outcome(tmp_path)["schedule"][0]["steps"]["lrs"])}


def outcome(folder: Path) -> dict[str, Any]:
    """Return all numbers that the run in a folder leaves, without times."""
    paths = paths_of(folder)
    latest = Checkpoints(paths.checkpoints, small_job(paths.local).checkpoint).latest
    assert latest is not None
    state, plain, _ = read_checkpoint(paths.checkpoints / latest.folder)
    progress = RunProgress.from_json(plain)
    rounds = (
        read_lines(str(paths.local), "rounds") if (paths.local / "rounds.jsonl").exists() else []
    )
    epochs = read_lines(str(paths.local), "epochs")
    # A resumed run did not wait for the checkpoint that it started from.
    parts = [sorted({*line["timings_s"]} - {"checkpoint_wait_s"}) for line in (*rounds, *epochs)]
    for line in epochs:
        for name in ("duration_s", "end_s", "samples_per_s", "timings_s"):
            del line[name]
    return {
        "checkpoint": latest.text,
        "state": state.digest(),
        "samples": (progress.search_samples, progress.kept_samples),
        "rounds": without_times(rounds),
        "epochs": epochs,
        "parts": parts,
        "schedule": read_lines(str(paths.local), "schedule"),
    }


@dataclass
class Uninterrupted:
    """A run that was not interrupted."""

    job: Job
    moves: list[str]
    outcome: dict[str, Any]


def network(num_classes: int, sample_shape: tuple[int, ...]) -> nn.Module:
    """Build a network with BatchNorm of which a step takes little time."""
    conv = nn.Conv2d(sample_shape[0], 4, 3, stride=2, padding=1, bias=False)
    rest = [nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, num_classes)]
    return nn.Sequential(conv, *rest)


def tiny_job(storage: Path, **changes: Any) -> Job:
    return small_job(storage, **{"model": network, "workers": {"count": 1}} | changes)


@pytest.fixture(scope="module", params=JOBS)
def uninterrupted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Uninterrupted:
    folder = tmp_path_factory.mktemp("uninterrupted")
    job = tiny_job(folder, **JOBS[request.param])
    run = Uninterrupted(job, execute(job, folder).moves, outcome(folder))
    assert run.moves.count("checkpoint_epoch") == job.epochs
    again = {"diverged": 2, "ruined": 1, "collapsed": 1}.get(request.param, 0)
    assert run.moves.count("start_again") == again
    kept = [line for line in run.outcome["rounds"] if line["kept_steps"]]
    assert all(line["search_on"] == job.search_on for line in kept)
    assert bool(kept) == (job.learning_rate.policy == "stpt")
    assert bool(run.outcome["rounds"]) == bool(job.learning_rate.max_candidates)
    for line in run.outcome["schedule"]:  # of MUON, also where the default chooses it
        searched = job.learning_rate.policy == "stpt_horizon"
        assert line["auto_weight_decay"] == (searched and line["optimizer"] == "Muon")
        is_watched = line["auto_weight_decay"] and line["epoch"] <= 8 and job.epochs == 16
        assert bool(line["steps"]["held_out"]) == is_watched
    return run


def test_a_run_that_is_interrupted_after_every_checkpoint_ends_as_one_that_was_not(
    uninterrupted: Uninterrupted, tmp_path: Path
) -> None:
    """Each process saves one more checkpoint; half of them make two moves more, which are lost."""
    finished, kept = False, list[str]()
    for further in [0, 2, 2, 0] * 25:

        def interrupt(moves: Moves, further: int = further) -> bool:
            return len(moves) - 1 == moves.first_save + further

        process = execute(uninterrupted.job, tmp_path, interrupt)
        if finished := process.finished:
            kept += process.moves
            break
        kept += process.moves[: len(process.moves) - further]
    assert finished
    assert kept == uninterrupted.moves
    assert outcome(tmp_path) == uninterrupted.outcome


def test_residents_that_die_in_every_command_change_no_number(
    uninterrupted: Uninterrupted, tmp_path: Path
) -> None:
    """They continue from the newest state, of which there are several in an epoch."""
    chance = random.Random(seed := random.randrange(10**9))
    print(f"seed of the random steps: {seed}")
    job = uninterrupted.job.model_copy(update={"checkpoint": CheckpointSection(every=5)})
    assert execute(job, tmp_path, never, chance).finished
    assert outcome(tmp_path) == uninterrupted.outcome


@pytest.mark.parametrize("name", ["stpt", "schedule"])
def test_epochs_without_a_checkpoint_are_trained_again(name: str, tmp_path: Path) -> None:
    """Their records are removed; the round after them is not repeated."""
    job = tiny_job(tmp_path, **{**JOBS[name], "epochs": 4}, checkpoint={"every_epochs": 2})
    expected, interrupted = tmp_path / "a", tmp_path / "b"
    execute(job, expected)
    execute(job, interrupted, lambda moves: moves.count("checkpoint_epoch") == 3)
    resumed = execute(job, interrupted)
    assert resumed.moves.count("checkpoint_epoch") == 2
    assert resumed.moves[0] == "train_epoch"
    assert outcome(interrupted) == outcome(expected)


# Storage that fails while a run writes to it.


def fail_after(epochs: int, fail: Callable[[], None]) -> Interrupt:
    """Interrupt nothing, but call `fail` once, after this many epochs."""
    due = [fail]

    def interrupt(moves: Moves) -> bool:
        if due and moves.count("checkpoint_epoch") == epochs:
            due.pop()()
        return False

    return interrupt


@pytest.mark.parametrize("room", [0, 1500, 6000])
def test_a_full_disk_ends_the_run_and_damages_no_checkpoint(room: int, tmp_path: Path) -> None:
    """The disk refuses the weights, or the end of a line of a record."""
    job = tiny_job(tmp_path, **JOBS["stpt"])
    expected, interrupted = tmp_path / "a", tmp_path / "b"
    execute(job, expected)
    with ExitStack() as full:
        fill = fail_after(2, lambda: full.enter_context(limit_file_size(room)))
        with pytest.raises(StorageError, match=rf"^{interrupted}.* cannot be written: "):
            execute(job, interrupted, fill)
    assert read_index(paths_of(interrupted).checkpoints)[-1].epoch >= 1
    assert execute(job, interrupted).finished
    assert outcome(interrupted) == outcome(expected)


@pytest.mark.parametrize("name", ["stpt", "schedule"])
def test_a_run_whose_directory_disappears_ends_and_makes_no_new_one(
    name: str, tmp_path: Path
) -> None:
    job = tiny_job(tmp_path, **JOBS[name])

    def remove() -> None:
        # The checkpoint in progress may write into the directory while it is removed.
        while any(tmp_path.iterdir()):
            shutil.rmtree(next(tmp_path.iterdir()), ignore_errors=True)

    with pytest.raises(
        (StorageError, RecordError), match=rf"^{tmp_path}\S* (cannot be|was removed)"
    ):
        execute(job, tmp_path, fail_after(1, remove))
    assert not any(tmp_path.iterdir())


def test_a_round_in_which_every_slot_died_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool leaves out the replies of residents that died too often."""
    execute_command = InProcessPool.command

    def command(pool: InProcessPool, command: Command, expected: Any = None) -> dict[int, Any]:
        return {} if isinstance(command, Pretrain) else execute_command(pool, command, expected)

    monkeypatch.setattr(InProcessPool, "command", command)
    with pytest.raises(PoolError, match="epoch 1: every slot died more often than max_restarts"):
        execute(tiny_job(tmp_path, **JOBS["stpt"]), tmp_path)


def test_a_round_goes_on_without_the_candidates_of_a_slot_that_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute_command = InProcessPool.command

    def command(pool: InProcessPool, command: Command, expected: Any = None) -> dict[int, Any]:
        if isinstance(command, Pretrain) and command.action.epoch == 2 and command.wave[0].index:
            return {0: None}
        return execute_command(pool, command, expected)

    monkeypatch.setattr(InProcessPool, "command", command)
    process = execute(tiny_job(tmp_path, **JOBS["stpt"]), tmp_path)
    first, second, third = outcome(tmp_path)["rounds"]
    for line in (first, third):
        assert [c["status"] for c in line["candidates"]] == ["ok", "ok"]
    assert [c["status"] for c in second["candidates"]] == ["ok", "lost"]
    assert (second["winner"], second["candidates"][1]["score"]) == (0, None)
    assert "is left out: its slot died more often" in " ".join(process.output.split())


# The search cost.


def test_the_search_cost_is_what_was_trained_beyond_the_weights(tmp_path: Path) -> None:
    """Of two candidates, the winner's steps belong to the training."""
    job = tiny_job(tmp_path, **JOBS["stpt"])
    execute(job, tmp_path)
    numbers = outcome(tmp_path)
    steps, alpha = sum(len(line["steps"]["lrs"]) for line in numbers["schedule"]), 3
    search, kept = numbers["samples"]
    assert search == job.epochs * alpha * job.global_batch_size
    assert kept == steps * job.global_batch_size


def test_local_candidates_train_a_part_of_each_batch_and_give_the_rate_of_all(
    tmp_path: Path,
) -> None:
    """Of two workers; the kept steps of the winner have half the samples of the others."""
    job = tiny_job(tmp_path, **JOBS["stpt local"])
    execute(job, tmp_path)
    numbers = outcome(tmp_path)
    search, kept = numbers["samples"]
    steps, alpha = sum(len(line["steps"]["lrs"]) for line in numbers["schedule"]), 3
    batch = job.global_batch_size
    assert search == job.epochs * alpha * batch // 2
    assert kept == steps * batch - job.epochs * alpha * batch // 2
    for line in outcome(tmp_path)["rounds"]:
        winner = line["candidates"][line["winner"]]
        assert winner["lr"] == line["base_lr"] * winner["multiplier"] == line["next_base_lr"]
        assert (line["search_on"], winner["slot"]) == ("slots", 0)
