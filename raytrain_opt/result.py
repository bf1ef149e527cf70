"""The end of a run: result.json, the table on the terminal, and the value for scripts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raytrain_opt.clock import monotonic_s
from raytrain_opt.paths import RunPaths
from raytrain_opt.pools.session import alive_nodes
from raytrain_opt.report import write_report
from raytrain_opt.search import noise_scale
from raytrain_opt.telemetry.records import versions
from raytrain_opt.telemetry.terminal import print_summary
from raytrain_opt.training_run import TrainingRun


@dataclass(frozen=True)
class RunResult:
    """What came of a run. `summary` is the content of result.json; accuracies are shares."""

    run_dir: str
    test_accuracy: float | None
    best_test_accuracy: float | None
    best_epoch: int | None
    lrs: tuple[float, ...]
    wall_s: float
    summary: dict[str, Any]


def finish(this: TrainingRun) -> RunResult:
    """Wait for the last commit, write result.json, publish, and print what came of it."""
    this.wait_for_commit()
    wall_s = monotonic_s() - this.startup.began_s
    epochs = _read_lines(this.paths, "epochs")
    summary = _summary(this, epochs, wall_s)
    this.recorder.result(summary)
    this.recorder.close()
    report = write_report([str(this.paths.local)], this.paths.shown)
    this.paths.publish()
    this.terminal.advance(this.job.epochs)
    print_summary(
        _table(epochs, _read_lines(this.paths, "rounds")), _places(this, summary, report)
    )
    final, best = summary["final"], summary["best"]
    return RunResult(
        run_dir=this.paths.shown,
        test_accuracy=final["test_accuracy"],
        best_test_accuracy=best["test_accuracy"] if best else None,
        best_epoch=best["epoch"] if best else None,
        lrs=this.position.lrs,
        wall_s=wall_s,
        summary=summary,
    )


def _summary(this: TrainingRun, epochs: Sequence[dict[str, Any]], wall_s: float) -> dict[str, Any]:
    measured = [e for e in epochs if e["test_accuracy"] is not None]
    best = max(measured, key=lambda e: e["test_accuracy"], default=None)
    at = this.position
    noise = [e["noise_scale"] for e in epochs if e.get("noise_scale")]
    keys = ("epoch", "test_accuracy", "test_top5", "test_loss", "train_loss", "lr")
    return {
        "status": "finished",
        "job": this.job.name,
        "run_dir": this.paths.shown,
        "epochs": this.job.epochs,
        "steps_per_epoch": this.steps.first,
        "final": {key: epochs[-1][key] for key in keys},
        "best": {key: best[key] for key in keys} if best else None,
        "search": {
            "samples": at.search_samples,
            "main_samples": at.main_samples,
            "fraction_of_training": at.search_samples / max(at.main_samples, 1),
            "rounds": sum(1 for _ in at.history),
            "candidate_batch": getattr(this.job.learning_rate, "candidate_batch", None),
        },
        "wall_s": wall_s,
        "time_to_first_step_s": this.startup.marks_s.get("first_step_s"),
        "startup_s": this.startup.marks_s,
        "parallel": this.parallel,
        "noise_scale": noise_scale.summary(noise),
        "restarts": this.restarts(),
        "versions": versions(),
        "hardware": _hardware(this),
    }


def _hardware(this: TrainingRun) -> dict[str, Any]:
    shown = ("CPU", "GPU", "memory")
    nodes = [node["Resources"] for node in alive_nodes()]
    return {
        "nodes": [{name: node[name] for name in shown if name in node} for node in nodes],
        "workers": this.workers.size,
        "slots": this.slots.size if this.slots else 0,
        "workers_use_gpu": this.uses_gpu,
    }


def _read_lines(paths: RunPaths, name: str) -> list[dict[str, Any]]:
    path = getattr(paths, name)
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _table(
    epochs: Sequence[dict[str, Any]], rounds: Sequence[dict[str, Any]]
) -> list[tuple[str, str, str, str]]:
    """A row per epoch: number, candidates tried, chosen rate, test accuracy."""
    tried: dict[int, list[str]] = {}
    for line in rounds:
        rates = [f"{candidate['lr']:.4g}" for candidate in line["candidates"]]
        tried.setdefault(line["epoch"], []).extend(rates)
    return [
        (
            str(e["epoch"]),
            " ".join(tried.get(e["epoch"], [])) or "-",
            f"{e['lr']:.4g}",
            "-" if e["test_accuracy"] is None else f"{e['test_accuracy']:.2%}",
        )
        for e in epochs
    ]


def _places(this: TrainingRun, summary: dict[str, Any], report: str) -> list[tuple[str, str]]:
    cost = summary["search"]["fraction_of_training"]
    shown = this.paths.shown
    latest = this.checkpoints.latest
    noise = summary["noise_scale"]
    lines = [
        ("wall time", f"{summary['wall_s']:.1f} s"),
        ("search cost", f"{cost:.0%} of the training's samples"),
        *([("noise scale", noise["sentence"])] if noise else []),
        ("report", report),
        ("result", f"{shown}/result.json"),
        ("rounds", f"{shown}/rounds.jsonl"),
        ("epochs", f"{shown}/epochs.jsonl"),
        ("schedule", f"{shown}/schedule.json"),
        ("TensorBoard", f"tensorboard --logdir {shown}/tensorboard"),
    ]
    if latest is not None:
        lines.append(("checkpoint", f"{shown}/checkpoints/{latest.folder}"))
    return lines
