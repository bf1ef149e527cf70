"""Batch-size probes as Ray Tune trials: a searcher asks the strategy, one process measures.

One probe runs at a time: on a GPU alone on the device, on CPU with the cores that a worker will
have. The process is reused for the next trial, unless it ran out of memory: then its trial ends
with an error, and Ray Tune starts the next one in a new process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import ray
import torch
from ray import tune
from ray.tune import CheckpointConfig, PlacementGroupFactory, RunConfig, TuneConfig, Tuner
from ray.tune.search import Searcher

from raytrain_opt.config.batch_size import BatchSizeSection
from raytrain_opt.data.in_memory_sets import DatasetArrays
from raytrain_opt.errors import PoolError
from raytrain_opt.pools.commands import Failure
from raytrain_opt.pools.launch_slots import QuietTune
from raytrain_opt.pools.resident import to_failure
from raytrain_opt.results import Probe
from raytrain_opt.search.batch_size.factory import build_strategy
from raytrain_opt.search.batch_size.strategy import (
    BatchSizeChoice,
    Measurement,
    ProbeRequest,
    SizeBounds,
    Strategy,
)
from raytrain_opt.train.data_parallel import use_threads
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.learner_config import LearnerConfig
from raytrain_opt.train.probe import ProbedTraining, measure, open_probe_sampler, probed_training

# The check of the chosen size takes three times the steps of a probe: it runs once, and a leak or
# a fragmented allocator shows only after some time.
CHECK_FACTOR = 3
_CHECK_REASON = "check of the choice in a new process, evaluation included"


@dataclass(frozen=True)
class ProbeConfig:
    """Given to the launcher, and by it to the probing process."""

    learner: LearnerConfig
    max_restarts: int
    section: BatchSizeSection
    limits: SizeBounds
    use_gpu: bool
    threads: int
    resources: dict[str, float]
    shared: list[Any]  # of one reference: Ray would fetch a bare one on the way
    run_id: str
    ray_storage_path: str
    trace: bool


@dataclass(frozen=True)
class ProbeRecord:
    """One probe, the strategy's reason for it, and the process that measured it.

    `check`: whether it is the check of the chosen size.
    """

    probe: Probe
    reason: str
    pid: int | None
    check: bool = False


@dataclass(frozen=True)
class ProbeSearchResult:
    """The result of a search. `trace`: a Chrome trace (JSON text), if the user asked for one."""

    choice: BatchSizeChoice
    records: tuple[ProbeRecord, ...]
    trace: str | None


def run_probes(setup: ProbeConfig, on_record: Callable[[ProbeRecord], None]) -> ProbeSearchResult:
    """Search, check the choice in a new process, and continue the search if the check fails.

    Blocks. Raises what a probe raised, ResourcesError when nothing fits, PoolError when
    probing processes keep dying.
    """
    searcher = StrategySearcher(build_strategy(setup.section, setup.limits), on_record)
    searcher.max_failures = setup.max_restarts
    while True:
        choice = searcher.search(setup)
        checked, trace = _check(setup, choice)
        searcher.add(checked)
        if checked.probe.status == "ok":
            return ProbeSearchResult(choice, tuple(searcher.records), trace)


def _check(setup: ProbeConfig, choice: BatchSizeChoice) -> tuple[ProbeRecord, str | None]:
    space = {"batch_size": choice.batch_size, "check": True}
    results = _fit(setup, "check", space, TuneConfig(num_samples=1))
    reply: ProbeReply | None = (results[0].metrics or {}).get("reply")
    if reply is None:  # the process died: this size is too large to train with
        why = f"its process ended: {results[0].error}"
        probe = Probe(choice.batch_size, "out_of_memory", why=why)
        return ProbeRecord(probe, _CHECK_REASON, None, check=True), None
    return ProbeRecord(reply.checked(), _CHECK_REASON, reply.pid, check=True), reply.trace


def _fit(
    setup: ProbeConfig, name: str, space: dict[str, Any], tune_config: TuneConfig
) -> tune.ResultGrid:
    trainable = tune.with_parameters(ProbeTrial, setup=setup)
    return Tuner(
        tune.with_resources(trainable, PlacementGroupFactory([setup.resources])),
        param_space=space,
        tune_config=tune_config,
        run_config=RunConfig(
            name=f"probes-{name}-{setup.run_id}",
            storage_path=setup.ray_storage_path,
            checkpoint_config=CheckpointConfig(checkpoint_at_end=False),
            callbacks=[QuietTune()],
            verbose=0,
        ),
    ).fit()


@dataclass(frozen=True)
class ProbeReply:
    """What a trial reports, as one value: Ray Tune flattens dicts on the way to the searcher."""

    probe: Probe | None
    pid: int
    trace: str | None = None
    failure: Failure | None = None

    def checked(self) -> Probe:
        """Return the probe. Raises what happened instead of one."""
        if self.failure is not None:
            raise self.failure.to_error("batch-size probe")
        assert self.probe is not None
        return self.probe


class SpentError(Exception):
    """Ends a trial whose process ran out of memory, and the process with it."""


class ProbeTrial(tune.Trainable):
    """A process that measures one batch size per trial."""

    def setup(self, config: dict[str, Any], setup: ProbeConfig) -> None:  # type: ignore[override]
        """Build model and data once for all trials of this process."""
        self._setup, self._spent = setup, False
        use_threads(setup.threads)
        device = torch.device("cuda" if setup.use_gpu else "cpu")
        self._learner = Learner(
            setup.learner,
            cast("DatasetArrays | None", ray.get(setup.shared[0])),
            device,
        )
        self._subject: ProbedTraining = probed_training(self._learner)
        self._sampler = open_probe_sampler(setup.section, device, setup.threads)

    def step(self) -> dict[str, Any]:
        """Measure. An exception comes back as a value: a retry by Ray Tune would not help."""
        if self._spent:
            raise SpentError
        try:
            return self._measure(self.config)
        except Exception as error:  # noqa: BLE001 - raised again where the search was started
            reply = ProbeReply(None, os.getpid(), failure=to_failure(error))
            return {"reply": reply, "done": True}

    def _measure(self, config: dict[str, Any]) -> dict[str, Any]:
        check = bool(config.get("check"))
        with TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.json" if check and self._setup.trace else None
            probe = measure(
                self._subject,
                config["batch_size"],
                self._setup.section,
                self._sampler,
                steps_factor=CHECK_FACTOR if check else 1,
                trace=None if trace is None else str(trace),
            )
            text = trace.read_text() if trace is not None and trace.exists() else None
        self._spent = probe.status != "ok"
        done = check or not self._spent
        return {"reply": ProbeReply(probe, os.getpid(), text), "done": done}

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Accept the next trial in the same process."""
        return True

    def cleanup(self) -> None:
        """End loader processes."""
        self._learner.close()
        self._sampler.close()


