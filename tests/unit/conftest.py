"""For the tests of what is told before anything of Ray is started."""

from __future__ import annotations

import pytest


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting or reaching Ray fails the test."""
    import ray

    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def refuse(*_: object, **__: object) -> None:
        pytest.fail("Ray was started for a job that cannot run")

    monkeypatch.setattr(ray, "init", refuse)
