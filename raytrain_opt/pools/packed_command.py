"""Commands as bytes that need not go through Ray, with the names of states for references."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from raytrain_opt.pools.commands import Command, StateRef


@dataclass(frozen=True)
class PackedCommand:
    """A command of this number, and the references that its bytes have only the names of."""

    number: int
    content: bytes
    states: dict[str, StateRef]


def pack(number: int, command: Command) -> PackedCommand:
    """Pickle a command, each of its states as a name."""
    content, states = io.BytesIO(), dict[str, StateRef]()
    pickler = _Pickler(content)
    pickler.states = states
    pickler.dump((number, command))
    return PackedCommand(number, content.getvalue(), states)


def unpack(content: bytes, fetch: Callable[[str], Any]) -> tuple[int, Command]:
    """Return number and command. `fetch(id)` is called when a state is needed, for its `ref`."""
    unpickler = _Unpickler(io.BytesIO(content))
    unpickler.fetch = fetch
    unpacked: tuple[int, Command] = unpickler.load()
    return unpacked


class _Pickler(pickle.Pickler):
    states: dict[str, StateRef]

    def persistent_id(self, obj: object) -> tuple[str, str | None, str] | None:
        if not isinstance(obj, StateRef):
            return None
        self.states[obj.id] = obj
        return obj.id, obj.sha256, obj.node_id


class _Unpickler(pickle.Unpickler):
    fetch: Callable[[str], Any]

    def persistent_load(self, pid: tuple[str, str | None, str]) -> StateRef:
        state_id, sha256, node_id = pid
        return StateRef(state_id, partial(self.fetch, state_id), sha256, node_id)
