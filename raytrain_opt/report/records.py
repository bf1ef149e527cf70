"""The records of a run as they are read back, from a folder or a URI, of a run of any age.

Fields that records did not always have are optional. What is not finite stands there as null.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from raytrain_opt.config.strict_yaml import read_yaml
from raytrain_opt.errors import JobError, Problem, RecordError
from raytrain_opt.paths import check_storage, read_stored
from raytrain_opt.telemetry.records import SCHEMA_VERSION

Number = float | None
Parts = dict[str, Number]


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    schema_version: int = Field(default=SCHEMA_VERSION, le=SCHEMA_VERSION)


class CandidateLine(BaseModel):
    """A candidate of a round."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    index: int
    lr: float
    multiplier: float = 1.0
    decay: float = 1.0
    score: Number = None
    val_accuracy: Number = None
    val_loss: Number = None
    train_loss: Number = None
    seconds: Number = None
    slot: int = -1
    status: str = "ok"


class RoundLine(_Line):
    """A line of rounds.jsonl."""

    epoch: int
    stage: str = ""
    base_lr: float
    pretrain_steps: int
    kept_steps: int
    candidates: list[CandidateLine]
    winner: int | None
    averaged: list[int] = []
    reason: str
    next_base_lr: float
    selection_samples: int = 0
    parts_s: Parts = {}

    @cached_property
    def chosen(self) -> CandidateLine | None:
        """The winner, where it is one of this round."""
        return next((c for c in self.candidates if c.index == self.winner), None)


class StalenessLine(BaseModel):
    """Of the updates of an epoch: counts[i] were i updates old."""

    counts: list[int]
    mean: Number
    max: int


class EpochLine(_Line):
    """A line of epochs.jsonl."""

    epoch: int
    lr: float
    lr_first: Number = None
    train_loss: Number
    train_accuracy: Number = None
    test_loss: Number = None
    test_accuracy: Number = None
    test_top5: Number = None
    workers: int = 1
    samples: int
    samples_per_s: float
    skipped: int = 0
    seconds: float
    parts_s: Parts
    noise_scale: dict[str, Any] | None = None
    staleness: StalenessLine | None = None


class ProbeLine(_Line):
    """A line of batch_size.jsonl."""

    probe: int
    check: bool = False
    reason: str = ""
    batch_size: int
    status: str
    samples_per_s: Number = None
    samples_per_s_error: Number = None
    steps: int = 0
    seconds: Number = None
    parts_s: Parts = {}
    utilization_pct: Number = None
    utilization_mean_pct: Number = None
    peak_memory_mib: Number = None
    why: str = ""


class SpanLine(_Line):
    """A line of timeline.jsonl."""

    epoch: int
    who: str
    doing: str
    at_s: float
    seconds: float
    parts_s: Parts = {}
    utilization_pct: Number = None
    memory_mib: Number = None

    @property
    def pool(self) -> str:
        """worker of `worker 0`."""
        return self.who.split()[0]


class EventLine(_Line):
    """A line of events.jsonl."""

    what: str
    text: str
    at_s: float
    utc: str = ""
    epoch: int | None = None
    who: str | None = None
    cost_s: Number = None


class Segment(BaseModel):
    """So many steps at one rate."""

    steps: int
    lr: float


class ScheduleFile(_Line):
    """schedule.json."""

    epoch_steps: list[int]
    segments: list[Segment]


class BatchSizeFile(_Line):
    """batch_size.json."""

    batch_size_per_worker: int
    samples_per_s: float
    reason: str
    seconds: float
    cached: bool
    probes: int


class SearchCosts(BaseModel):
    """Of result.json."""

    samples: int
    fraction_of_training: float


class NoiseScaleNote(BaseModel):
    """Of result.json."""

    sentence: str


class ResultFile(_Line):
    """result.json."""

    wall_s: float
    search: SearchCosts
    finished_utc: str = ""
    time_to_first_step_s: Number = None
    noise_scale: NoiseScaleNote | None = None
    restarts: dict[str, int] = {}


class _Workers(BaseModel):
    count: int = Field(gt=0)


class _Job(BaseModel):
    """What a report needs of a job, which may be of any version."""

    epochs: int
    global_batch_size: int
    workers: _Workers
    learning_rate: dict[str, Any] = {}


