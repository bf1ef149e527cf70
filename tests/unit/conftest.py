"""For the tests of what is told before any process of a run is started."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray seems to be there, as it starts beside the reading of the data; using it fails the
    test.
    """
    import ray

    import raytrain_opt.start

    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def refuse(*_: object, **__: object) -> None:
        pytest.fail("Ray was used for a job that cannot run")

    @contextmanager
    def pretended(address: str | None, *, verbose: bool) -> Iterator[bool]:
        yield True

    monkeypatch.setattr(raytrain_opt.start, "ray_session", pretended)
    monkeypatch.setattr(ray, "init", refuse)