class StrategySearcher(Searcher):
    """Ray Tune's view of a strategy: it suggests a size when the one before is measured."""

    def __init__(self, strategy: Strategy, on_record: Callable[[ProbeRecord], None]) -> None:
        super().__init__()
        self._strategy, self._on_record = strategy, on_record
        self.records: list[ProbeRecord] = []
        self.max_failures = 0
        self._requests: dict[str, ProbeRequest] = {}
        self._choice: BatchSizeChoice | None = None
        self._error: Exception | None = None
        self._failures = 0

    def search(self, setup: ProbeConfig) -> BatchSizeChoice:
        """Probe until the strategy has chosen. Raises what ended the search before."""
        self._choice = None
        tune_config = TuneConfig(
            search_alg=self, num_samples=-1, max_concurrent_trials=1, reuse_actors=True
        )
        _fit(setup, f"{len(self.records)}", {}, tune_config)
        if self._error is not None:
            raise self._error
        if self._choice is None:
            raise PoolError("the batch-size search ended without a choice; see Ray's logs")
        return self._choice

    def add(self, record: ProbeRecord) -> None:
        """Add a measurement."""
        self.records.append(record)
        self._on_record(record)

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:  # type: ignore[override]
        """Return the next size; FINISHED when the strategy has chosen, or failed."""
        if self._error is not None or self._choice is not None:
            return str(Searcher.FINISHED)
        history = [Measurement.from_probe(record.probe) for record in self.records]
        try:
            proposed = self._strategy.propose(history)
        except Exception as error:  # noqa: BLE001 - raised by `search`: Ray Tune would continue
            self._error = error
            return str(Searcher.FINISHED)
        if isinstance(proposed, BatchSizeChoice):
            self._choice = proposed
            return str(Searcher.FINISHED)
        self._requests[trial_id] = proposed
        return {"batch_size": proposed.batch_size}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Take a probe that ran out of memory: its trial continues, to end its process."""
        self._take(trial_id, result)

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Take a probe, or count a process that died before it measured."""
        if not error and result is not None:
            self._take(trial_id, result)
        if self._requests.pop(trial_id, None) is None or not error:
            return
        self._failures += 1
        if self._failures > self.max_failures:
            self._error = PoolError(
                f"probing processes died {self._failures} times without an answer "
                f"(max_restarts: {self.max_failures}); see Ray's session logs"
            )

    def _take(self, trial_id: str, result: dict[str, Any]) -> None:
        request = self._requests.pop(trial_id, None)
        if request is None:  # taken already
            return
        reply: ProbeReply = result["reply"]
        try:
            self.add(ProbeRecord(reply.checked(), request.reason, reply.pid))
        except Exception as error:  # noqa: BLE001 - raised by `search`: Ray Tune would continue
            self._error = error

    def save(self, checkpoint_path: str) -> None:
        """Write the file that Ray Tune asks for; a search is never resumed from it."""
        Path(checkpoint_path).write_text(f"{len(self.records)} probes\n", encoding="utf-8")

    def restore(self, checkpoint_path: str) -> None:
        """Refuse: see `save`."""
        raise NotImplementedError("a batch-size search is not resumed by Ray Tune")
