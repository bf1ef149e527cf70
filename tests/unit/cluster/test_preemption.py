"""A node that will be taken away: the driver's ends the run, another one does not."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from ray.exceptions import RaySystemError

from raytrain_opt.cluster import preemption
from raytrain_opt.cluster.preemption import watch_preemption
from raytrain_opt.execution.signals import Terminated, stop_on_signals


class Notices:
    """What Ray says at each look: identities of nodes, or an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *looks: set[str] | Exception) -> None:
        self.looks = list(looks)
        context = SimpleNamespace(get_node_id=lambda: "driver")
        monkeypatch.setattr(preemption, "_POLL_S", 0.001)
        monkeypatch.setattr(preemption.ray, "get_runtime_context", lambda: context)
        monkeypatch.setattr(preemption, "draining_nodes", self.look)

    def look(self) -> set[str]:
        look = self.looks.pop(0) if self.looks else set[str]()
        if isinstance(look, Exception):
            raise look
        return look


def wait_for_all(notices: Notices) -> None:
    deadline_s = time.monotonic() + 30
    while notices.looks and time.monotonic() < deadline_s:
        time.sleep(0.001)


def test_the_driver_ends_when_its_node_will_be_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    notices, notes = Notices(monkeypatch, RaySystemError("GCS"), set(), {"driver"}), list[str]()
    with pytest.raises(Terminated), stop_on_signals(), watch_preemption(notes.append):
        time.sleep(30)
    assert notes == ["this node will be taken away: the run ends"]
    assert notices.looks == []


def test_the_run_continues_when_another_node_will_be(monkeypatch: pytest.MonkeyPatch) -> None:
    notices, notes = Notices(monkeypatch, {"a"}, {"a"}, {"a", "b"}, set()), list[str]()
    with stop_on_signals(), watch_preemption(notes.append):
        wait_for_all(notices)
    assert [note.split(" will", 1)[0] for note in notes] == ["1 node", "2 nodes"]
