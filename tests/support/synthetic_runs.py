"""Run directories with synthetic records, in the form that runs write them.

The numbers follow simple rules, so that tests can compute the expected values.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from raytrain_opt.recording.records import PredictionsRecord
from raytrain_opt.results import Mistake

STEPS = 20
MULTIPLIERS: tuple[float, ...] = (2.0, 1.0, 0.5)
START_UP_S, EPOCH_S = 30.0, 2.0


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Write a record of JSON lines."""
    text = "".join(json.dumps({"schema_version": 1, **line}) + "\n" for line in lines)
    path.write_text(text, encoding="utf-8")
    if path.name == "rounds.jsonl" and (file := path.with_name("result.json")).exists():
        record = json.loads(file.read_text())
        record["search"]["rounds"] = text.count("\n")
        file.write_text(json.dumps(record))


def write_schedule(path: Path, *epochs: Sequence[float], **changes: Any) -> None:
    """Write the learning rates of these epochs, as schedule.jsonl has them."""
    line = {
        "optimizer": "SGD",
        "auto_weight_decay": False,
        "restarts": False,
        "lr_multipliers": {},
        **changes,
    }
    write_lines(
        path,
        (
            {"epoch": n, **line, "steps": {"first": 0, "lrs": lrs}}
            for n, lrs in enumerate(epochs, 1)
        ),
    )


def accuracy(epoch: int) -> float:
    """Return the test accuracy after this epoch: 0.5, 0.75, 0.833, ..."""
    return 1 - 0.5 / epoch


def evaluation(value: float | None, loss: float = 0.6) -> dict[str, Any]:
    """Return the results of an evaluation with this accuracy; None: there was none."""
    if value is None:
        return {"test_metrics": {}, "metric": None}
    metrics = {"loss": loss, "accuracy": value, "top5": 1.0}
    return {"test_metrics": metrics, "metric": {"name": "accuracy", "higher_is_better": True}}


def epoch_line(epoch: int, **changes: Any) -> dict[str, Any]:
    """Return an epoch of 0.2 s pre-training and 1.2 s main training, 0.02 s of it waiting."""
    parts = {
        "pretrain_s": 0.2,
        "take_state_s": 0.05,
        "main_train_s": 1.2,
        "main_compute_s": 1.0,
        "main_data_wait_s": 0.02,
        "main_load_s": 0.05,
        "main_average_s": 0.02,
        "main_hand_over_s": 0.03,
        "evaluate_s": 0.1,
    }
    return {
        "epoch": epoch,
        "epochs": 4,
        "lr": 0.1,
        "lr_peak": 0.2,
        "optimizer": "SGD",
        "weight_decay_factor": 1.0,
        "train_loss": 2.0 / epoch,
        **evaluation(accuracy(epoch), 2.1 / epoch),
        "test_samples": 360,
        "workers": 2,
        "samples": 960,
        "samples_per_s": 960.0,
        "skipped": 0,
        "duration_s": EPOCH_S + (START_UP_S if epoch == 1 else 0.0),
        "end_s": START_UP_S + EPOCH_S * epoch,
        "timings_s": parts,
        **changes,
    }


def round_line(epoch: int, winner: int | None = 1, **changes: Any) -> dict[str, Any]:
    """Return a round of three candidates; the winner, if any, is 10 points of accuracy ahead."""
    best = accuracy(epoch) - 0.05
    candidates = [
        {
            "index": index,
            "multiplier": multiplier,
            "lr": 0.1 * multiplier,
            "optimizer": "SGD",
            "weight_decay_factor": 1.0,
            "score": best if index == winner else best - 0.1,
            "val_metric": best if index == winner else best - 0.1,
            "val_loss": 1.0,
            "train_loss": 1.0,
            "duration_s": 0.06,
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
        "search_on": "slots",
        "candidates": candidates,
        "metric": {"name": "accuracy", "higher_is_better": True},
        "winner": winner,
        "reason": "best validation accuracy of 3",
        "next_base_lr": 0.1 * (1.0 if winner is None else MULTIPLIERS[winner]),
        "timings_s": {"pretrain_s": 0.2},
        **changes,
    }


def probe_line(probe: int, batch_size: int, **changes: Any) -> dict[str, Any]:
    """Return a probe of a machine on which a step takes 1 ms, and 0.05 ms for each sample."""
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
        "duration_s": 20 * step_s,
        "timings_s": {
            "data_wait_s": 0.1 * step_s,
            "copy_s": 0.1 * step_s,
            "forward_s": 0.3 * step_s,
            "backward_s": 0.4 * step_s,
            "update_s": 0.1 * step_s,
        },
        "utilization_pct": 60.0 + probe,
        "utilization_mean_pct": 50.0 + probe,
        "peak_memory_mib": 100.0 + batch_size,
        "error": "",
        **changes,
    }


OUT_OF_MEMORY: dict[str, Any] = {
    "status": "out_of_memory",
    "samples_per_s": None,
    "samples_per_s_error": None,
    "timings_s": {},
    "utilization_pct": None,
    "utilization_mean_pct": None,
    "peak_memory_mib": None,
    "error": "CUDA out of memory",
}


