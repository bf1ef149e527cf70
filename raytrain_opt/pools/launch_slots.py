"""Start the slots: a Ray Tune experiment of resident processes. Imports no torch."""

from __future__ import annotations

from typing import Any

from ray import tune
from ray.tune import FailureConfig, RunConfig
from ray.tune.progress_reporter import TrialProgressCallback

from raytrain_opt.pools.commands import SLOT_POOL
from raytrain_opt.pools.mailbox_client import report_lost
from raytrain_opt.pools.resident import serve
from raytrain_opt.pools.resident_config import ResidentConfig


def run_slots(config: ResidentConfig) -> None:
    """Start the slots and return when they have left (blocks). Raises why, if none is left."""
    results = tune.Tuner(
        tune.with_resources(_slot_main, tune.PlacementGroupFactory([config.plan.slot_resources])),
        param_space={"slot": tune.grid_search(list(range(config.plan.slots))), "config": config},
        run_config=RunConfig(
            name=f"slots-{config.run_id}",
            storage_path=config.ray_storage_path,
            failure_config=FailureConfig(max_failures=config.max_restarts),
            callbacks=[ReportLostSlot(config.mailbox)],
            verbose=0,
        ),
    ).fit()
    if results.num_errors == config.plan.slots:
        raise results.errors[0]


class ReportLostSlot(TrialProgressCallback):
    """Reports a slot that died more often than the job allows to the mailbox.

    Tune prints a line for every trial that ends, whatever its verbosity, unless it finds a
    callback of its base class, whose methods print. Slots are no trials of interest to a user.
    """

    def __init__(self, mailbox: Any) -> None:
        super().__init__()
        self._mailbox = mailbox

    def on_trial_result(self, *_: Any, **__: Any) -> None:
        """Print nothing."""

    def on_trial_complete(self, *_: Any, **__: Any) -> None:
        """Print nothing."""

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        """Report the slot; Tune calls this when it gives a trial up."""
        report_lost(self._mailbox, SLOT_POOL, trial.config["slot"])


def _slot_main(trial: dict[str, Any]) -> None:
    config: ResidentConfig = trial["config"]
    index: int = trial["slot"]
    serve(config, SLOT_POOL, index, lambda _: config.make_slot(config, index))
