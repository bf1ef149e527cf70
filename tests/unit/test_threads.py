"""How many threads compute, how they wait, and that a resumed run keeps their number."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from raytrain_opt import threads
from raytrain_opt.threads import Cores, available_cores


@pytest.mark.parametrize(
    ("available", "idle", "processes", "expected"),
    [
        # A quiet machine: all cores, in even parts.
        (16, 15.6, 1, 16),
        (16, 15.6, 3, 5),
        (2, 2.0, 4, 1),
        # One thread per idle core.
        (2, 1.1, 1, 1),
        (16, 12.4, 4, 3),
        # All cores are busy.
        (1, 0.0, 1, 1),
        (64, 0.0, 2, 8),
    ],
)
def test_threads_follow_the_idle_cores(
    available: int, idle: float, processes: int, expected: int
) -> None:
    assert Cores(available, idle).threads(processes) == expected


@pytest.mark.parametrize(
    ("value", "expected"), [("3", 3), ("2,1", 2), ("", None), ("0", None), ("x", None)]
)
def test_the_users_number_of_threads_wins(
    value: str, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    monkeypatch.setattr(threads, "_idle_cores", lambda: 1.0)
    cores = Cores.measure()
    assert cores.requested == expected
    assert cores.threads(7) == expected or expected is None


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, 64),
        ({"cpu.max": "max 100000\n"}, 64),
        ({"cpu.max": "350000 100000\n"}, 3),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 64),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
        ({"cpu.max": "9900000 100000\n"}, 64),
    ],
)
def test_a_container_has_the_cores_of_its_limit(
    files: dict[str, str], limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_cores(tmp_path) == limit


def test_cores_that_others_use_are_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a second, three cores of four: one idles, one waits for a disk, one is used by us."""
    now_s = [0.0]

    def core(idle_s: float, iowait_s: float = 0.0) -> SimpleNamespace:
        return SimpleNamespace(idle=idle_s * now_s[0], iowait=iowait_s * now_s[0])

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 3})
    monkeypatch.setattr(
        psutil, "cpu_times", lambda percpu: [core(1), core(1), core(0.25, 0.75), core(0)]
    )
    clock = SimpleNamespace(
        monotonic=lambda: now_s[0],
        process_time=lambda: 0.5 * now_s[0],
        sleep=lambda seconds: now_s.__setitem__(0, now_s[0] + seconds),
    )
    monkeypatch.setattr(threads, "time", clock)
    assert threads._idle_cores() == pytest.approx(2.5)


def test_a_user_is_told_of_threads_that_are_fewer_or_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(cores: Cores, processes: int = 1) -> str:
        lines: list[str] = []
        cores.choose(processes, lines.append)
        return "\n".join(lines)

    monkeypatch.setattr(threads, "THREADS_SPIN", False)
    assert told(Cores(2, 1.9)) == told(Cores(3, 3.0), 2) == told(Cores(8, 8, requested=1)) == ""
    assert "other programs use 1.8 of 2 cores: computing with 1 per process" in told(Cores(2, 0.2))
    monkeypatch.setattr(threads, "THREADS_SPIN", True)
    assert "torch was imported before raytrain_opt" in told(Cores(2, 2.0))
    assert told(Cores(1, 1.0)) == ""


@pytest.mark.parametrize(
    ("program", "variables", "policy"),
    [
        ("import raytrain_opt", {}, "passive 1000 False"),
        ("import raytrain_opt.cli", {}, "passive 1000 False"),
        ("import raytrain_opt", {"OMP_WAIT_POLICY": "active"}, "active None False"),
        # `torch` need not be the real one, which takes seconds to import.
        ("import sys; sys.modules['torch'] = sys; import raytrain_opt", {}, "passive 1000 True"),
        (
            "import sys; sys.modules['torch'] = sys; import raytrain_opt",
            {"GOMP_SPINCOUNT": "0"},
            "None 0 False",
        ),
    ],
)
def test_waiting_threads_sleep_from_the_import_on(
    program: str, variables: dict[str, str], policy: str
) -> None:
    show = "import os; from raytrain_opt.threads import THREADS_SPIN as spin"
    show += "; print(*map(os.environ.get, ('OMP_WAIT_POLICY', 'GOMP_SPINCOUNT')), spin)"
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("OMP", "GOMP"))}
    command = [sys.executable, "-c", f"{program}\n{show}"]
    done = subprocess.run(command, env=inherited | variables, capture_output=True, text=True)
    assert done.stdout.strip() == policy, done.stderr


@pytest.mark.parametrize(
    ("cores", "processes", "asked", "expected"),
    [
        (Cores(8, 8.0), 1, [8], 2),
        (Cores(8, 8.0), 2, [4], 2),
        (Cores(8, 2.9), 1, [3], 2),
        # Nothing to choose.
        (Cores(8, 8.0), 8, [], 1),
        (Cores(8, 8.0, requested=4), 1, [], 4),
    ],
)
def test_a_training_is_timed_with_the_threads_that_are_free(
    cores: Cores, processes: int, asked: list[int], expected: int
) -> None:
    calls: list[int] = []
    lines: list[str] = []

    def fastest(most: int) -> int:
        calls.append(most)
        return 2

    assert cores.choose(processes, lines.append, fastest) == expected
    assert calls == asked
    assert any("more are not faster" in line for line in lines) == bool(asked)