def event_line(kind: str, text: str, **changes: Any) -> dict[str, Any]:
    """Return an event of epoch 2."""
    return {
        "utc": "2026-01-02T03:04:05+00:00",
        "epoch": 2,
        "kind": kind,
        "text": text,
        "time_s": 40.0,
        "process": None,
        "silent_s": None,
        **changes,
    }


def job(epochs: int, **changes: Any) -> dict[str, Any]:
    """Return the fields of job.yaml that a report reads."""
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
    """Return the result.json of a finished run."""
    search, main = epochs * 3 * 5 * 64, epochs * STEPS * 64
    return {
        "schema_version": 1,
        "finished_utc": "2026-01-02T03:04:05+00:00",
        "status": "finished",
        "steps_per_epoch": STEPS,
        "job": "made",
        "run_dir": "runs/made",
        "epochs": epochs,
        "final": _epoch_result(epochs),
        "best": _epoch_result(epochs),
        "search": {
            "samples": search,
            "main_samples": main,
            "fraction_of_training": search / main,
            "rounds": epochs,
        },
        "wall_s": START_UP_S + EPOCH_S * epochs + 3,
        "time_to_first_step_s": 28.0,
        "startup_s": {"first_step_s": 28.0},
        "restarts": {"worker": 0, "slot": 0},
        "versions": {"python": "3.12.0"},
        "hardware": {"nodes": [{"CPU": 2.0}], "workers": 2, "slots": 2, "workers_use_gpu": False},
    }


def _epoch_result(epoch: int) -> dict[str, Any]:
    names = ("epoch", "test_metrics", "metric", "train_loss", "lr", "lr_peak", "optimizer")
    return {name: epoch_line(epoch)[name] for name in names}


def write_run(
    folder: Path,
    epochs: int = 6,
    *,
    finished: bool = True,
    rounds: bool = True,
    job_changes: dict[str, Any] | None = None,
) -> Path:
    """Write a run with a round in each epoch."""
    folder.mkdir(parents=True)
    numbers = range(1, epochs + 1)
    all_epochs = epochs if finished else epochs + 2
    text = yaml.safe_dump(job(all_epochs, **(job_changes or {})), allow_unicode=True)
    (folder / "job.yaml").write_text(text, encoding="utf-8")
    write_lines(folder / "epochs.jsonl", (epoch_line(n, epochs=all_epochs) for n in numbers))
    if rounds:
        write_lines(folder / "rounds.jsonl", map(round_line, numbers))
    lrs = ([0.1 + 0.01 * (epoch % 3)] * STEPS for epoch in numbers)
    write_schedule(folder / "schedule.jsonl", *lrs)
    if finished:
        record = result(epochs)
        record["search"]["rounds"] *= rounds
        (folder / "result.json").write_text(json.dumps(record))
    return folder


def with_predictions(folder: Path, classes: int = 10) -> Path:
    """Add predictions of 20 samples per class, i // 2 of which are wrong in class i < 20.

    A wrong prediction is the next class, with a confidence of 0.55 to 0.95.
    """
    image = Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8) * 4)
    image.save(file := BytesIO(), "JPEG")
    jpeg, wrong = b64encode(file.getvalue()).decode(), [min(c // 2, 10) for c in range(classes)]
    pairs = [(c, (c + 1) % classes, n) for c, n in enumerate(wrong) if n]
    mistakes = [
        Mistake(sample=20 * c + i, label=c, predicted=p, confidence=0.55 + i / 25, jpeg=jpeg)
        for c, p, n in pairs
        for i in range(n)
    ]
    worst = sorted(mistakes, key=lambda m: -m.confidence)[:12]
    record = PredictionsRecord(
        epoch=6,
        class_names=tuple(f"class {i}" for i in range(classes)),
        confusion=(*((c, c, 20 - n) for c, n in enumerate(wrong)), *pairs),
        mistakes=tuple(m.model_copy(update={"file": f"val/{m.sample}.jpg"}) for m in worst),
    )
    (folder / "predictions.json").write_text(record.model_dump_json())
    return folder


def with_batch_size_search(folder: Path) -> Path:
    """Add the records of a batch-size search to the run."""
    lines = [
        probe_line(1, 8),
        probe_line(2, 32),
        probe_line(3, 128),
        probe_line(4, 512, **OUT_OF_MEMORY),
        probe_line(5, 128, check=True),
    ]
    write_lines(folder / "batch_size.jsonl", lines)
    (folder / "batch_size.json").write_text(json.dumps(batch_size()))
    return folder


def batch_size(**changes: Any) -> dict[str, Any]:
    """Return the batch_size.json of a search."""
    return {
        "schema_version": 1,
        "batch_size_per_worker": 128,
        "global_batch_size": 256,
        "samples_per_s": 17297.0,
        "reason": "128 gives about 99.5 % of the best samples/s up to 128",
        "duration_s": 21.4,
        "probes": 5,
        **changes,
    }
