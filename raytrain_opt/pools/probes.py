"""Batch-size probes as Ray Tune trials: a searcher asks the strategy, one process measures.

One probe at a time: on a GPU it has the whole device, on CPU the cores that a worker will
have. The process is reused from trial to trial, but not one that ran out of memory: its
trial ends with an error, and Ray Tune starts the next one afresh.
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
from raytrain_opt.config.schema import Job
from raytrain_opt.data.array_sets import Arrays
from raytrain_opt.errors import MemberError, PoolError, RaytrainOptError
from raytrain_opt.pools.commands import Failure
from raytrain_opt.pools.member import failure
from raytrain_opt.pools.slots import Silence
from raytrain_opt.search.batch_size import Ask, Choice, Limits, Measurement, Strategy
from raytrain_opt.search.batch_size_build import build_strategy
from raytrain_opt.train.group import use_threads
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.probe import Subject, measure, sampler_of, subject_of
from raytrain_opt.train.probe_result import Probe

# The check of the chosen size takes so many times the steps of a probe.
CHECK_FACTOR = 3
_CHECK_REASON = "the choice in a fresh process, evaluation included"


@dataclass(frozen=True)
class ProbeSetup:
    """Given to the host, and by it to the probing process."""

    job: Job
    section: BatchSizeSection
    limits: Limits
    use_gpu: bool
    threads: int
    resources: dict[str, float]
    shared: list[Any]  # of one reference: a bare one would be fetched on the way
    run_id: str
    ray_storage_path: str
    trace: bool


@dataclass(frozen=True)
class ProbeRecord:
    """One probe with the strategy's reason for it, and the process that did it. `check`: that
    of the chosen size.
    """

    probe: Probe
    reason: str
    pid: int | None
    check: bool = False


@dataclass(frozen=True)
class Found:
    """What the search ended with. `trace`: a Chrome trace (JSON text), when asked for."""

    choice: Choice
    records: tuple[ProbeRecord, ...]
    trace: str | None


def run_probes(setup: ProbeSetup, on_record: Callable[[ProbeRecord], None]) -> Found:
    """Search, check the choice in a fresh process, and search on when the check fails.

    Blocks. Raises what a probe raised, ResourcesError when nothing fits, PoolError when
    probing processes keep dying.
    """
    searcher = StrategySearcher(build_strategy(setup.section, setup.limits), on_record)
    searcher.max_failures = setup.job.limits.max_restarts
    while True:
        choice = searcher.search(setup)
        checked, trace = _check(setup, choice)
        searcher.add(checked)
        if checked.probe.status == "ok":
            return Found(choice, tuple(searcher.records), trace)


def _check(setup: ProbeSetup, choice: Choice) -> tuple[ProbeRecord, str | None]:
    space = {"batch_size": choice.batch_size, "check": True}
    results = _fit(setup, "check", space, TuneConfig(num_samples=1))
    reply: ProbeReply | None = (results[0].metrics or {}).get("reply")
    if reply is None:  # the process died: this size is too large to train with
        dead = Probe(choice.batch_size, "out_of_memory", why=f"it ended: {results[0].error}")
        return ProbeRecord(dead, _CHECK_REASON, None, check=True), None
    return ProbeRecord(reply.checked(), _CHECK_REASON, reply.pid, check=True), reply.trace


def _fit(
    setup: ProbeSetup, name: str, space: dict[str, Any], tune_config: TuneConfig
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
            callbacks=[Silence()],
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
        """The probe. Raises what happened instead of one."""
        if self.failure is None:
            assert self.probe is not None
            return self.probe
        if isinstance(self.failure.error, RaytrainOptError):
            self.failure.error.add_note(f"raised in a batch-size probe:\n{self.failure.traceback}")
            raise self.failure.error
        raise MemberError(
            f"batch-size probe: {self.failure.error}", "probe", self.failure.traceback
        )


class SpentError(Exception):
    """Ends a trial whose process ran out of memory, and so the process."""


class ProbeTrial(tune.Trainable):
    """A process that measures one batch size a trial."""

    def setup(self, config: dict[str, Any], setup: ProbeSetup) -> None:  # type: ignore[override]
        """Build model and data once for all trials of this process."""
        self._setup, self._spent = setup, False
        use_threads(setup.threads)
        device = torch.device("cuda" if setup.use_gpu else "cpu")
        self._learner = Learner(setup.job, cast("Arrays | None", ray.get(setup.shared[0])), device)
        self._subject: Subject = subject_of(self._learner)
        self._sampler = sampler_of(setup.section, device, setup.threads)

    def step(self) -> dict[str, Any]:
        """One probe. What goes wrong comes back as a value: trying again would not help."""
        if self._spent:
            raise SpentError
        try:
            return self._measure(self.config)
        except Exception as error:  # noqa: BLE001 - raised again where the search was started
            return {"reply": ProbeReply(None, os.getpid(), failure=failure(error)), "done": True}

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
        """The next trial, in the same process."""
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
        self._asked: dict[str, Ask] = {}
        self._choice: Choice | None = None
        self._error: Exception | None = None
        self._failures = 0

    def search(self, setup: ProbeSetup) -> Choice:
        """Until the strategy has chosen. Raises what ended it before."""
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
        """One more measurement."""
        self.records.append(record)
        self._on_record(record)

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:  # type: ignore[override]
        """The next size; FINISHED when the strategy has chosen, or nothing can be done."""
        if self._error is not None or self._choice is not None:
            return str(Searcher.FINISHED)
        history = [Measurement.of(record.probe) for record in self.records]
        try:
            proposed = self._strategy.propose(history)
        except Exception as error:  # noqa: BLE001 - raised by `search`: Ray Tune would go on
            self._error = error
            return str(Searcher.FINISHED)
        if isinstance(proposed, Choice):
            self._choice = proposed
            return str(Searcher.FINISHED)
        self._asked[trial_id] = proposed
        return {"batch_size": proposed.batch_size}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """A probe that ran out of memory: its trial goes on, to end its process."""
        self._take(trial_id, result)

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """A probe, or the end of a process that measured none."""
        if not error and result is not None:
            self._take(trial_id, result)
        if self._asked.pop(trial_id, None) is None or not error:
            return
        self._failures += 1
        if self._failures > self.max_failures:
            self._error = PoolError(
                f"probing processes died {self._failures} times without an answer "
                "(limits.max_restarts); Ray's session logs tell why"
            )

    def _take(self, trial_id: str, result: dict[str, Any]) -> None:
        asked = self._asked.pop(trial_id, None)
        if asked is None:  # taken already
            return
        reply: ProbeReply = result["reply"]
        try:
            self.add(ProbeRecord(reply.checked(), asked.reason, reply.pid))
        except Exception as error:  # noqa: BLE001 - raised by `search`: Ray Tune would go on
            self._error = error

    def save(self, checkpoint_path: str) -> None:
        """For Ray Tune's own records, which ask for a file; a search is not resumed from it."""
        Path(checkpoint_path).write_text(f"{len(self.records)} probes\n", encoding="utf-8")

    def restore(self, checkpoint_path: str) -> None:
        """See `save`."""
        raise NotImplementedError("a batch-size search is not resumed by Ray Tune")
