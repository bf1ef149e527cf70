"""Which processes of Ray can be forks: those that differ in arguments and Ray's variables only."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from raytrain_opt.cluster.fork_client import split_arguments

WORKER = ["/ray/default_worker.py", "--node-id=1", "--session-name=a=b"]


def with_context(context: dict[str, Any], language: str = "PYTHON") -> list[str]:
    value = f"--serialized-runtime-env-context={json.dumps(context)}"
    return [*WORKER, value, f"--language={language}"]


def test_without_a_runtime_environment_the_arguments_are_kept() -> None:
    assert split_arguments([*WORKER, "--language=PYTHON"]) == (WORKER, {})


def test_variables_of_ray_are_set_in_the_fork() -> None:
    context = {
        "command_prefix": [],
        "env_vars": {"RAY_A": "1"},
        "py_executable": sys.executable,
        "override_worker_entrypoint": None,
    }
    assert split_arguments(with_context(context)) == (WORKER, {"RAY_A": "1"})


def test_variables_that_the_process_has_anyway_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    same, other = ({"env_vars": {"MALLOC_ARENA_MAX": value}} for value in "12")
    assert split_arguments(with_context(same)) == (WORKER, {"MALLOC_ARENA_MAX": "1"})
    assert split_arguments(with_context(other)) is None


@pytest.mark.parametrize(
    "context",
    [
        {"env_vars": {"RAY_A": "1", "LD_PRELOAD": "x"}},
        {"env_vars": {}, "py_executable": "/other/python"},
        {"env_vars": {}, "command_prefix": ["cd", "/code"]},
    ],
)
def test_what_is_read_when_a_process_starts_needs_a_new_process(context: dict[str, Any]) -> None:
    assert split_arguments(with_context(context)) is None


def test_another_language_needs_a_process_of_its_own() -> None:
    assert split_arguments(with_context({}, language="JAVA")) is None
