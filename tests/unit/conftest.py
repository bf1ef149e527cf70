"""Fixtures for tests of errors that a run reports before it starts any process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.s3_server import s3, s3_server  # noqa: F401 - fixtures


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that Ray starts, as it does while data are read; using it fails the test."""
    import ray

    import raytrain_opt.execution.on_ray

    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def refuse(*_: object, **__: object) -> None:
        pytest.fail("Ray was used for a job that cannot run")

    @contextmanager
    def fake_session(*_: object, **__: object) -> Iterator[bool]:
        yield True

    monkeypatch.setattr(raytrain_opt.execution.on_ray, "ray_session", fake_session)
    monkeypatch.setattr(ray, "init", refuse)
