"""All reading of clocks, so that tests can replace it. Durations are monotonic, dates UTC."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

monotonic_s: Callable[[], float] = time.monotonic

# When this package was first imported; the command line measures its start-up from here.
PROCESS_STARTED_S: float = monotonic_s()


def utc_now() -> str:
    """Return date and time as ISO 8601 in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class Stopwatch:
    """Seconds of the named parts of a phase; parts of the same name add up."""

    def __init__(self, timings_s: dict[str, float] | None = None) -> None:
        self.timings_s = {} if timings_s is None else timings_s

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the duration of the block to `name`."""
        start_s = monotonic_s()
        try:
            yield
        finally:
            self.add(name, monotonic_s() - start_s)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds to `name`."""
        self.timings_s[name] = self.timings_s.get(name, 0.0) + seconds
