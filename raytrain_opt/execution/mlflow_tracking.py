"""Follow a run in MLflow: its job as parameters, each epoch as metrics, report and result."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run

from raytrain_opt.clock import monotonic_s
from raytrain_opt.config.load import plain_job
from raytrain_opt.config.schema import Job
from raytrain_opt.execution.callbacks import Callback
from raytrain_opt.recording.records import EpochRecord, ResultRecord, RoundRecord

_METRICS = ("train_loss", "lr", "samples_per_s", "duration_s")
_RUN_DIR = "raytrain_opt.run_dir"
# MLflow refuses longer values, and more parameters in one call.
_MAX_VALUE, _MAX_PARAMS, _MAX_METRICS = 500, 100, 1000
# The training waits for MLflow, whose own defaults try for minutes. A server that did not answer
# is asked again after a while, and at the end, for all that it has missed.
_LIMITS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
_PAUSE_S = 300.0
_REFUSED = re.compile(r"[^\w\-. :/]")  # by MLflow, in the name of a metric


class MlflowTracking(Callback):
    """Writes to the experiment of the job's name; a resumed run continues its run in MLflow.

    `name`: of the run directory, which under a URI differs from its local copy.
    """

    def __init__(self, job: Job, run_dir: str, name: str) -> None:
        super().__init__(job, run_dir)
        assert job.tracking is not None
        for variable, value in _LIMITS.items():
            os.environ.setdefault(variable, value)
        self._unsent: list[Metric] = []
        self._pause_ends_s = 0.0
        self._client = MlflowClient(tracking_uri=job.tracking.mlflow)
        known = self._client.get_experiment_by_name(job.name)
        experiment_id = known.experiment_id if known else self._client.create_experiment(job.name)
        runs: list[Run] = self._client.search_runs(
            [experiment_id], filter_string=f"tags.`{_RUN_DIR}` = '{name}'", max_results=1
        )
        if runs:
            self._run_id = runs[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            return
        run = self._client.create_run(experiment_id, run_name=name, tags={_RUN_DIR: name})
        self._run_id = run.info.run_id
        params = [Param(key, str(value)[:_MAX_VALUE]) for key, value in plain_job(job).items()]
        self._client.log_batch(self._run_id, params=params[:_MAX_PARAMS])

    def on_round(self, record: RoundRecord) -> None:
        self._log(record.epoch, {"next_base_lr": record.next_base_lr})

    def on_epoch(self, record: EpochRecord) -> None:
        values = {name: getattr(record, name) for name in _METRICS}
        tested = {f"test_{name}": value for name, value in record.test_metrics.items()}
        self._log(record.epoch, values | tested)

    def on_end(self, result: ResultRecord | None) -> None:
        try:
            self._send()
            for name in ("report.html", "result.json"):
                if result is not None and (path := Path(self.run_dir) / name).exists():
                    self._client.log_artifact(self._run_id, str(path))
        finally:
            self._client.set_terminated(self._run_id, "FAILED" if result is None else "FINISHED")

    def _log(self, epoch: int, values: dict[str, float | None]) -> None:
        now_ms = int(1000 * time.time())
        known = {_REFUSED.sub("_", name): v for name, v in values.items() if v is not None}
        self._unsent += [Metric(name, value, now_ms, epoch) for name, value in known.items()]
        if monotonic_s() >= self._pause_ends_s:
            self._send()

    def _send(self) -> None:
        self._pause_ends_s = monotonic_s() + _PAUSE_S
        while sent := self._unsent[:_MAX_METRICS]:
            self._client.log_batch(self._run_id, metrics=sent)
            del self._unsent[: len(sent)]
        self._pause_ends_s = 0.0
