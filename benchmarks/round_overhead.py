"""The overhead of a round of candidates beside its computing: resident pools against restarts.

    python -m benchmarks.round_overhead [--rounds 12] [--restarts 2]

ResNet-18 (11 M parameters, CIFAR form), 2 workers, 4 candidates in 4 slots, random images (the
time does not depend on their content), few and small batches so that computing is short.

`overhead_s_per_round` (median): the wall time of an epoch, from the end of the one before to
its own end, minus the compute of the slowest slot (steps and scoring), minus the compute of the
main training. It contains: posting commands, loading states in slots and workers, handing over
the winner's and the workers' state through the object store, both digests, averaging buffers,
choosing, and writing the records. Evaluation and checkpoint files are switched off. The first
round is left out (workers start beside it).

`restart_s_per_round` (median): the same difference when a round is a new `Tuner.fit()` with one
trial per candidate and a new `TorchTrainer.fit()` with 2 workers, in the same Ray session, with
the same model, data and steps, and states passed by object reference.

`ratio`: restart over resident; `*_all`: every round. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import ray

from raytrain_opt import Job, run
from raytrain_opt.clock import monotonic_s
from raytrain_opt.recording.recorder import versions
from raytrain_opt.results import Steps

MULTIPLIERS = [1.5, 1.0, 0.75, 0.5]
ALPHA_STEPS, STEPS, GLOBAL_BATCH, VALIDATION_SAMPLES = 1, 3, 8, 8


def make_job(folder: Path, epochs: int) -> Job:
    """Write the data and return the job whose rounds are timed."""
    rng = np.random.default_rng(0)
    samples = STEPS * GLOBAL_BATCH + VALIDATION_SAMPLES
    paths = []
    for name, count in (("train", samples), ("test", 8)):
        x, y = folder / f"{name}_x.npy", folder / f"{name}_y.npy"
        np.save(x, rng.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8))
        np.save(y, np.arange(count, dtype=np.int64) % 10)
        paths.append((str(x), str(y)))
    return Job.model_validate(
        {
            "name": "round-overhead",
            "model": "cifar_resnet18",
            "data": {
                "name": "arrays",
                "train": paths[0],
                "test": paths[1],
                "num_classes": 10,
                "validation_fraction": VALIDATION_SAMPLES / samples,
            },
            "epochs": epochs,
            "global_batch_size": GLOBAL_BATCH,
            "learning_rate": {
                "policy": "stpt",
                "initial": 0.01,
                "candidates": MULTIPLIERS,
                "alpha": ALPHA_STEPS,
            },
            "workers": {"count": 2, "threads": 1, "resources": {"CPU": 0.6}},
            "slots": {"count": 4, "resources": {"CPU": 0.2}},
            "storage_path": str(folder / "runs"),
            "evaluate": {"every_epochs": epochs},
            "checkpoint": {"every_epochs": epochs},
        }
    )


def resident_overheads(job: Job) -> list[float]:
    """Return the overhead in seconds of each round but the first and the last (it evaluates)."""
    result = run(job)
    lines = (Path(result.run_dir) / "epochs.jsonl").read_text().splitlines()
    epochs = [json.loads(line) for line in lines][1:-1]
    return [
        epoch["duration_s"]
        - epoch["timings_s"]["longest_slot_s"]
        - epoch["timings_s"]["main_compute_s"]
        for epoch in epochs
    ]


def _candidate_trial(config: dict[str, Any]) -> None:
    """Train one candidate as an ordinary Tune trial: build everything, train, score, report."""
    import torch
    from ray import tune

    from raytrain_opt.train.learner import Learner
    from raytrain_opt.train.learner_config import LearnerConfig
    from raytrain_opt.train.micro_batches import MicroBatches

    torch.set_num_threads(1)
    job: Job = config["job"]
    learner = Learner(LearnerConfig.from_job(job), None, torch.device("cpu"))
    if config["state"] is not None:
        learner.load(ray.get(config["state"][0]))
    lrs = (config["lr"],) * ALPHA_STEPS
    trained = learner.train(1, Steps(0, lrs), MicroBatches(range(2), 2))
    scored = learner.evaluate("validation")
    compute_s = trained.duration_s + scored.duration_s
    ray.get(config["states"].keep.remote(config["lr"], learner.state(copy=True)))
    tune.report({"score": scored.means["accuracy"], "compute_s": compute_s, "lr": config["lr"]})


def _main_loop(config: dict[str, Any]) -> None:
    """Run the main training as an ordinary TorchTrainer run."""
    import ray.train
    import torch

    from raytrain_opt.train.data_parallel import distribute
    from raytrain_opt.train.learner import Learner
    from raytrain_opt.train.learner_config import LearnerConfig
    from raytrain_opt.train.micro_batches import MicroBatches

    torch.set_num_threads(1)
    rank = ray.train.get_context().get_world_rank()
    learner = Learner(LearnerConfig.from_job(config["job"]), None, torch.device("cpu"), distribute)
    learner.load(ray.get(config["states"].take.remote(config["lr"])))
    lrs = (config["lr"],) * (STEPS - ALPHA_STEPS)
    trained = learner.train(1, Steps(ALPHA_STEPS, lrs), MicroBatches(range(rank, rank + 1), 2))
    if rank == 0:
        ray.get(config["states"].keep.remote("main", learner.state(copy=True)))
        ray.get(config["states"].keep.remote("main compute_s", trained.duration_s))


class _StateKeeper:
    """An actor that keeps states between the runs, as a checkpoint folder would."""

    def __init__(self) -> None:
        self._states: dict[Any, Any] = {}

    def keep(self, key: Any, state: Any) -> None:
        self._states[key] = state

    def take(self, key: Any) -> Any:
        return self._states[key]


def restart_overhead(job: Job, folder: Path, number: int) -> float:
    """Return the overhead in seconds of one round of a new Tuner and a new TorchTrainer."""
    from ray import tune
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    keeper_class: Any = ray.remote(_StateKeeper)
    keeper = keeper_class.options(num_cpus=0).remote()
    common = {"job": job, "states": keeper, "state": None}
    started_s = monotonic_s()
    results = tune.Tuner(
        tune.with_resources(_candidate_trial, {"CPU": 0.5}),
        param_space={**common, "lr": tune.grid_search([0.01 * m for m in MULTIPLIERS])},
        run_config=tune.RunConfig(
            name=f"slots-{number}", storage_path=str(folder / "ray"), verbose=0
        ),
    ).fit()
    best = results.get_best_result("score", "max")
    assert best.metrics is not None
    TorchTrainer(
        _main_loop,
        train_loop_config={**common, "lr": best.metrics["lr"]},
        torch_config=TorchConfig("gloo"),
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(name=f"workers-{number}", storage_path=str(folder / "ray")),
    ).fit()
    wall_s = monotonic_s() - started_s
    # A ResultGrid has a length and an index, and no iterator.
    metrics = [results[index].metrics for index in range(len(results))]
    longest_s = max(float(trial["compute_s"]) for trial in metrics if trial)
    main_s: float = ray.get(keeper.take.remote("main compute_s"))
    ray.kill(keeper)
    return wall_s - longest_s - main_s


def main() -> None:
    """Measure both kinds of rounds in one Ray session and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--restarts", type=int, default=2)
    arguments = parser.parse_args()
    os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")
    ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = make_job(folder, arguments.rounds + 2)
        resident = resident_overheads(job)
        restarts = [restart_overhead(job, folder, i) for i in range(arguments.restarts)]
    overhead_s, restart_s = statistics.median(resident), statistics.median(restarts)
    print(
        json.dumps(
            {
                "benchmark": "round_overhead",
                "overhead_s_per_round": overhead_s,
                "overhead_s_all": resident,
                "restart_s_per_round": restart_s,
                "restart_s_all": restarts,
                "ratio": restart_s / overhead_s,
                "rounds": len(resident),
                "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
                "versions": versions(),
            }
        )
    )


if __name__ == "__main__":
    main()
