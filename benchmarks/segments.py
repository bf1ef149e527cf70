"""What segments and checkpoints within epochs cost, with two workers on a local Ray.

    python -m benchmarks.segments [--repeats 6] [--model cifar_resnet18] [--batch 32]

Trains epochs in turn in one segment (`whole`), in the driver's segments (`segments`) and with a
checkpoint every two seconds (`saved`), but not with `--repeats 0`; the last line is a JSON object:

    segment_pct       the median of pairs segments / whole, as a percentage above 1
    command_ms        median of a segment without a step, which is what each one costs
    saved_pct         the median of pairs saved / segments, as a percentage above 1
    send_ms           median of the time that workers wait for a checkpoint of `state_mib`
    write_cpu_ms      median of the CPU time of the driver for it, beside the training
    epoch_s, saves    medians: of an epoch in one segment, and checkpoints in one of `saved`
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time

from benchmarks.common import machine
from raytrain_opt import Job
from raytrain_opt.clock import monotonic_s
from raytrain_opt.config.schema import CheckpointSection
from raytrain_opt.driver import open_run
from raytrain_opt.execution.checkpoint_schedule import Interval
from raytrain_opt.execution.training_run import TrainingRun
from raytrain_opt.pools.commands import MainTrain, StateRef
from raytrain_opt.pools.interface import SynchronousTraining
from raytrain_opt.search.policy import TrainEpoch

NEVER, OFTEN = CheckpointSection(every=10**9), CheckpointSection(every=2.0)
VARIANTS = {"whole": NEVER, "segments": NEVER, "saved": OFTEN}
WHOLE = 10**9  # steps of a segment


def make_job(folder: str, model: str, batch: int, epochs: int) -> Job:
    return Job.model_validate(
        {
            "storage_path": folder,
            "model": model,
            "data": "digits",
            "epochs": epochs,
            "global_batch_size": batch,
            "learning_rate": {"policy": "schedule", "shape": "constant", "initial": 1e-3},
            "workers": {"count": 2, "threads": 1},
            "checkpoint": {"every_epochs": epochs},
        }
    )


def time_commands(
    run: TrainingRun, state: StateRef, action: TrainEpoch, count: int
) -> dict[str, float]:
    """Return the costs of segments without a step, and of states that are sent and saved."""
    command = MainTrain(state, action.epoch, action.steps, 1, sends=False)
    workers, times_s, waits_s, cpu_s = run.pools.workers, list[float](), list[float](), []
    workers.command(command)
    for _ in range(count):
        began_s = monotonic_s()
        workers.command(command)
        times_s.append(monotonic_s() - began_s)
    for steps in range(1, 5):
        workers.command(replace(command, until=steps))
        began_s, began_cpu_s = monotonic_s(), process_time()
        sent = workers.command(replace(command, until=steps, sends=True))[0].state
        tensors = run.pools.states.get(sent)
        run.progress = replace(run.progress, next_epoch=100 + steps)  # a folder of its own
        run.checkpoints.save(tensors, run.progress)
        waits_s.append(monotonic_s() - began_s)
        run.checkpoints.wait()
        cpu_s.append(process_time() - began_cpu_s)
        command = replace(command, state=sent, steps=command.steps.after(steps), until=1)
    run.progress = replace(run.progress, next_epoch=action.epoch)
    return {
        "command_ms": 1e3 * median(times_s),
        "send_ms": 1e3 * median(waits_s),
        "write_cpu_ms": 1e3 * median(cpu_s),
        "state_mib": sum(t.data.nbytes for t in tensors.tensors.values()) / 2**20,
    }


def measure(run: TrainingRun, repeats: int) -> Mapping[str, object]:
    """Train epochs in turn; see above."""
    state, history, training = run.initial_state(), run.history, run.pools.main_training
    assert isinstance(training, SynchronousTraining)
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    segments = dict.fromkeys(VARIANTS, 1) | {"whole": WHOLE}
    costs: dict[str, float] = {}
    saved, saves, save = list[object](), list[int](), run._save
    run._save = lambda *args, **options: (saved.append(args), save(*args, **options))  # type: ignore
    for epoch in range(1, len(VARIANTS) * (repeats + 1) + 1):
        name = list(VARIANTS)[epoch % len(VARIANTS)]
        training._segments._steps, run.checkpoints.interval = (
            segments[name],
            Interval(VARIANTS[name]),
        )
        action = run.policy.next(epoch, history)
        assert isinstance(action, TrainEpoch)
        if not costs:
            costs = time_commands(run, state, action, 200)
        if not repeats:
            return costs
        before, began_s = len(saved), monotonic_s()
        state, losses = run.train_epoch(state, action)
        segments[name] = training._segments._steps
        if epoch > len(VARIANTS):  # in the first ones segments find their length
            seconds[name].append(monotonic_s() - began_s)
            saves += [len(saved) - before] * (name == "saved")
        run.wait_for_checkpoint()
        history = history.after_epoch(losses)
        run.checkpoint_epoch(state, history)
    segment = median(s / w for s, w in zip(seconds["segments"], seconds["whole"], strict=True))
    slower = median(s / w for s, w in zip(seconds["saved"], seconds["segments"], strict=True))
    return {
        "segment_pct": 100 * (segment - 1),
        "saved_pct": 100 * (slower - 1),
        **costs,
        "epoch_s": median(seconds["whole"]),
        "saves": median(saves),
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--model", default="cifar_resnet18")
    parser.add_argument("--batch", type=int, default=32)
    options = parser.parse_args()
    epochs = len(VARIANTS) * (options.repeats + 1)
    with TemporaryDirectory() as folder:
        job = make_job(folder, options.model, options.batch, epochs)
        with open_run(job) as run:
            result = measure(run, options.repeats)
    print(json.dumps({**vars(options), **machine(), **result}))


if __name__ == "__main__":
    main()
