"""Commands from the driver to the pools, and the replies.

All are small and frozen: states travel by reference. Each command has a `name`, its key in
timeline.jsonl and in planned faults.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from raytrain_opt.errors import RaytrainOptError, ResidentError
from raytrain_opt.monitoring.process_usage import Usage
from raytrain_opt.results import TrainTotals
from raytrain_opt.search.policy import Candidate, CandidateResult, TryCandidates

WORKER_POOL, SLOT_POOL = "worker", "slot"

# Called before each step with the steps done and their number; may raise to leave. A true result
# ends a main training before that step.
OnStep = Callable[[int, int], object]


@dataclass(frozen=True)
class StateRef:
    """A reference to a training state.

    On Ray the object is lost when the process that stored it dies, so the driver keeps a view of
    its memory (see `state_store`) and can store it again.
    """

    id: str
    ref: Any  # ObjectRef on Ray; the state itself in one process
    sha256: str | None = None


@dataclass(frozen=True)
class SendInitialState:
    """Ask one resident for its initial state, from which all residents start."""

    name: ClassVar[str] = "send_initial_state"
    index: int = 0


@dataclass(frozen=True)
class Pretrain:
    """Ask slots or workers to train the plan's candidates from `state`, and to score them.

    They train the first steps of the epoch. Workers train each candidate together. Of n `slots`,
    the i-th trains candidates i, i + n, i + 2 n, ... one after the other (waves).
    """

    name: ClassVar[str] = "pretrain"
    state: StateRef
    plan: TryCandidates
    slots: tuple[int, ...]

    def candidates_of(self, slot: int) -> tuple[Candidate, ...]:
        """Return the candidates that this slot trains: none if the driver gave it up."""
        if slot not in self.slots:
            return ()
        return self.plan.candidates[self.slots.index(slot) :: len(self.slots)]


@dataclass(frozen=True)
class SendCandidateState:
    """Ask for the state of a candidate of this round after the kept steps.

    `slot` sends it, or rank 0 of the workers. A process that does not have it trains it again.
    """

    name: ClassVar[str] = "send_candidate_state"
    round: Pretrain
    candidate: Candidate
    slot: int


@dataclass(frozen=True)
class MainTrain:
    """Ask all workers to train len(lrs) steps of `epoch` from `state` together.

    `weight_decay_factor` multiplies the weight decay of the job. `optimizer`: position among those
    of the job.
    """

    name: ClassVar[str] = "main_train"
    state: StateRef
    epoch: int
    first_step: int
    lrs: tuple[float, ...]
    weight_decay_factor: float = 1.0
    optimizer: int = 0


@dataclass(frozen=True)
class Evaluate:
    """Ask workers to evaluate `state` on the test split, each on its part.

    The reply has the totals over all workers, or, where they form no process group, of a part;
    `workers` are those who take part then.
    """

    name: ClassVar[str] = "evaluate"
    state: StateRef
    workers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Close:
    """Ask all residents of a pool to leave."""

    name: ClassVar[str] = "close"


@dataclass(frozen=True)
class Regroup:
    """Ask all workers to leave and to join again as room allows. Who joins later replies None."""

    name: ClassVar[str] = "regroup"


Command = SendInitialState | Pretrain | SendCandidateState | MainTrain | Evaluate | Regroup | Close


@dataclass(frozen=True)
class PretrainReply:
    """Results of one slot's candidates, or of all from rank 0; its seconds by part."""

    results: tuple[CandidateResult, ...]
    timings_s: dict[str, float]


@dataclass(frozen=True)
class MainTrainReply:
    """One worker's reply to `MainTrain`.

    `totals` are summed over all workers. `loaded_sha256`: digest of the state that the worker
    loaded, or has from a candidate; None if it continues from its own. `state` comes from rank 0.
    `parallel`: how gradients were exchanged (see `train.data_parallel`).
    """

    totals: TrainTotals
    loaded_sha256: str | None
    timings_s: dict[str, float]
    state: StateRef | None
    parallel: dict[str, object] = field(default_factory=dict)


def state_in(reply: object) -> StateRef | None:
    """Return the state reference in a reply, if it has one."""
    if isinstance(reply, MainTrainReply):
        return reply.state
    return reply if isinstance(reply, StateRef) else None


Sender = tuple[str, int, str, int]  # the pool, index, node and process of a resident


@dataclass(frozen=True)
class Resident:
    """Identity of a resident process: a restarted one differs, in its process at least.

    `index`: rank of a worker or number of a slot. `absent`: ranks that the worker's process group
    does without.
    """

    pool: str
    index: int
    node_id: str
    pid: int
    log: str
    absent: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """Name in messages and records, such as `worker 1` or `slot 0`."""
        return f"{self.pool} {self.index}"

    @property
    def sender(self) -> Sender:
        """What its messages carry."""
        return self.pool, self.index, self.node_id, self.pid


@dataclass(frozen=True)
class Failure:
    """An exception of a command. `error` is a RaytrainOptError if the command raised one."""

    error: Exception
    traceback: str

    def to_error(self, resident: str) -> Exception:
        """Return the error to raise in the driver; it names the resident that raised it."""
        if isinstance(self.error, RaytrainOptError):
            self.error.add_note(f"raised in {resident}:\n{self.traceback}")
            return self.error
        return ResidentError(f"{resident}: {self.error}", resident, self.traceback)


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
class Reply:
    """A resident's reply to the command of this number.

    `value`: pickled, so that nothing between the resident and the driver has to look into it;
    one with a reference to a state is not, because Ray has to count such references. `failed`:
    whether it is a Failure or StateLost.
    """

    sender: Sender
    number: int
    value: Any
    failed: bool = False
    usage: Usage | None = None


@dataclass(frozen=True)
class Report:
    """The progress of a resident in the command of this number; None before its first step.

    `can_stop_before`: the next step, at which a resident that is asked to stop early waits.
    """

    sender: Sender
    number: int
    progress: Progress | None
    can_stop_before: int | None = None


@dataclass(frozen=True)
class Instruction:
    """What a resident at work learns when it reports.

    `closed`: leave. `stopping`: the number of the command that ends early, else 0: all stop
    before the same step, `stop_before`, which is known when all have reported where they can.
    """

    closed: bool = False
    stopping: int = 0
    stop_before: int | None = None


@dataclass(frozen=True)
class Overdue:
    """A resident that has not answered the current command, with its last reported progress.

    `silent_s`: seconds since that report, or since the command if there was none.
    """

    index: int
    progress: Progress | None
    silent_s: float


@dataclass(frozen=True)
class PoolStatus:
    """What the driver looks at while it waits for a pool.

    `lost`: residents that were given up. `silence_s`: seconds since the current command, or since
    the last sign of life. `progress`: of the resident that is furthest behind. `has_trained`:
    whether any resident of the run has finished a training step.
    """

    lost: frozenset[int]
    restarts: int
    silence_s: float
    progress: Progress | None
    has_trained: bool
