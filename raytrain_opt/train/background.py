"""Work beside the main thread, whose end nobody has to wait for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

R = TypeVar("R")


def start_thread(function: Callable[[], R]) -> Future[R]:
    """Call a function in a thread that ends with the process, even if its work never does."""
    future: Future[R] = Future()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised where the result is needed
            future.set_exception(error)

    Thread(target=call, daemon=True).start()
    return future
