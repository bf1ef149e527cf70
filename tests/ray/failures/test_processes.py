"""Processes that die, hang or raise, on a real Ray: who is restarted, who is named, what is left.

Residents compute nothing here, so that they start without torch (`tests.support.echo_pools`).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray.cluster_utils import Cluster

from raytrain_opt.clock import monotonic_s
from raytrain_opt.errors import PoolError, ResidentError
from raytrain_opt.execution.backend import open_backend
from raytrain_opt.execution.signals import Terminated
from raytrain_opt.execution.workspace import open_frontend, open_workspace
from raytrain_opt.pools.commands import Command, Evaluate, SendInitialState
from raytrain_opt.pools.ray_pool import RayPool
from tests.support.echo import CANDIDATE, DRIVERS, TRAINED, Done
from tests.support.echo_pools import EchoPools, echo_pools
from tests.support.ray_leftovers import placement_groups
from tests.support.small_jobs import small_job

pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.timeout(600)]


# Of `TestInOnePairOfPools`: each test has an epoch of its own, and so its faults.
DEATHS: list[dict[str, Any]] = [
    {"role": "slot", "index": 1, "epoch": 1, "phase": "pretrain", "step": 3},
    {"role": "slot", "index": 0, "epoch": 2, "phase": "send_candidate_state"},  # on arrival
    {"role": "worker", "index": 1, "epoch": 3, "phase": "main_train"},
    {"role": "worker", "index": 0, "epoch": 4, "phase": "main_train", "step": 5},
    {"role": "worker", "index": 1, "phase": "evaluate", "step": 0},
]


@pytest.fixture(scope="class")
def pools(local_ray: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EchoPools]:
    """Two workers and two slots, which die as planned and are alive again after each test."""
    storage = tmp_path_factory.mktemp("echo")
    with echo_pools(storage, workers=2, slots=2, faults=DEATHS, max_restarts=5) as echo:
        yield echo
    assert placement_groups() == set()


def restarted(pool: RayPool, command: Command, count: int) -> tuple[list[str], dict[int, Any]]:
    """Execute a command during which `count` residents are restarted; return who, and replies."""
    pool.new_events()
    before, replies = pool.restarts(), pool.command(command)
    deadline_s = monotonic_s() + 120
    while pool.restarts() < before + count:  # one that had replied may join again later
        assert monotonic_s() < deadline_s
        time.sleep(0.05)
    events = pool.new_events()
    assert {event.kind for event in events} == {"restarted"}
    assert all((event.silent_s or 0) > 0 for event in events)
    return sorted(str(event.process) for event in events), replies


class TestInOnePairOfPools:
    def test_a_killed_slot_is_restarted_alone_and_repeats_its_candidates(
        self, pools: EchoPools
    ) -> None:
        names, replies = restarted(pools.slots, pools.pretrain(1), 1)
        assert names == ["slot 1"]
        assert replies == dict.fromkeys(range(2), Done("pretrain", DRIVERS))

    def test_a_slot_that_is_killed_before_it_sends_a_state_makes_it_again(
        self, pools: EchoPools
    ) -> None:
        names, replies = restarted(pools.slots, pools.send_candidate_state(2), 1)
        assert names == ["slot 0"]
        assert pools.contents(replies) == dict.fromkeys(range(2), CANDIDATE)

    @pytest.mark.parametrize("epoch", [3, 4], ids=["as it arrives", "in a step"])
    def test_all_workers_are_restarted_with_a_killed_one_and_repeat_the_command(
        self, pools: EchoPools, epoch: int
    ) -> None:
        """They form one group."""
        names, replies = restarted(pools.workers, pools.main_train(epoch), 2)
        assert names == ["worker 0", "worker 1"]
        assert pools.contents(replies) == dict.fromkeys(range(2), TRAINED)

    def test_a_state_that_died_with_its_worker_is_there_again(self, pools: EchoPools) -> None:
        """It belongs to the worker that is killed in the evaluation; the driver holds a copy."""
        states = pools.workers.command(pools.main_train(5))
        names, replies = restarted(pools.workers, Evaluate(states[1]), 2)
        assert names == ["worker 0", "worker 1"]
        assert replies == dict.fromkeys(range(2), Done("evaluate", TRAINED))

    def test_an_exception_in_user_code_reaches_the_user(self, pools: EchoPools) -> None:
        with pytest.raises(ResidentError, match=r"slot \d: ValueError: planted failure") as caught:
            pools.slots.command(SendInitialState())
        assert "in handle" in caught.value.__notes__[0]


def test_a_slot_that_dies_too_often_is_given_up_and_the_others_continue(tmp_path: Path) -> None:
    fault = {"role": "slot", "index": 1, "phase": "pretrain", "always": True}
    with echo_pools(tmp_path, slots=2, faults=[fault], max_restarts=1) as echo:
        assert list(echo.slots.command(echo.pretrain(1))) == [0]
        assert echo.slots.alive() == (0,)
        assert echo.slots.restarts() == 1
    assert placement_groups() == set()


def test_when_no_slot_is_left_the_error_says_why(tmp_path: Path) -> None:
    fault = {"role": "slot", "phase": "pretrain", "always": True}
    with echo_pools(tmp_path, slots=1, faults=[fault], max_restarts=0) as echo:
        assert echo.slots.command(echo.pretrain(1)) == {}
        with pytest.raises(PoolError, match="(?s)the slot pool ended .*actor died unexpectedly"):
            echo.slots.wait_until_ready(60)


def hanging(index: int, step: int) -> dict[str, Any]:
    phase = {"phase": "main_train", "step": step, "action": "hang"}
    return {"role": "worker", "index": index, **phase}


def test_hung_workers_are_named_with_their_logs_the_one_furthest_behind_first(
    tmp_path: Path,
) -> None:
    """A worker that waits for a hung one looks the same from outside."""
    resident = (
        r"worker {} \(pid \d+, worker-\S+\.err in Ray's session logs\): {} of 8 steps, silent"
    )
    words = (
        r"no progress of main_train for \d+ s .*timeouts\.no_progress_s: 8\).*"
        + f"{resident.format(1, 0)}.*{resident.format(0, 7)}"
    )
    faults = [hanging(1, step=0)]
    with (
        echo_pools(tmp_path, workers=2, faults=faults, no_progress_s=8) as echo,
        pytest.raises(PoolError, match=words),
    ):
        echo.workers.command(echo.main_train(1))
    assert placement_groups() == set()


def act_in_a_command(storage: Path, act: Callable[[], object]) -> None:
    """Do something as soon as a worker works on a command, in which it hangs."""
    with echo_pools(storage, workers=1, faults=[hanging(0, step=2)]) as echo:
        echo.act_at_work(act)
        echo.workers.command(echo.main_train(1))


@pytest.mark.parametrize(
    ("title", "words"),
    [("Mailbox", "the mailbox, the process .* has died"), ("PoolLauncher", "pool ended before")],
)
def test_the_death_of_a_process_that_is_not_restarted_is_reported(
    tmp_path: Path, title: str, words: str
) -> None:
    def kill() -> None:
        # Ray writes the class of an actor into its command line.
        [victim] = [p for p in descendants() if f"ray::{title}" in " ".join(p.cmdline())]
        os.kill(victim.pid, signal.SIGKILL)

    with pytest.raises(PoolError, match=words):
        act_in_a_command(tmp_path, kill)
    assert placement_groups() == set()


def test_sigterm_ends_a_run_and_its_pools(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Although Ray has a handler of its own for it."""
    job = small_job(tmp_path)
    with (
        pytest.raises(Terminated),
        open_frontend(monotonic_s()) as frontend,
        open_backend(job, frontend),
        open_workspace(job, frontend),
    ):
        act_in_a_command(tmp_path, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert "terminated; no checkpoint was saved yet" in capsys.readouterr().out
    assert placement_groups() == set()


def descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)
