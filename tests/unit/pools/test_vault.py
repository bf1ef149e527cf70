"""The vault keeps states alive; a dict stands for Ray's object store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from raytrain_opt.pools import pool
from raytrain_opt.pools.commands import (
    Command,
    Evaluate,
    MainTrain,
    Pretrain,
    ShareState,
    StateRef,
    TakeState,
)
from raytrain_opt.pools.pool import Vault
from raytrain_opt.search.policy import Candidate, Plan
from raytrain_opt.train.state import HostState

CANDIDATE = Candidate(0, 1.0, 0.1)


class Store(dict[str, Any]):
    """Objects by reference, here a text; deleting one loses it."""

    def put(self, value: Any) -> str:
        ref = f"ref {len(self)}"
        self[ref] = value
        return ref

    def get(self, ref: str) -> Any:
        return self[ref]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    store = Store()
    monkeypatch.setattr(pool.ray, "put", store.put)
    monkeypatch.setattr(pool.ray, "get", store.get)
    return store


def state(number: int) -> HostState:
    return HostState({}, {"number": number})


def stored(store: Store, number: int) -> StateRef:
    return StateRef(f"state {number}", store.put(state(number)), "digest")  # type: ignore[arg-type]


def pretrain(ref: StateRef) -> Pretrain:
    plan = Plan(1, 0.1, "", (CANDIDATE,), (1.0, 1.0), kept_steps=2)
    return Pretrain(ref, plan, (0,))


def test_a_state_that_is_held_outlives_its_object(store: Store) -> None:
    vault, ref = Vault(), stored(store, 1)
    vault.hold(ref)
    store.clear()
    assert vault.view(ref) == state(1)


def test_the_last_two_states_are_held_and_no_older(store: Store) -> None:
    vault, refs = Vault(), [stored(store, number) for number in range(3)]
    for ref in refs:
        vault.hold(ref)
    store.clear()
    assert [vault.view(ref) for ref in refs[1:]] == [state(1), state(2)]
    with pytest.raises(KeyError):
        vault.view(refs[0])


def test_what_came_back_is_kept_beside_what_is_held_until_another_one_is(store: Store) -> None:
    vault, refs = Vault(), [stored(store, number) for number in range(4)]
    vault.hold(refs[0])
    for ref in refs[1:]:
        vault.take(ref)
    vault.hold(refs[3])
    store.clear()
    assert [vault.view(refs[number]) for number in (0, 3)] == [state(0), state(3)]
    for number in (1, 2):
        with pytest.raises(KeyError):
            vault.view(refs[number])


def test_a_state_of_the_driver_is_put_and_held(store: Store) -> None:
    vault = Vault()
    ref = vault.put("epoch 3", state(3))
    assert store[ref.ref] == state(3)  # type: ignore[index]
    store.clear()
    assert (ref.id, vault.view(ref)) == ("epoch 3", state(3))


@pytest.mark.parametrize(
    "command_on",
    [
        pretrain,
        lambda ref: MainTrain(ref, 1, 2, (0.1,)),
        Evaluate,
        lambda ref: TakeState(pretrain(ref), CANDIDATE, 0),
    ],
    ids=["Pretrain", "MainTrain", "Evaluate", "TakeState"],
)
def test_a_command_is_renewed_with_a_new_reference_to_the_same_state(
    store: Store, command_on: Callable[[StateRef], Command]
) -> None:
    vault, ref = Vault(), stored(store, 1)
    vault.hold(ref)
    store.clear()
    store["other"] = None
    renewed = vault.renewed(command_on(ref))
    [(new, value)] = [(key, value) for key, value in store.items() if key != "other"]
    assert value == state(1)
    assert renewed == command_on(StateRef(ref.id, new, "digest"))  # type: ignore[arg-type]
    assert renewed != command_on(ref)


def test_a_command_without_a_state_stays_as_it_is(store: Store) -> None:
    assert Vault().renewed(ShareState()) == ShareState()
    assert not store
