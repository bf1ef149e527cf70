"""The resident Ray Tune trials, called slots, seen from where they are started.

Free of torch, like all that runs before the first slot does.
"""

from __future__ import annotations

from typing import Any

from ray import tune
from ray.tune import FailureConfig, RunConfig
from ray.tune.progress_reporter import TrialProgressCallback

from raytrain_opt.pools.commands import SLOT_POOL
from raytrain_opt.pools.setup import Setup


def run_slots(setup: Setup) -> None:
    """Start the slots and return when they have left; blocks (call it in a thread)."""
    tune.Tuner(
        tune.with_resources(_slot_main, tune.PlacementGroupFactory([setup.plan.slot_resources])),
        param_space={"slot": tune.grid_search(list(range(setup.plan.slots))), "setup": setup},
        run_config=RunConfig(
            name=f"slots-{setup.run_id}",
            storage_path=setup.ray_storage_path,
            failure_config=FailureConfig(max_failures=setup.job.limits.max_restarts),
            callbacks=[_TellLost(setup.mailbox)],
            verbose=0,
        ),
    ).fit()


class Silence(TrialProgressCallback):
    """Tune prints a line for every trial that ends, whatever its verbosity, unless a callback
    of this kind is there already. Slots are no trials that a user wants to hear of.
    """

    def on_trial_result(self, *_: Any, **__: Any) -> None:
        """Say nothing."""

    def on_trial_error(self, *_: Any, **__: Any) -> None:
        """Say nothing: the pool's error does."""

    def on_trial_complete(self, *_: Any, **__: Any) -> None:
        """Say nothing."""


class _TellLost(Silence):
    """A slot that died more often than the job allows will not be back: nobody waits for it."""

    def __init__(self, mailbox: Any) -> None:
        super().__init__()
        self._mailbox = mailbox

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        """Tune calls this when it has given a trial up."""
        self._mailbox.lose.remote(SLOT_POOL, trial.config["slot"])


def _slot_main(config: dict[str, Any]) -> None:
    from raytrain_opt.pools.slot import serve

    serve(config["setup"], config["slot"])
