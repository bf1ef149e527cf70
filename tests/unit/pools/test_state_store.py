"""The driver keeps states alive; a dict replaces Ray's object store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ObjectLostError

from raytrain_opt.pools import state_store
from raytrain_opt.pools.commands import (
    CandidatePart,
    Command,
    Evaluate,
    MainTrain,
    Pretrain,
    SendCandidateState,
    StateRef,
)
from raytrain_opt.pools.in_process import InProcessStates
from raytrain_opt.pools.interface import StateStore
from raytrain_opt.pools.state_store import GroupObjectStore, RayStateStore
from raytrain_opt.results import Steps, TrainTotals
from raytrain_opt.search.policy import Candidate, TryCandidates
from raytrain_opt.train.state import TrainingState

CANDIDATE = Candidate(0, 1.0, 0.1)


class Objects(dict[str, Any]):
    """Objects by reference, here a text; deleting one loses it. `gone`: nodes that left."""

    def __init__(self) -> None:
        super().__init__()
        self.gone: dict[str, str] = {}

    def get_runtime_context(self) -> Objects:
        return self

    def get_node_id(self) -> str:
        return "here"

    def put(self, value: Any) -> str:
        ref = f"ref {len(self)}"
        self[ref] = value
        return ref

    def get(self, ref: str, timeout: float) -> Any:
        return self[ref]


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> Objects:
    objects = Objects()
    monkeypatch.setattr(state_store.ray, "put", objects.put)
    monkeypatch.setattr(state_store.ray, "get", objects.get)
    monkeypatch.setattr(state_store.ray, "get_runtime_context", objects.get_runtime_context)
    monkeypatch.setattr(state_store, "gone_nodes", lambda: objects.gone)
    return objects


def state(number: int) -> TrainingState:
    return TrainingState({}, optimizer_index=number)


def stored(objects: Objects, number: int) -> StateRef:
    return StateRef(f"state {number}", objects.put(state(number)))


def pretrain(ref: StateRef) -> Pretrain:
    action = TryCandidates(1, 0.1, (CANDIDATE,), (1.0, 1.0), keeps_winner=True)
    return Pretrain(ref, action, {0: CANDIDATE})


def test_a_pinned_state_stays_until_another_one_is_kept(objects: Objects) -> None:
    states, refs = RayStateStore(), [stored(objects, number) for number in range(4)]
    states.keep(refs[0])
    for ref in refs[1:]:
        states.pin(ref)
    states.keep(refs[3])
    objects.clear()
    assert [states.get(refs[number]) for number in (0, 3)] == [state(0), state(3)]
    for number in (1, 2):
        with pytest.raises(KeyError):
            states.get(refs[number])


@pytest.mark.parametrize(
    "command_on",
    [
        pretrain,
        lambda ref: MainTrain(ref, 1, Steps(2, (0.1,))),
        Evaluate,
        lambda ref: SendCandidateState(pretrain(ref), CANDIDATE, 0),
    ],
    ids=["Pretrain", "MainTrain", "Evaluate", "SendCandidateState"],
)
def test_a_command_is_renewed_with_a_new_reference_to_the_same_state(
    objects: Objects, command_on: Callable[[StateRef], Command]
) -> None:
    states, ref = RayStateStore(), stored(objects, 1)
    states.keep(ref)
    objects.clear()
    objects["other"] = None
    renewed = states.renew(command_on(ref))
    [(new, value)] = [(key, value) for key, value in objects.items() if key != "other"]
    assert value == state(1)
    assert renewed == command_on(StateRef(ref.id, new, "here"))
    assert renewed != command_on(ref)


def test_the_parts_of_candidates_are_renewed_too(objects: Objects) -> None:
    states, start, part = RayStateStore(), stored(objects, 1), stored(objects, 2)
    states.keep(start, part)
    objects.clear()
    totals = TrainTotals(1, 8, (1.0,), 0, 0.0, 0.0)
    command = replace(pretrain(start), parts={0: CandidatePart(totals, part)})
    renewed = states.renew(command)
    assert isinstance(renewed, Pretrain)
    refs = (renewed.state, renewed.parts[0].state)
    assert [objects[ref.ref] for ref in refs] == [state(1), state(2)]


def test_a_state_of_a_node_that_left_is_lost_without_waiting_for_its_owner(
    objects: Objects,
) -> None:
    """A node that hangs keeps its connections: Ray waits for minutes, although it knows."""
    states = RayStateStore()
    kept, other = (replace(stored(objects, number), node_id="there") for number in (1, 2))
    states.keep(kept)
    objects.gone["there"] = "192.0.2.1"
    with pytest.raises(ObjectLostError):
        states.get(other)
    renewed = states.renew(Evaluate(kept))  # the driver has a view
    assert isinstance(renewed, Evaluate)
    assert renewed.state.node_id == "here"
    assert states.get(renewed.state) == state(1)


@pytest.mark.parametrize(("here", "others"), [(True, True), (True, False), (False, True)])
def test_workers_have_a_state_all_of_them_or_none(
    objects: Objects, here: bool, others: bool
) -> None:
    """Else some would begin a step for which the others never come."""
    asked: list[bool] = []

    def is_there_for_all(flag: bool) -> bool:
        asked.append(flag)
        return flag and others

    group: Any = SimpleNamespace(all=is_there_for_all)
    ref = stored(objects, 1)
    if not here:
        ref = replace(ref, node_id="there")
        objects.gone["there"] = "192.0.2.1"
    if here and others:
        assert GroupObjectStore(group).get(ref) == state(1)
    else:
        with pytest.raises(ObjectLostError):
            GroupObjectStore(group).get(ref)
    assert asked == [here]


@pytest.mark.parametrize("kind", [RayStateStore, InProcessStates])
def test_every_store_copies_what_is_put_and_keeps_the_last_two_states(
    kind: type[StateStore], objects: Objects
) -> None:
    """The contract of `interface.StateStore`."""
    states = kind()
    refs = [states.put(f"epoch {number}", state(number)) for number in range(3)]
    states.keep(refs[2])
    assert [ref.id for ref in refs] == ["epoch 0", "epoch 1", "epoch 2"]
    assert [states.get(ref) for ref in refs[1:]] == [state(1), state(2)]
