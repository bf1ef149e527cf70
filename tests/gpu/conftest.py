"""Settings of torch that a test on a GPU must not leave to the next one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _failures_to_compile_are_errors() -> Iterator[None]:
    """`compile: auto` lets a network stay eager instead."""
    with torch._dynamo.config.patch(suppress_errors=False):
        yield
