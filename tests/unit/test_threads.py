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
    ("value", "expected"), [("3", 3), ("2,1", 2), ("", 2), ("0", 2), ("x", 2)]
)
def test_the_users_number_of_threads_wins(
    value: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    monkeypatch.setattr(threads, "available_cores", lambda: 16)
    assert choose_threads(7, lambda _: None) == expected


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, 64),
        ({"cpu.max": "max 100000\n"}, 64),
        ({"cpu.max": "350000 100000\n"}, 3),
        ({"cpu.max": "50000 100000\n"}, 1),
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
    def told(processes: int) -> str:
        lines: list[str] = []
        choose_threads(processes, lines.append)
        return "\n".join(lines)

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "available_cores", lambda: 2)
    monkeypatch.setattr(threads, "THREADS_SPIN", False)
    assert told(1) == ""
    monkeypatch.setattr(threads, "THREADS_SPIN", True)
    assert "torch was imported before raytrain_opt" in told(1)
    assert told(2) == ""


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
    ("requested", "processes", "asked", "expected"),
    [
        ("", 1, [8], 2),
        ("", 2, [4], 2),
        # Nothing to choose.
        ("", 8, [], 1),
        ("4", 1, [], 4),
    ],
)
def test_a_training_is_timed_with_the_threads_that_there_are(
    monkeypatch: pytest.MonkeyPatch,
    requested: str,
    processes: int,
    asked: list[int],
    expected: int,
) -> None:
    calls: list[int] = []
    lines: list[str] = []
    monkeypatch.setenv("OMP_NUM_THREADS", requested)
    monkeypatch.setattr(threads, "available_cores", lambda: 8)
    monkeypatch.setattr(threads, "THREADS_SPIN", False)

    def fastest(most: int) -> int:
        calls.append(most)
        return 2

    assert choose_threads(processes, lines.append, fastest) == expected
    assert calls == asked
    assert any("more are not faster" in line for line in lines) == bool(asked)