@dataclass(frozen=True)
class RunRecords:
    """All that a run has written so far. `run_dir` as the user knows it."""

    run_dir: str
    job: Mapping[str, Any]
    epochs: Sequence[EpochLine] = ()
    rounds: Sequence[RoundLine] = ()
    probes: Sequence[ProbeLine] = ()
    spans: Sequence[SpanLine] = ()
    events: Sequence[EventLine] = ()
    batch_size: BatchSizeFile | None = None
    schedule: ScheduleFile | None = None
    result: ResultFile | None = None

    @property
    def name(self) -> str:
        """The run directory's own name."""
        return self.run_dir.rstrip("/").rsplit("/", 1)[-1]

    @property
    def workers(self) -> int:
        """As the job says."""
        return int(self.job["workers"]["count"])

    @property
    def global_batch_size(self) -> int:
        """Samples of one update, without the batch ramp."""
        return int(self.job["global_batch_size"])

    @property
    def is_batch_size_search(self) -> bool:
        """Whether a batch size was found, and nothing trained (yet)."""
        return self.batch_size is not None and not self.epochs and not self.rounds

    @cached_property
    def _steps_before(self) -> list[int]:
        steps = self.schedule.epoch_steps if self.schedule else []
        return list(accumulate(steps, initial=0))

    def first_step(self, epoch: int) -> int:
        """Steps of all epochs before this one; what is not known yet is taken as the last."""
        known = self._steps_before
        if epoch <= len(known):
            return known[epoch - 1]
        last = known[-1] - known[-2] if len(known) > 1 else 0
        return known[-1] + last * (epoch - len(known))

    @cached_property
    def ends_s(self) -> list[float]:
        """For each epoch, the seconds of the run at its end: by the timeline, or, of a run that
        has none, as if it had started so much before the first epoch as it took beside them.
        """
        ends = {span.epoch: span.at_s + span.seconds for span in self.spans}
        beside_s = 0.0
        if self.result is not None:
            beside_s = self.result.wall_s - sum(epoch.seconds for epoch in self.epochs)
        sums = accumulate((epoch.seconds for epoch in self.epochs), initial=max(beside_s, 0.0))
        by_sum = list(sums)[1:]
        return [ends.get(e.epoch, s) for e, s in zip(self.epochs, by_sum, strict=True)]

    @cached_property
    def rounds_of(self) -> Mapping[int, Sequence[RoundLine]]:
        """The rounds of each epoch that had any."""
        found: dict[int, list[RoundLine]] = {}
        for line in self.rounds:
            found.setdefault(line.epoch, []).append(line)
        return found


def read_run(run_dir: str, shown: str | None = None) -> RunRecords:
    """What there is of a run, local or under a URI; a last line that is not whole (the run was
    cut, or writes just now) is left out. `shown`: its place as the user knows it.

    Raises JobError when there is no run, RecordError naming file and line when a record is
    damaged, CommitError when the storage cannot be read.
    """
    problems = check_storage(run_dir, "RUN_DIR")
    if problems:
        raise JobError(problems, "arguments")
    text = _text(run_dir, "job.yaml")
    if text is None:
        rule = "holds no run: there is no job.yaml in it"
        raise JobError([Problem("RUN_DIR", rule, repr(run_dir))], "arguments")
    job = read_yaml(text, f"{run_dir}/job.yaml")
    try:
        _Job.model_validate(job)
    except ValidationError as error:
        raise RecordError(
            f"{run_dir}/job.yaml: is not the job of a run ({_rule(error)})"
        ) from error
    return RunRecords(
        shown or run_dir,
        job,
        epochs=read_lines(run_dir, "epochs.jsonl", EpochLine),
        rounds=read_lines(run_dir, "rounds.jsonl", RoundLine),
        probes=read_lines(run_dir, "batch_size.jsonl", ProbeLine),
        spans=read_lines(run_dir, "timeline.jsonl", SpanLine),
        events=read_lines(run_dir, "events.jsonl", EventLine),
        batch_size=_file(run_dir, "batch_size.json", BatchSizeFile),
        schedule=_file(run_dir, "schedule.json", ScheduleFile),
        result=_file(run_dir, "result.json", ResultFile),
    )


L = TypeVar("L", bound=_Line)


def read_lines(run_dir: str, name: str, kind: type[L], skip: int = 0) -> list[L]:
    """The lines of a record after the first `skip`; none when the file is not there.

    Raises RecordError naming file and line.
    """
    text = _text(run_dir, name) or ""
    whole = text[: text.rfind("\n") + 1].splitlines()
    return [
        _parsed(line, kind, f"{run_dir}/{name}, line {number}")
        for number, line in enumerate(whole[skip:], skip + 1)
    ]


def _file(run_dir: str, name: str, kind: type[L]) -> L | None:
    text = _text(run_dir, name)
    return None if text is None else _parsed(text, kind, f"{run_dir}/{name}")


def _parsed(text: str, kind: type[L], place: str) -> L:
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["loc"] == ("schema_version",) and first["type"] == "less_than_equal":
            rule = f"was written by a newer version of this package (schema {first['input']})"
            raise RecordError(f"{place}: {rule}; this one reads up to {SCHEMA_VERSION}") from error
        raise RecordError(f"{place}: is damaged ({_rule(error)})") from error


def _rule(error: ValidationError) -> str:
    """The first thing that is wrong, and where."""
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {first['msg']}" if where else first["msg"]


def _text(run_dir: str, name: str) -> str | None:
    content = read_stored(run_dir, name)
    try:
        return None if content is None else content.decode()
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1 if content else 1
        raise RecordError(f"{run_dir}/{name}, line {line}: is damaged (not UTF-8)") from error
