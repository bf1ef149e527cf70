"""States in Ray's object store: how the driver and the residents reach them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import ray

from raytrain_opt.cluster.connection import gone_nodes
from raytrain_opt.errors import PoolError
from raytrain_opt.pools.commands import (
    Command,
    Evaluate,
    MainTrain,
    Pretrain,
    SendCandidateState,
    StateRef,
)

if TYPE_CHECKING:
    from raytrain_opt.pools.resident import Group
    from raytrain_opt.train.state import TrainingState

# Minutes for states of many GiB over a slow network.
_FETCH_S = 900.0


class ObjectStore:
    """A resident's access, which implements `protocol.States`; a node's processes share memory."""

    def get(self, ref: StateRef) -> TrainingState:
        """Return the state, read-only. Raises Ray's ObjectLostError if its owner died."""
        # Connections to a node that hangs stay open; Ray would wait seven minutes for its owner.
        if ref.node_id in gone_nodes():
            raise ray.exceptions.ObjectLostError(ref.id, None, "")
        try:
            return cast("TrainingState", ray.get(ref.ref, timeout=_FETCH_S))
        except ray.exceptions.GetTimeoutError as error:
            rule = f"a state did not arrive within {_FETCH_S:g} s from the node that holds it"
            raise PoolError(f"{rule} (is that node overloaded or hung?)") from error

    def put(self, state_id: str, state: TrainingState) -> StateRef:
        return StateRef(state_id, ray.put(state), ray.get_runtime_context().get_node_id())


class GroupObjectStore(ObjectStore):
    """The access of workers that load each state together: it is lost for all ranks or none."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def get(self, ref: StateRef) -> TrainingState:
        """Return the state. Raises ObjectLostError on all ranks if it is lost for any."""
        state: TrainingState | None = None
        with suppress(ray.exceptions.ObjectLostError):
            state = super().get(ref)
        is_there = self._group.all(state is not None)
        if state is None or not is_there:
            raise ray.exceptions.ObjectLostError(ref.id, None, "")
        return state


class RayStateStore:
    """The driver's access: implements `protocol.StateStore` and keeps the states in use alive.

    An object dies with the process that put it into the store, but its memory stays as long as
    some process reads it. With such a view the driver can put a lost state there again. (Ray 2.56
    removed `ray.put(_owner=...)`, which would have made the driver the owner.)
    """

    def __init__(self) -> None:
        self._objects = ObjectStore()
        self._views: dict[str, TrainingState] = {}
        self._kept = ("", "")  # the last two

    def pin(self, ref: StateRef) -> None:
        """Hold a view of a sent state until another is kept. Raises Ray's ObjectLostError."""
        self._views[ref.id] = self._objects.get(ref)

    def keep(self, ref: StateRef, *others: StateRef) -> None:
        refs = (ref, *others)
        for one in refs:
            if one.id not in self._views:
                self.pin(one)
        if ref.id != self._kept[-1]:
            self._kept = (self._kept[-1], ref.id)
        ids = {*self._kept, *(one.id for one in refs)}
        self._views = {name: view for name, view in self._views.items() if name in ids}

    def get(self, ref: StateRef) -> TrainingState:
        return self._views[ref.id] if ref.id in self._views else self._objects.get(ref)

    def put(self, state_id: str, state: TrainingState) -> StateRef:
        self._views[state_id] = state
        ref = self._objects.put(state_id, state)
        self.keep(ref)
        return ref

    def renew(self, command: Command) -> Command:
        """Return the command with its state stored again, owned by the driver."""
        match command:
            case Pretrain():
                return self._renew_round(command)
            case MainTrain() | Evaluate():
                return replace(command, state=self._renew_ref(command.state))
            case SendCandidateState():
                return replace(command, round=self._renew_round(command.round))
        return command

    def _renew_round(self, command: Pretrain) -> Pretrain:
        parts = {
            index: replace(part, state=self._renew_ref(part.state))
            for index, part in command.parts.items()
        }
        return replace(command, state=self._renew_ref(command.state), parts=parts)

    def _renew_ref(self, ref: StateRef) -> StateRef:
        return self._objects.put(ref.id, self.get(ref))
