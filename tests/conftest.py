"""Settings for all tests."""

from __future__ import annotations

import gc
import os

import pytest

from tests.support.samples import samples  # noqa: F401 - fixture

# Before torch is imported: several threads in each of several processes on few cores mostly wait
# for each other (the unit tests take many times longer).
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Collecting garbage among all tests and what they import takes a tenth of the time.
gc.disable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-samples", action="store_true", help="test statistical laws with all samples"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the file that takes longest, so that all processes end at about the same time."""
    items.sort(key=lambda item: item.path.name != "test_training_run.py")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else libraries report at the end what was not collected


@pytest.fixture
def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write an empty report at the end of a run: plots take longer than a small training."""
    from raytrain_opt.report import page

    monkeypatch.setattr(page, "report_page", lambda _run: "no plots")
