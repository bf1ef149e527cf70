"""How a run ends: result.json, the report, the summary in the terminal, `RunResult`; or why."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote

from raytrain_opt.clock import utc_now
from raytrain_opt.config.section import is_instance
from raytrain_opt.execution.callbacks import Callbacks
from raytrain_opt.execution.checkpoint_schedule import CheckpointSchedule
from raytrain_opt.execution.resolve import Resolved
from raytrain_opt.execution.training_run import TrainingRun
from raytrain_opt.execution.workspace import Workspace
from raytrain_opt.pools.interface import Pools
from raytrain_opt.recording.recorder import EventLog, Recorder, versions, write_record
from raytrain_opt.recording.records import (
    EpochRecord,
    EpochResult,
    Hardware,
    ResultRecord,
    SearchResult,
    best_epoch,
)
from raytrain_opt.report import try_write_report
from raytrain_opt.report.plots import duration, percent, rate
from raytrain_opt.results import Metric
from raytrain_opt.storage import join, write_text
from raytrain_opt.train.checkpoint import find_damage, read_checkpoint
from raytrain_opt.train.trained_model import model_metadata
from raytrain_opt.user_code import exits_as_errors


@dataclass(frozen=True)
class RunResult:
    """Result of a run, for scripts."""

    run_dir: str
    test_metric: float | None  # the one that decides (accuracy, 0..1); None: not evaluated
    best_test_metric: float | None
    best_epoch: int | None
    lrs: tuple[float, ...] = field(repr=False)  # of every step
    wall_s: float
    summary: ResultRecord = field(repr=False)  # the content of result.json


@contextmanager
def open_training_run(
    resolved: Resolved, pools: Pools, workspace: Workspace
) -> Iterator[TrainingRun]:
    """Yield a run that writes its records, and why it ended."""
    job, paths, checkpoints = resolved.job, workspace.paths, workspace.checkpoints
    checkpoints.metadata = model_metadata(job.model, job.task, resolved.info, job.seed)
    recorder = Recorder(paths)
    event_log = EventLog(recorder, workspace.terminal.note, workspace.startup.began_s)
    writer = CheckpointSchedule(checkpoints, paths, event_log, job.timeouts.no_progress_s)
    callbacks = Callbacks(job, paths, event_log)
    run = TrainingRun(resolved, pools, workspace, recorder, writer, event_log, callbacks)
    if resolved.note is not None and run.checkpoints.latest is None:
        run.event_log.log("optimizer", 1, resolved.note)
    try:
        with exits_as_errors():
            yield run
    except BaseException as error:
        run.stop.progress(run.job.timeouts.no_progress_s)  # of the checkpoint that is written
        run.close()
        run.callbacks.call("on_end", None)
        run.event_log.close_with(run.progress.next_epoch, error)
        raise
    finally:
        run.close()


def finish(run: TrainingRun) -> RunResult:
    """Write the report, then result.json (a run without is unfinished), and print the summary."""
    run.wait_for_checkpoint()
    run.stop.progress(math.inf)  # the report takes the time that it needs
    run_dir = str(run.paths.local)
    record = _result(run, run.length.records, evaluate_best(run))
    run.recorder.close()
    report = try_write_report(run_dir, run.paths.shown, record)
    write_text(run.paths.ending, "")
    write_record(run.paths.local, record)
    run.checkpoints.publish()
    run.stop.finished = True
    run.stop.progress()
    run.callbacks.call("on_end", record)
    run.stop.progress(math.inf)
    run.checkpoints.publish()  # what the callbacks wrote
    run.terminal.advance(1.0)
    for name, text in _facts(run, record, report):
        run.terminal.note(f"{name:<12}  {text}")
    return RunResult(
        run_dir=run.paths.shown,
        test_metric=record.final.test_metric,
        best_test_metric=record.best.test_metric if record.best else None,
        best_epoch=record.best.epoch if record.best else None,
        lrs=run.lrs,
        wall_s=record.wall_s,
        summary=record,
    )


def _result(
    run: TrainingRun, epochs: Sequence[EpochRecord], final_set: dict[str, float]
) -> ResultRecord:
    best, names = best_epoch(epochs), ("CPU", "GPU", "memory")
    progress, pools = run.progress, run.pools
    return ResultRecord(
        finished_utc=utc_now(),
        job=run.job.name,
        run_dir=run.paths.shown,
        epochs=len(epochs),
        steps_per_epoch=run.steps.first,
        final=EpochResult.from_values(vars(epochs[-1])),
        best=None if best is None else EpochResult.from_values(vars(best)),
        final_set=final_set,
        search=SearchResult(
            samples=progress.search_samples,
            main_samples=progress.kept_samples,
            fraction_of_training=progress.search_samples / max(progress.kept_samples, 1),
            rounds=len(progress.history.decisions),
        ),
        wall_s=run.event_log.elapsed_s(),
        time_to_first_step_s=run.startup.marks_s.get("first_step_s"),
        startup_s=dict(run.startup.marks_s),
        restarts={pool.name: pool.restarts() for pool in pools.all},
        versions=versions(),
        hardware=Hardware(
            nodes=tuple(
                {n: node[n] for n in names if n in node} for node in pools.node_resources()
            ),
            workers=pools.workers.size,
            slots=pools.slots.size if pools.slots else 0,
            workers_use_gpu=pools.use_gpu,
        ),
    )


def evaluate_best(run: TrainingRun) -> dict[str, float]:
    """Measure the set that is looked at once, with the weights of the best epoch."""
    best, checkpoints = run.checkpoints.best, run.paths.checkpoints
    if not run.info.final_size or best is None:
        return {}
    if damage := find_damage(checkpoints, best):
        run.event_log.log("lost", best.epoch, f"the third set is not measured: {damage}")
        return {}
    state, *_ = read_checkpoint(checkpoints / best.folder)
    totals = run.score(run.pools.states.put(f"best {best.folder}", state), "final")
    if totals.skipped:
        run.log_unreadable("third", best.epoch, totals.skipped)
    return totals.means


def _facts(run: TrainingRun, record: ResultRecord, report: str) -> list[tuple[str, str]]:
    """Return name and text of each line at the end."""
    run_dir, checkpoint = _shorten(run.paths.shown), run.checkpoints.latest
    cost = percent(record.search.fraction_of_training, 0)
    facts = [
        ("trained with", f"{record.final.optimizer}, rates up to {rate(record.final.lr_peak)}"),
        ("best epoch", _best_epoch(record)),
        ("wall time", duration(record.wall_s)),
        ("search cost", f"{cost} of the training's samples"),
        ("report", _shorten(report)),
        ("TensorBoard", f"tensorboard --logdir {quote(join(run_dir, 'tensorboard'))}"),
    ]
    if record.final_set and record.best and (metric := record.best.metric):
        text = metric.text(record.final_set[metric.name])
        facts.insert(2, ("test set", f"{metric.name} {text} at the best epoch, looked at once"))
    if checkpoint is not None:
        facts.append(("checkpoint", join(run_dir, f"checkpoints/{checkpoint.folder}")))
        best = record.best and f"checkpoints/epoch-{record.best.epoch:04}"
        if best and (run.paths.local / best).is_dir() and not best.endswith(checkpoint.folder):
            facts.append(("its best", join(run_dir, best)))
        facts += zip(("next", ""), _next_commands(run, run_dir), strict=False)
    return facts


def _next_commands(run: TrainingRun, run_dir: str) -> list[str]:
    """Return what can be done with the network of the run."""
    job, preprocessing = run.job, run.info.preprocessing
    if is_instance(job.model.name):
        return [f"load_model({run_dir!r}, model=…) in Python"]
    arguments = f"{quote(run_dir)}{' --trust' if job.functions else ''}"
    is_image = preprocessing is not None and preprocessing.is_image
    images = " IMAGE..." if is_image and job.task.is_classification else ""
    commands = [f"raytrain-opt predict {arguments}{images}"]
    return [*commands, f"raytrain-opt export {arguments} --format torch_export"]


def _best_epoch(record: ResultRecord) -> str:
    best, final = record.best, record.final
    if best is None or best.metric is None:
        return "–"
    value, last = best.metric.text(best.test_metric), best.metric.text(final.test_metric)
    text = f"{best.epoch} of {record.epochs}: {best.metric.name} {value}"
    text = text if last == value else f"{text} (last {last})"
    shown = {} if best.metric.name == "accuracy" else {**best.test_metrics, best.metric.name: None}
    others = [f"{name} {Metric(name).text(v)}" for name, v in shown.items() if v is not None]
    return ", ".join([text, *others])


def _shorten(path: str) -> str:
    """Return a local path below the current directory relative to it."""
    return path.removeprefix(f"{Path.cwd()}/")
