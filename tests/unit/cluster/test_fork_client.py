"""Which processes of Ray can be forks: those that differ in arguments and Ray's variables only."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import pytest

from raytrain_opt.cluster import fork_client
from raytrain_opt.cluster.fork_client import split_arguments
from raytrain_opt.pools.launcher import environment

WORKER = ["/ray/default_worker.py", "--node-id=1", "--session-name=a=b"]


def with_context(context: dict[str, Any], language: str = "PYTHON") -> list[str]:
    value = f"--serialized-runtime-env-context={json.dumps(context)}"
    return [*WORKER, value, f"--language={language}"]


@pytest.mark.parametrize(
    ("arguments", "split"),
    [
        ([*WORKER, "--language=PYTHON"], (WORKER, {})),
        (
            with_context(
                {
                    "command_prefix": [],
                    "env_vars": {"RAY_A": "1"},
                    "py_executable": sys.executable,
                    "override_worker_entrypoint": None,
                }
            ),
            (WORKER, {"RAY_A": "1"}),
        ),
        # What is read when a process starts needs a new process, and so does another language.
        (with_context({"env_vars": {"RAY_A": "1", "LD_PRELOAD": "x"}}), None),
        (with_context({"env_vars": {}, "py_executable": "/other/python"}), None),
        (with_context({"env_vars": {}, "command_prefix": ["cd", "/code"]}), None),
        (with_context({}, language="JAVA"), None),
    ],
)
def test_a_fork_has_the_arguments_and_variables_of_its_process(
    arguments: list[str], split: Any
) -> None:
    assert split_arguments(arguments) == split


def test_variables_that_the_process_has_anyway_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    same, other = ({"env_vars": {"MALLOC_ARENA_MAX": value}} for value in "12")
    assert split_arguments(with_context(same)) == (WORKER, {"MALLOC_ARENA_MAX": "1"})
    assert split_arguments(with_context(other)) is None


def test_the_variables_of_ray_tune_and_ray_train_allow_a_fork(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All processes of a local Ray have what the two set in their actors."""
    from ray.train.v2._internal.constants import get_env_vars_to_propagate
    from ray.tune.execution import class_cache

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    for name, value in environment(local=True, start_s=60.0).items():
        monkeypatch.setenv(name, value)
    of_tune = {n: os.environ[n] for n in class_cache.ENV_VARS_TO_PROPAGATE if n in os.environ}
    for variables in (class_cache.DEFAULT_ENV_VARS | of_tune, get_env_vars_to_propagate()):
        assert split_arguments(with_context({"env_vars": variables})) == (WORKER, variables)


@pytest.mark.parametrize("arguments", [[], ["--serialized-runtime-env-context={}"]])
def test_arguments_of_an_unknown_form_are_left_to_ray(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    called: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, command: called.append(command))
    fork_client.start_worker([*WORKER, *arguments])
    assert called == [[sys.executable, "/ray/setup_worker.py", *WORKER, *arguments]]
