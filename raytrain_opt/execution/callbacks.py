"""Callbacks: code of one's own that the driver calls while a run trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial, update_wrapper
from importlib.util import find_spec
from typing import Any, Literal

from raytrain_opt.clock import monotonic_s
from raytrain_opt.config.load import resolve_function
from raytrain_opt.config.schema import Job, TrackingSection
from raytrain_opt.errors import Problem
from raytrain_opt.paths import RunPaths
from raytrain_opt.recording.recorder import EventLog
from raytrain_opt.recording.records import EpochRecord, ResultRecord, RoundRecord
from raytrain_opt.storage import check_uri
from raytrain_opt.user_code import exits_as_errors

Event = Literal["on_round", "on_epoch", "on_checkpoint", "on_end"]


class Callback:
    """Base of callbacks: override what you need. The training waits for every call.

    A run creates each of the job's `callbacks` once, as `Class(job, run_dir)`, also when it is
    resumed. An exception is noted in the records and the terminal, and the run continues.
    """

    def __init__(self, job: Job, run_dir: str) -> None:
        self.job, self.run_dir = job, run_dir

    def on_round(self, record: RoundRecord) -> None:
        """Take a round of candidates: a line of rounds.jsonl."""

    def on_epoch(self, record: EpochRecord) -> None:
        """Take an epoch: a line of epochs.jsonl."""

    def on_checkpoint(self, folder: str) -> None:
        """Take the folder of a checkpoint that is complete."""

    def on_end(self, result: ResultRecord | None) -> None:
        """Take result.json; None for a run that failed or was interrupted."""


class Callbacks:
    """All callbacks of a run. A failure of one is logged once for each of its methods."""

    def __init__(self, job: Job, paths: RunPaths, event_log: EventLog) -> None:
        self._event_log, self._epoch = event_log, 1
        self._failed: set[tuple[str, str]] = set()
        self._callbacks: list[Any] = []
        for kind in _classes(job, paths.run_id):
            with self._logged(getattr(kind, "__name__", str(kind)), "__init__"):
                if (callback := kind(job, str(paths.local))) is None:
                    raise TypeError("it returned None; give a class")
                self._callbacks.append(callback)

    def call(self, event: Event, value: object) -> None:
        """Call this method of every callback, if it has it, with a copy of the value."""
        self._epoch = getattr(value, "epoch", self._epoch)
        for callback in self._callbacks:
            with self._logged(type(callback).__name__, event):
                getattr(callback, event, lambda _: None)(deepcopy(value))

    @contextmanager
    def _logged(self, name: str, method: str) -> Iterator[None]:
        """Log the first failure of a method of the user's own, and how long the run waited."""
        began_s = monotonic_s()
        try:
            with exits_as_errors():
                yield
        except Exception as error:  # noqa: BLE001 - code of the user's own
            if (name, method) in self._failed:
                return
            self._failed.add((name, method))
            text = f"callback {name}.{method} failed ({type(error).__name__}: {error})"
            waited_s = monotonic_s() - began_s
            waited = f" after {waited_s:.0f} s" if waited_s >= 1 else ""
            self._event_log.log("callback", self._epoch, f"{text}{waited}; the run continues")


def check_tracking(section: TrackingSection | None) -> list[Problem]:
    """Return a problem if MLflow is missing, or the URI holds credentials."""
    if section is None:
        return []
    if find_spec("mlflow") is None:
        hint = "pip install 'raytrain_opt[mlflow]'"
        return [Problem("tracking.mlflow", "needs the package mlflow-skinny", None, hint)]
    return check_uri(section.mlflow, "tracking.mlflow")


def _classes(job: Job, run_id: str) -> list[Callable[[Job, str], object]]:
    classes = [resolve_function(name, f"callbacks.{i}") for i, name in enumerate(job.callbacks)]
    if job.tracking is not None:
        from raytrain_opt.execution.mlflow_tracking import MlflowTracking

        tracking = partial(MlflowTracking, name=run_id)
        classes.append(update_wrapper(tracking, MlflowTracking))  # for messages
    return classes
