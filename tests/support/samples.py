"""How many samples a statistical law is tested with."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Samples = Callable[[int], range]


@pytest.fixture
def samples(pytestconfig: pytest.Config) -> Samples:
    """Return seeds: a fifth of as many as the law deserves, or all with --all-samples."""
    divisor = 1 if pytestconfig.getoption("--all-samples") else 5
    return lambda count: range(count // divisor)
