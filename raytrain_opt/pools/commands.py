"""What the driver says to the pools and what comes back. All values are frozen and small:
states travel as object references.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ray import ObjectRef

from raytrain_opt.search.policy import Candidate, CandidateResult, Plan
from raytrain_opt.train.totals import EvalTotals, TrainTotals

WORKER_POOL, SLOT_POOL = "worker", "slot"


@dataclass(frozen=True)
class StateRef:
    """A state in the object store. It is gone when the process that put it there dies, so
    the driver keeps a view of its memory (see `pools.vault`) and can put it there again.
    """

    id: str
    ref: ObjectRef[Any]
    sha256: str | None = None


@dataclass(frozen=True)
class ShareState:
    """Slot 0 or rank 0: hand over your initial state, so that all start from the same."""


@dataclass(frozen=True)
class Pretrain:
    """Slots: train the plan's candidates from `state`, from the epoch's first step on, and score
    them.

    Of n `slots` the i-th takes candidates i, i + n, i + 2 n, ... one after the other (waves).
    """

    state: StateRef
    plan: Plan
    slots: tuple[int, ...]

    def share(self, slot: int) -> tuple[Candidate, ...]:
        """The candidates of this slot."""
        return self.plan.candidates[self.slots.index(slot) :: len(self.slots)]


@dataclass(frozen=True)
class TakeState:
    """The slot that trained this candidate in this round, or another in its place: hand over its
    state after the steps that are kept.
    """

    round: Pretrain
    candidate: Candidate
    slot: int


@dataclass(frozen=True)
class MainTrain:
    """Workers: train len(lrs) steps of `epoch` from `state`, together, with `decay` times the
    weight decay.
    """

    state: StateRef
    epoch: int
    first_step: int
    lrs: tuple[float, ...]
    decay: float = 1.0


@dataclass(frozen=True)
class Evaluate:
    """Workers: evaluate `state` on the test split, each its part. `members`: by whom, where it is
    not the process group.
    """

    state: StateRef
    members: tuple[int, ...] = ()


@dataclass(frozen=True)
class Close:
    """Everybody: leave."""


Command = ShareState | Pretrain | TakeState | MainTrain | Evaluate | Close


@dataclass(frozen=True)
class PretrainReply:
    """A slot's answer: the results of its candidates, and seconds by part."""

    results: tuple[CandidateResult, ...]
    parts_s: dict[str, float]


@dataclass(frozen=True)
class MainTrainReply:
    """One worker's answer. Totals are summed over all workers; `loaded_sha256` is the digest
    of what it loaded (None when the state was there already); `state` comes from rank 0.
    `parallel`: how gradients travelled (`train.group`).
    """

    totals: TrainTotals
    loaded_sha256: str | None
    parts_s: dict[str, float]
    state: StateRef | None
    parallel: dict[str, object] = field(default_factory=dict)


def state_in(reply: object) -> StateRef | None:
    """The state that comes with a reply."""
    if isinstance(reply, MainTrainReply):
        return reply.state
    return reply if isinstance(reply, StateRef) else None


@dataclass(frozen=True)
class EvaluateReply:
    """Totals over all workers."""

    totals: EvalTotals


@dataclass(frozen=True)
class Member:
    """Who serves in a pool: `index` is the rank of a worker or the number of a slot. `absent`:
    ranks that the worker's group does without.
    """

    pool: str
    index: int
    node_id: str
    pid: int
    log: str
    ready_parts_s: dict[str, float] = field(default_factory=dict)
    absent: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """For messages: `worker 1`, `slot 0`."""
        return f"{self.pool} {self.index}"


@dataclass(frozen=True)
class Failure:
    """A command raised in a member. `error` is ours when it was one of ours."""

    error: Exception
    traceback: str


@dataclass(frozen=True)
class StateLost:
    """The state of the command is gone with its owner: renew it and post again."""

    id: str


@dataclass(frozen=True)
class Progress:
    """Steps done of the steps of the present command, by one member."""

    done: int
    total: int


@dataclass(frozen=True)
class Missing:
    """A member that has not answered the present command: what it last told, seconds ago (None:
    nothing since the command came).
    """

    index: int
    progress: Progress | None
    silent_s: float
