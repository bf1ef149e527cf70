"""The records of one run, read from a directory or a URI, finished or not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

from pydantic import BaseModel, ValidationError

from raytrain_opt.config.yaml_loader import read_yaml
from raytrain_opt.errors import JobError, Problem, RecordError
from raytrain_opt.recording.reader import first_error, read_lines, read_record, read_text
from raytrain_opt.recording.records import (
    BatchSizeProbeRecord,
    BatchSizeRecord,
    EpochRecord,
    Event,
    PredictionsRecord,
    ResultRecord,
    RoundRecord,
    ScheduleRecord,
)
from raytrain_opt.results import Metric
from raytrain_opt.run_copy import INDEX
from raytrain_opt.storage import check_uri, last_name, read


class _Job(BaseModel):
    """The fields of job.yaml that a report needs."""

    epochs: int | None = None
    global_batch_size: int
    learning_rate: dict[str, Any]
    model: Any
    data: Any


@dataclass(frozen=True)
class RunRecords:
    """Everything that a run has recorded so far. `run_dir`: the directory as the user knows it."""

    run_dir: str
    job: Mapping[str, Any]
    epochs: Sequence[EpochRecord] = ()
    rounds: Sequence[RoundRecord] = ()
    probes: Sequence[BatchSizeProbeRecord] = ()
    events: Sequence[Event] = ()
    batch_size: BatchSizeRecord | None = None
    schedule: Sequence[ScheduleRecord] = ()
    predictions: PredictionsRecord | None = None
    result: ResultRecord | None = None

    @property
    def name(self) -> str:
        """Last part of the run directory."""
        return last_name(self.run_dir)

    @property
    def metric(self) -> Metric:
        """The metric of the task that decides."""
        metrics = (*(e.metric for e in self.epochs if e.metric), *(r.metric for r in self.rounds))
        return metrics[0] if metrics else Metric()

    @property
    def epochs_to_train(self) -> int | None:
        """Length of the training; with `train_for` None before the first epoch."""
        if self.result is not None:
            return self.result.epochs
        return self.epochs[-1].epochs if self.epochs else self.job["epochs"]

    @property
    def wall_s(self) -> float | None:
        """Time until the end of the run, or of its last epoch."""
        if self.result is not None:
            return self.result.wall_s
        return self.epochs[-1].end_s if self.epochs else None

    @property
    def is_batch_size_search(self) -> bool:
        """Whether the run chose a batch size and has trained nothing (yet)."""
        return self.batch_size is not None and not self.epochs and not self.rounds

    @cached_property
    def _steps_before(self) -> list[int]:
        """Steps before each epoch, and one entry after the last known epoch."""
        return list(accumulate((len(epoch.steps.lrs) for epoch in self.schedule), initial=0))

    def first_step(self, epoch: int) -> int:
        """Return the steps before this epoch; later epochs are taken as long as the last known."""
        before = self._steps_before
        if epoch <= len(before):
            return before[epoch - 1]
        last = before[-1] - before[-2] if len(before) > 1 else 0
        return before[-1] + last * (epoch - len(before))


def read_run(run_dir: str, shown: str | None = None) -> RunRecords:
    """Read the records of a run, from a directory or a URI.

    `shown`: the run directory as the user knows it, when that is another one. Raises JobError when
    there is no run, RecordError naming file and line when a record is damaged, StorageError when
    the storage cannot be read.
    """
    if problems := check_uri(run_dir, "RUN_DIR"):
        raise JobError(problems, "arguments")
    # Before the lines that they count: a live run writes them after those.
    result = read_record(run_dir, ResultRecord)
    epochs = result.epochs if result is not None else _saved_epochs(run_dir)
    rounds = result.search.rounds if result is not None else 0
    return RunRecords(
        shown or run_dir,
        _read_job(run_dir),
        epochs=read_lines(run_dir, EpochRecord, epochs),
        rounds=read_lines(run_dir, RoundRecord, rounds),
        probes=read_lines(run_dir, BatchSizeProbeRecord),
        events=read_lines(run_dir, Event),
        batch_size=read_record(run_dir, BatchSizeRecord),
        schedule=read_lines(run_dir, ScheduleRecord, epochs),
        predictions=read_record(run_dir, PredictionsRecord),
        result=result,
    )


def _saved_epochs(run_dir: str) -> int:
    """Return the epochs of the newest checkpoint, whose records a run writes first; 0 without."""
    # A resume names a damaged index; the records do not need it.
    with suppress(KeyError, TypeError, ValueError):
        index = json.loads(read(run_dir, INDEX) or b"{}")
        return max(int(checkpoint["epoch"]) for checkpoint in index["checkpoints"])
    return 0


def _read_job(run_dir: str) -> Mapping[str, Any]:
    if (text := read_text(run_dir, "job.yaml")) is None:
        rule = "holds no run: it has no job.yaml"
        raise JobError([Problem("RUN_DIR", rule, repr(run_dir))], "arguments")
    job = read_yaml(text, f"{run_dir}/job.yaml")
    try:
        _Job.model_validate(job)
    except ValidationError as error:
        rule = f"is not the job of a run ({first_error(error)})"
        raise RecordError(f"{run_dir}/job.yaml: {rule}") from error
    return dict(job)
