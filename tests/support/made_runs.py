"""Run directories made of invented records, in the form that runs write them.

Numbers follow simple rules, so that tests can say what must come of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

STEPS, SELECTION = 20, 400
MULTIPLIERS = (2.0, 1.0, 0.5)
START_UP_S, EPOCH_S = 30.0, 2.0


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """A record of JSON lines."""
    text = "".join(json.dumps({"schema_version": 1, **line}) + "\n" for line in lines)
    path.write_text(text, encoding="utf-8")


def accuracy(epoch: int) -> float:
    """Of the training after this epoch: 0.5, 0.75, 0.833, ..."""
    return 1 - 0.5 / epoch


def epoch_line(epoch: int, **changes: Any) -> dict[str, Any]:
    """0.2 s of pre-training, 1.2 s of main training with 0.06 s of waiting."""
    parts = {
        "pretrain_s": 0.2,
        "longest_slot_s": 0.18,
        "take_state_s": 0.05,
        "main_train_s": 1.2,
        "main_compute_s": 1.0,
        "main_data_wait_s": 0.06,
        "main_load_s": 0.05,
        "main_average_s": 0.02,
        "main_hand_over_s": 0.03,
        "evaluate_s": 0.1,
    }
    return {
        "epoch": epoch,
        "lr": 0.1,
        "lr_first": 0.1,
        "train_loss": 2.0 / epoch,
        "train_accuracy": accuracy(epoch),
        "test_loss": 2.1 / epoch,
        "test_accuracy": accuracy(epoch),
        "test_top5": 1.0,
        "test_samples": 360,
        "workers": 2,
        "samples": 960,
        "samples_per_s": 960.0,
        "skipped": 0,
        "seconds": EPOCH_S + (START_UP_S if epoch == 1 else 0.0),
        "parts_s": parts,
        "noise_scale": None,
        **changes,
    }


def round_line(epoch: int, winner: int | None = 1, **changes: Any) -> dict[str, Any]:
    """Three candidates; the winner, if any, is 10 points of accuracy ahead."""
    best = accuracy(epoch) - 0.05
    candidates = [
        {
            "index": index,
            "multiplier": multiplier,
            "lr": 0.1 * multiplier,
            "decay": 1.0,
            "score": best if index == winner else best - 0.1,
            "val_accuracy": best if index == winner else best - 0.1,
            "val_loss": 1.0,
            "train_loss": 1.0,
            "seconds": 0.06,
            "slot": index % 2,
            "status": "ok",
        }
        for index, multiplier in enumerate(MULTIPLIERS)
    ]
    return {
        "epoch": epoch,
        "stage": "",
        "base_lr": 0.1,
        "pretrain_steps": 5,
        "kept_steps": 5,
        "candidates": candidates,
        "selection_samples": SELECTION,
        "winner": winner,
        "averaged": [],
        "reason": "best val_accuracy of 3",
        "next_base_lr": 0.1 * (1.0 if winner is None else MULTIPLIERS[winner]),
        "winner_sha256": "0" * 64,
        "loaded_sha256": ["0" * 64] * 2,
        "parts_s": {"pretrain_s": 0.2},
        **changes,
    }


def span_lines(epoch: int) -> list[dict[str, Any]]:
    """Two slots pre-train, two workers train and evaluate, the driver commits."""
    at_s = START_UP_S + EPOCH_S * (epoch - 1)
    used = {"utilization_pct": 90.0, "memory_mib": 400.0 + epoch}
    slot = {"doing": "pretrain", "at_s": at_s, "seconds": 0.2} | used
    slot["parts_s"] = {"load_s": 0.02, "compute_s": 0.12, "score_s": 0.05}
    worker = {"doing": "main_train", "at_s": at_s + 0.3, "seconds": 1.2} | used
    worker["parts_s"] = {"load_s": 0.05, "data_wait_s": 0.06, "compute_s": 0.94, "average_s": 0.02}
    test = {"doing": "evaluate", "at_s": at_s + 1.6, "seconds": 0.1, "parts_s": {}} | used
    commit = {"who": "driver", "doing": "commit", "at_s": at_s + 1.7, "seconds": 0.2}
    return [
        *({"epoch": epoch, "who": f"slot {i}", **slot} for i in range(2)),
        *({"epoch": epoch, "who": f"worker {i}", **worker} for i in range(2)),
        *({"epoch": epoch, "who": f"worker {i}", **test} for i in range(2)),
        {"epoch": epoch, "parts_s": {}, "utilization_pct": None, "memory_mib": None, **commit},
    ]


def probe_line(probe: int, batch_size: int, **changes: Any) -> dict[str, Any]:
    """On a machine on which a step costs 1 ms and 0.05 ms for each sample."""
    step_s = 1e-3 + 5e-5 * batch_size
    return {
        "probe": probe,
        "check": False,
        "reason": f"try {batch_size}",
        "batch_size": batch_size,
        "status": "ok",
        "samples_per_s": batch_size / step_s,
        "samples_per_s_error": 0.01 * batch_size / step_s,
        "steps": 20,
        "seconds": 20 * step_s,
        "parts_s": {
            "data_wait_s": 0.1 * step_s,
            "copy_s": 0.1 * step_s,
            "forward_s": 0.3 * step_s,
            "backward_s": 0.4 * step_s,
            "update_s": 0.1 * step_s,
        },
        "utilization_pct": 60.0 + probe,
        "utilization_mean_pct": 50.0 + probe,
        "utilization_samples": 4,
        "peak_memory_mib": 100.0 + batch_size,
        "joule_per_sample": None,
        "why": "",
        **changes,
    }


OUT_OF_MEMORY = {
    "status": "out_of_memory",
    "samples_per_s": None,
    "samples_per_s_error": None,
    "parts_s": {},
    "utilization_pct": None,
    "utilization_mean_pct": None,
    "peak_memory_mib": None,
    "why": "CUDA out of memory",
}


def event_line(what: str, text: str, **changes: Any) -> dict[str, Any]:
    """Something that happened in epoch 2."""
    return {
        "utc": "2026-01-02T03:04:05+00:00",
        "epoch": 2,
        "what": what,
        "text": text,
        "at_s": 40.0,
        "who": None,
        "cost_s": None,
        **changes,
    }


def job(epochs: int, **changes: Any) -> dict[str, Any]:
    """As job.yaml has it, as far as a report looks."""
    return {
        "name": "made",
        "model": {"name": "small_cnn", "args": {}},
        "data": {"name": "digits"},
        "epochs": epochs,
        "global_batch_size": 64,
        "learning_rate": {"policy": "stpt", "initial": 0.1, "candidate_batch": "global"},
        "workers": {"count": 2},
        **changes,
    }


def result(epochs: int) -> dict[str, Any]:
    """What result.json has of a run that finished, as far as a report looks."""
    search, main = epochs * 3 * 5 * 64, epochs * STEPS * 64
    return {
        "schema_version": 1,
        "finished_utc": "2026-01-02T03:04:05+00:00",
        "status": "finished",
        "steps_per_epoch": STEPS,
        "final": {"test_accuracy": accuracy(epochs)},
        "search": {
            "samples": search,
            "main_samples": main,
            "fraction_of_training": search / main,
            "rounds": epochs,
        },
        "wall_s": START_UP_S + EPOCH_S * epochs + 3,
        "time_to_first_step_s": 28.0,
        "noise_scale": {"sentence": "310 (280 to 340) in the training: made"},
        "restarts": {"worker": 0, "slot": 0},
    }


def made_run(
    folder: Path,
    epochs: int = 6,
    *,
    finished: bool = True,
    rounds: bool = True,
    job_changes: dict[str, Any] | None = None,
) -> Path:
    """A run with a round in each epoch, and what it leaves."""
    folder.mkdir(parents=True)
    numbers = range(1, epochs + 1)
    all_epochs = epochs if finished else epochs + 2
    text = yaml.safe_dump(job(all_epochs, **(job_changes or {})), allow_unicode=True)
    (folder / "job.yaml").write_text(text, encoding="utf-8")
    write_lines(folder / "epochs.jsonl", map(epoch_line, numbers))
    if rounds:
        write_lines(folder / "rounds.jsonl", map(round_line, numbers))
    spans = (span for epoch in numbers for span in span_lines(epoch))
    write_lines(folder / "timeline.jsonl", spans)
    schedule = {
        "schema_version": 1,
        "epoch_steps": [STEPS] * epochs,
        "segments": [{"steps": STEPS, "lr": 0.1 + 0.01 * (epoch % 3)} for epoch in numbers],
    }
    (folder / "schedule.json").write_text(json.dumps(schedule))
    if finished:
        (folder / "result.json").write_text(json.dumps(result(epochs)))
    return folder


def with_batch_size_search(folder: Path) -> Path:
    """The same run after it had searched its batch size."""
    lines = [
        probe_line(1, 8),
        probe_line(2, 32),
        probe_line(3, 128),
        probe_line(4, 512, **OUT_OF_MEMORY),
        probe_line(5, 128, check=True),
    ]
    write_lines(folder / "batch_size.jsonl", lines)
    summary = {
        "schema_version": 1,
        "batch_size_per_worker": 128,
        "global_batch_size": {"from": 64, "to": 256},
        "samples_per_s": 17297.0,
        "reason": "128 gives about 99.5 % of the best samples/s up to 128",
        "learning_rate": {"rule": "linear", "from": 0.1, "to": 0.4},
        "seconds": 21.4,
        "cached": False,
        "probes": 5,
    }
    (folder / "batch_size.json").write_text(json.dumps(summary))
    return folder
