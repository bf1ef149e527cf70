"""Ray Tune's own ASHA and PBT on the product's learner, one CPU each.

Both search the learning rate, log-uniform from 1e-3 to 1, with as many epochs as the grid takes
(`trainings` complete trainings):

asha   ASHAScheduler with its defaults except `max_t`. Each trial draws a rate and trains the
       job's schedule from it. Trials are started until the epochs are used up.
pbt    PopulationBasedTraining with `trainings` trials, at constant rates that it changes every
       `_PERTURB_EVERY` epochs (drawn anew, or times 0.8 or 1.2: its defaults). A trial that
       takes over another's weights takes over its epoch too, so the epochs trained may differ a
       little from the grid's; they are counted.

Of the trials that trained to the end, the best on the validation split wins; both schedulers use
that split only. A trial also evaluates on the test split after each epoch, for the report.
"""

from __future__ import annotations

import logging
import math
import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.queues import Queue
from typing import Any

import numpy as np
import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler, PopulationBasedTraining, TrialScheduler

from benchmarks.comparison_units import Unit
from benchmarks.in_process import WHOLE, Outcome, Point, Reporter, open_learner
from raytrain_opt.clock import monotonic_s
from raytrain_opt.config.schema import Job
from raytrain_opt.optim.epoch_steps import EpochSteps
from raytrain_opt.results import Steps
from raytrain_opt.search.factory import build_policy
from raytrain_opt.search.policy import History, TrainEpoch

_RATES = (1e-3, 1.0)
_PERTURB_EVERY = 2
_LANE = "COMPARISON_LANE"


