"""How many threads compute, how they wait, and that a resumed run keeps their number."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from raytrain_opt import threads
from raytrain_opt.threads import available_cores, choose_threads


@pytest.mark.parametrize(
    ("value", "expected"), [("3", 3), ("2,1", 2), ("", 8), ("0", 8), ("x", 8)]
)
def test_the_users_number_of_threads_wins(
    value: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
    assert choose_threads(2, print) == expected


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


def test_a_user_is_told_of_threads_that_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "THREADS_SPIN", True)
    assert choose_threads(2, lines.append) == 1
    assert not lines
    assert choose_threads(1, lines.append) == 2
    assert "torch was imported before raytrain_opt" in lines[0]


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
    ("processes", "requested", "asked", "expected"),
    [(1, "", [8], 2), (2, "", [4], 2), (8, "", [], 1), (1, "4", [], 4)],
)
def test_a_training_is_timed_with_the_threads_of_its_cores(
    processes: int,
    requested: str,
    asked: list[int],
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.setenv("OMP_NUM_THREADS", requested)
    calls: list[int] = []
    lines: list[str] = []

    def fastest(most: int) -> int:
        calls.append(most)
        return 2

    assert choose_threads(processes, lines.append, fastest) == expected
    assert calls == asked
    assert any("more are not faster" in line for line in lines) == bool(asked)
