"""Time, in one place, so that tests can replace it. Durations are monotonic, dates are UTC."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

monotonic_s: Callable[[], float] = time.monotonic

# When this package was first imported; the command line counts its start-up from here.
PROCESS_STARTED_S: float = monotonic_s()


def utc_now() -> str:
    """The date as ISO 8601 in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class Parts:
    """Seconds by named part of some larger phase; parts of the same name add up.

    >>> parts = Parts()
    >>> with parts.measure("load"):
    ...     pass
    >>> list(parts.seconds)
    ['load']
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        start_s = monotonic_s()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + monotonic_s() - start_s