class Trial(tune.Trainable):
    """A trial whose step is an epoch.

    `config`: the job's contents, `lr`, and `constant`, whether the rate stays constant.
    """

    def setup(self, config: dict[str, Any]) -> None:
        import torch

        torch.set_num_threads(1)
        self._begin(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Reuse the process for another trial, or for the same trial at another rate."""
        self.learner.close()
        self._begin(new_config)
        return True

    def _begin(self, config: dict[str, Any]) -> None:
        section = {**config["job"]["learning_rate"], "initial": config["lr"]}
        self.job = Job.model_validate({**config["job"], "learning_rate": section})
        self.constant, self.lr, self.epoch = config["constant"], config["lr"], 0
        self.learner = open_learner(self.job)
        self.steps = self.learner.info.train_size // self.job.global_batch_size

    def step(self) -> dict[str, Any]:
        self.epoch += 1
        reporter = Reporter(self.learner, self.job)
        totals = self.learner.train(self.epoch, Steps(0, self._lrs()), WHOLE)
        reporter.look(totals.samples, self.epoch)
        scored = self.learner.evaluate("validation")
        return {
            "epoch": self.epoch,
            "samples": totals.samples,
            "validation_accuracy": scored.means["accuracy"] if math.isfinite(scored.loss) else 0.0,
            "glance": [point.accuracy for point in reporter.outcome.curve],
            "test_accuracy": reporter.outcome.accuracy,
            "reporting_s": reporter.reporting_s,
        }

    def _lrs(self) -> tuple[float, ...]:
        if self.constant:
            return (self.lr,) * self.steps
        action = build_policy(self.job, EpochSteps(self.steps)).next(self.epoch, History())
        assert isinstance(action, TrainEpoch)
        return action.steps.lrs

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any]:
        return {"epoch": self.epoch, "state": self.learner.state(copy=True)}

    def load_checkpoint(self, checkpoint: dict[str, Any] | None) -> None:
        assert checkpoint is not None
        self.epoch = checkpoint["epoch"]
        self.learner.load(checkpoint["state"])

    def cleanup(self) -> None:
        self.learner.close()


@dataclass
class Ledger(tune.Stopper):
    """Every epoch of every trial in the order of their reports; ends the search at `limit`."""

    epochs: int
    limit: float
    began_s: float = field(default_factory=monotonic_s)
    reporting_s: float = 0.0
    lines: list[dict[str, Any]] = field(default_factory=list)

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        self.reporting_s += result["reporting_s"]
        kept = ("epoch", "samples", "validation_accuracy", "glance", "test_accuracy")
        line = {name: result[name] for name in kept}
        lr = result["config"]["lr"]
        self.lines.append({**line, "trial": trial_id, "lr": lr, "seconds": self.seconds()})
        return bool(result["epoch"] >= self.epochs)

    def stop_all(self) -> bool:
        return len(self.lines) >= self.limit

    def seconds(self) -> float:
        """Return the seconds of the search so far, without evaluations on the test split."""
        return monotonic_s() - self.began_s - self.reporting_s

    def outcome(self) -> Outcome:
        """Return the winning trial's outcome; its curve counts the samples of all trials."""
        ended = [line for line in self.lines if line["epoch"] == self.epochs]
        best = max(ended, key=lambda line: float(line["validation_accuracy"]))
        outcome = Outcome(best["test_accuracy"], best["validation_accuracy"], peak_lr=best["lr"])
        for line in self.lines:
            outcome.samples += line["samples"]
            if line["trial"] == best["trial"]:
                outcome.curve.extend(
                    Point(outcome.samples, line["seconds"], accuracy)
                    for accuracy in line["glance"]
                )
        outcome.search_samples, outcome.seconds = outcome.samples, self.seconds()
        outcome.notes = [{k: line[k] for k in ("trial", "epoch", "lr")} for line in self.lines]
        return outcome


def search(unit: Unit) -> Outcome:
    """Run one search of Ray Tune in a process that has called `join`.

    The seconds include the start of the trials' process.
    """
    random.seed(unit.setting.seed)
    np.random.seed(unit.setting.seed)
    epochs, trainings = unit.setting.epochs, int(unit.options["trainings"])
    is_pbt = unit.kind == "pbt"
    ledger = Ledger(epochs, math.inf if is_pbt else epochs * trainings)
    with tempfile.TemporaryDirectory() as folder:
        tune.Tuner(
            tune.with_resources(Trial, {"cpu": 1, os.environ[_LANE]: 1}),
            param_space={"job": unit.job, "lr": tune.loguniform(*_RATES), "constant": is_pbt},
            tune_config=tune.TuneConfig(
                metric="validation_accuracy",
                mode="max",
                scheduler=_pbt() if is_pbt else _asha(epochs),
                num_samples=trainings if is_pbt else -1,
                search_alg=tune.search.BasicVariantGenerator(
                    # ASHA's trials run one after another, PBT's side by side.
                    max_concurrent=0 if is_pbt else 1,
                    random_state=unit.setting.seed,
                ),
                reuse_actors=True,
            ),
            run_config=tune.RunConfig(
                name=unit.name,
                storage_path=folder,
                stop=ledger,
                verbose=0,
                checkpoint_config=tune.CheckpointConfig(
                    checkpoint_frequency=_PERTURB_EVERY if is_pbt else 0
                ),
            ),
        ).fit()
        return ledger.outcome()


def _asha(epochs: int) -> TrialScheduler:
    return ASHAScheduler(time_attr="training_iteration", max_t=epochs)


def _pbt() -> TrialScheduler:
    return PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=_PERTURB_EVERY,
        hyperparam_mutations={"lr": tune.loguniform(*_RATES)},
    )


@contextmanager
def local_ray(searches: int) -> Iterator[str]:
    """Start Ray on this machine with a CPU for each searching process; yield its address."""
    lanes = {_lane(number): 1.0 for number in range(searches)}
    ray.init(
        address="local",
        num_cpus=searches,
        resources=lanes,
        include_dashboard=False,
        logging_level=logging.ERROR,
    )
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()


def _lane(number: int) -> str:
    """Return the resource that only one process's trials request: none takes another's CPU."""
    return f"lane_{number}"


def join(address: str, numbers: Queue[int]) -> None:
    """Connect this process to Ray and give it the next lane."""
    os.environ.update(
        RAY_AIR_NEW_OUTPUT="0",
        TUNE_DISABLE_AUTO_CALLBACK_LOGGERS="1",
        **{_LANE: _lane(numbers.get())},
    )
    # Without the loggers' files, Tune warns for every trial that it finds no metrics.
    logging.getLogger("ray.tune").setLevel(logging.ERROR)
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
