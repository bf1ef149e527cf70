"""Commands from the driver to the pools, and replies: small, with states by reference."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from raytrain_opt.config.batch_size import BatchSizeSection
from raytrain_opt.errors import RaytrainOptError, ResidentError
from raytrain_opt.results import Split, Steps, TrainTotals
from raytrain_opt.search.policy import Candidate, TryCandidates

WORKER_POOL, SLOT_POOL = "worker", "slot"

# Called before each step with the steps done and their number; may raise to leave.
OnStep = Callable[[int, int], object]


@dataclass(frozen=True)
class StateRef:
    """A reference to a training state, which the driver can store again (see `state_store`)."""

    id: str
    ref: Any  # ObjectRef on Ray; the state itself in one process
    node_id: str = ""  # Ray's identity of its owner's node


class Command:
    """What the driver asks of all residents of a pool, or of one."""

    @property
    def name(self) -> str:
        """The class's name in the form of records: main_train."""
        return re.sub(r"\B([A-Z])", r"_\1", type(self).__name__).lower()


@dataclass(frozen=True)
class SendInitialState(Command):
    """Ask one resident for its initial state, from which all residents start."""

    index: int = 0


@dataclass(frozen=True)
class CandidatePart:
    """The steps that a candidate of a round has trained so far, and its state after them."""

    totals: TrainTotals
    state: StateRef


@dataclass(frozen=True)
class Pretrain(Command):
    """Ask slots or workers to train a segment of the steps of candidates, and to score them.

    Candidates train the first steps of the epoch from `state`, or what follows their `parts`.
    `wave`: the candidate of each slot; workers, which train one candidate together, have it under
    rank 0. The segment ends after `until` of the steps that are left, by default after all.
    Residents continue what they have trained, as with `MainTrain`.
    """

    state: StateRef
    action: TryCandidates
    wave: dict[int, Candidate]
    parts: dict[int, CandidatePart] = field(default_factory=dict)  # by the candidate's index
    until: int | None = None
    # Reply with the result of a candidate at its end, else with its part; rank 0 of workers does.
    sends: bool = True

    def left(self, candidate: Candidate) -> int:
        """Return the number of steps that the candidate has still to train."""
        part = self.parts.get(candidate.index)
        return self.action.pretrain_steps - (0 if part is None else part.totals.steps)

    @property
    def end(self) -> int:
        """The number of steps after which the segment ends."""
        most = max(map(self.left, self.wave.values()))
        return most if self.until is None else min(self.until, most)


@dataclass(frozen=True)
class SendCandidateState(Command):
    """Ask for a candidate's state after the kept steps; who does not have it trains it again."""

    round: Pretrain
    candidate: Candidate
    slot: int  # which sends it; of the workers, rank 0 does


@dataclass(frozen=True)
class ProbeBatchSize(Command):
    """Ask a slot to measure training at a batch size, and to undo it."""

    section: BatchSizeSection
    batch_size: int
    check: bool  # of a choice: longer, and with an evaluation


@dataclass(frozen=True)
class MainTrain(Command):
    """Ask all workers to train a segment of the `steps` of `epoch` that follow `state`, together.

    The segment ends after `until` of the steps, by default after all. Workers that have trained
    the segments before it continue; others begin at `state`. So nothing but a state that was sent
    has to be known to repeat what a death has cost.
    """

    state: StateRef
    epoch: int
    steps: Steps
    until: int | None = None
    sends: bool = True  # reply with the totals since `state`, rank 0 with the new state
    attempt: int = 0  # asynchronous workers train it again after a shard of the weights has died

    @property
    def total(self) -> int:
        """The number of all steps."""
        return len(self.steps.lrs)

    @property
    def end(self) -> int:
        """The number of steps after which the segment ends."""
        return self.total if self.until is None else self.until


@dataclass(frozen=True)
class Evaluate(Command):
    """Ask workers to evaluate `state` on a split, each on its part.

    The reply has the totals over all workers, or, where they form no process group, of a part:
    `workers` take part then.
    """

    state: StateRef
    split: Split = "test"
    workers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Close(Command):
    """Ask all residents of a pool to leave."""


@dataclass(frozen=True)
class Regroup(Command):
    """Ask all residents to leave, so that new processes join. Who joins later replies None."""


@dataclass(frozen=True)
class MainTrainReply:
    """One worker's reply to a `MainTrain` that sends."""

    totals: TrainTotals  # over all workers
    timings_s: dict[str, float]
    state: StateRef | None  # from rank 0


def state_in(reply: object) -> StateRef | None:
    if isinstance(reply, MainTrainReply | CandidatePart):
        return reply.state
    return reply if isinstance(reply, StateRef) else None


@dataclass(frozen=True)
class Resident:
    """Identity of a resident process: a restarted one differs, in its process at least."""

    pool: str
    index: int  # rank of a worker or number of a slot
    node_id: str
    pid: int
    log: str

    @property
    def name(self) -> str:
        """Name in messages and records, such as `worker 1` or `slot 0`."""
        return f"{self.pool} {self.index}"


@dataclass(frozen=True)
class Failure:
    """An exception of a command. `error` is a RaytrainOptError if the command raised one."""

    error: Exception
    traceback: str

    def to_error(self, resident: str) -> Exception:
        """Return the error to raise in the driver; it names the resident that raised it."""
        error = self.error
        if not isinstance(error, RaytrainOptError):
            error = ResidentError(f"{resident}: {error}")
        error.add_note(f"raised in {resident}:\n{self.traceback}")
        return error


def to_failure(error: Exception) -> Failure:
    """Return an exception in a form that any process can unpickle."""
    text = "".join(traceback.format_exception(error))
    if isinstance(error, RaytrainOptError):
        return Failure(error, text)
    notes = getattr(error, "__notes__", [])
    return Failure(RuntimeError("; ".join([f"{type(error).__name__}: {error}", *notes])), text)


@dataclass(frozen=True)
class StateLost:
    """The state of a command was lost with its owner: store it again and repeat the command."""

    id: str


@dataclass(frozen=True)
class Progress:
    """Steps that one resident has done of the current command."""

    done: int
    total: int


@dataclass(frozen=True)
class Message:
    """A resident's reply to the command of this number, or its progress in it."""

    sender: Resident
    number: int
    value: Any  # a reply is pickled, unless it has a reference to a state, which Ray has to count
    failed: bool = False  # the reply is a Failure or StateLost


@dataclass(frozen=True)
class Overdue:
    """A resident that has not answered the current command, with its last reported progress."""

    index: int
    progress: Progress | None
    silent_s: float  # since that report, or since the command if there was none


@dataclass(frozen=True)
class PoolStatus:
    """What the driver looks at while it waits for a pool."""

    lost: frozenset[int]  # residents that were given up
    restarts: int
    silence_s: float  # since the current command, or since the last sign of life
    progress: Progress | None  # of the resident that is furthest behind
