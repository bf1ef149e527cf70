"""Notices that nodes will be taken away: the driver ends, other processes move."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import ray
from ray.exceptions import RayError

from raytrain_opt.cluster.ray_private import draining_nodes

# Clouds give notice 30 to 120 s before.
_POLL_S = 5.0


@contextmanager
def watch_preemption(note: Callable[[str], None]) -> Iterator[None]:
    """Note which nodes will be taken away; end the run, as SIGTERM does, when it is this one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_watch, args=(ended, note), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_POLL_S)


def _watch(ended: threading.Event, note: Callable[[str], None]) -> None:
    here, known = ray.get_runtime_context().get_node_id(), set[str]()
    while not ended.wait(_POLL_S):
        draining: set[str] = set()
        with suppress(RayError, RuntimeError):  # a control service that cannot be reached now
            draining = draining_nodes()
        if here in draining:
            note("this node will be taken away: the run ends")
            os.kill(os.getpid(), signal.SIGTERM)
            return
        if draining - known:
            nodes = "1 node" if len(draining) == 1 else f"{len(draining)} nodes"
            note(f"{nodes} will be taken away: processes there start elsewhere")
        known |= draining
