"""What the network of a run says of image files or of its test set; one process, no Ray."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from raytrain_opt.commands.evaluate import SavedRun, trained_learner
from raytrain_opt.data.base import Batch
from raytrain_opt.data.image_folder import image_paths, left_out_note
from raytrain_opt.data.images import SUFFIXES, read_image_file
from raytrain_opt.errors import JobError, Problem, printable
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.trained_model import TrainedModel

# Images in memory at a time.
_BATCH_SIZE = 64
_CLASSES_SHOWN = 3


@dataclass(frozen=True)
class Prediction:
    """The most probable classes of one sample as (name, probability), or why it has none.

    image: its file, or its number in the test set. values: its class there, or a task's values.
    """

    image: str
    classes: tuple[tuple[str, float], ...] = ()
    error: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the prediction for scripts."""
        if self.error is not None:
            return {"image": self.image, "error": self.error}
        classes = [{"name": name, "probability": value} for name, value in self.classes]
        values = {"values": dict(self.values)} if self.values else {}
        return {"image": self.image, "classes": classes, **values}

    def line(self) -> str:
        """Return a line for the terminal."""
        texts = [f"{name} {100 * value:.1f} %" for name, value in self.classes]
        for name, value in self.values.items():
            texts.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
        return f"{self.image}  {self.error or '  '.join(texts)}"


def print_predictions(
    checkpoint: str, predictions: Iterable[Prediction], *, as_json: bool
) -> bool:
    """Print a line or an object for each; return whether none has an error."""
    printed = []
    for prediction in predictions:
        printed.append(prediction)
        if not as_json:
            print(printable(prediction.line(), kept=""), flush=True)
    if as_json:
        rows = [prediction.to_json() for prediction in printed]
        print(json.dumps({"checkpoint": checkpoint, "predictions": rows}))
    return not any(prediction.error for prediction in printed)


def predict_test_set(run: SavedRun) -> Iterator[Prediction]:
    """Yield the most probable classes and the class of each sample of the run's last set.

    Of a task, all that its `validation_metrics` returns of each. Raises JobError, DataError.
    """
    with trained_learner(run) as learner:
        start, source, last = 0, learner.data.source, learner.info.last_set
        for batch in learner.data.eval_batches(last, 0, 1, learner.config.eval_batch_size):
            numbers = batch.indices or range(start, start + batch.size)
            start += batch.size
            samples = [source.file(last, n) or f"sample {n}" for n in numbers]
            yield from _predict_samples(learner, batch, samples)


def _predict_samples(learner: Learner, batch: Batch, samples: list[str]) -> Iterator[Prediction]:
    names = learner.info.class_labels
    if learner.config.task.is_classification:
        rows = learner.model(batch.x).float().softmax(dim=1).tolist()
        for sample, row, label in zip(samples, rows, batch.y, strict=True):
            yield Prediction(sample, _ranked(names, row), values={"label": names[int(label)]})
        return
    metrics = learner.task.validation_metrics(learner.model, batch.content)
    for i, sample in enumerate(samples):
        values = {name: tree_map(_plain, of_all[i]) for name, of_all in metrics.items()}
        yield Prediction(sample, values=values)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _ranked(names: Sequence[str], row: Sequence[float]) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(zip(names, row, strict=False), key=lambda pair: -pair[1])[:_CLASSES_SHOWN])


def predict(model: TrainedModel, images: Sequence[str]) -> Iterator[Prediction]:
    """Yield the three most probable classes of each image, the most probable first.

    images: files, or folders that are searched with their subfolders. A file that is no image
    yields an error. Raises JobError: no such file or folder, or a network of no images.
    """
    if not model.preprocessing.is_image:
        rule = f"takes arrays of shape {model.sample_shape}, not images"
        hint = "without images it predicts the test set; in Python, see load_model"
        raise JobError([Problem("RUN", rule, None, hint)], "arguments")
    left_out: Counter[str] = Counter()
    files = [file for argument in images for file in _find_images(argument, left_out)]
    for note in left_out_note(left_out):
        print(note, file=sys.stderr)
    for start in range(0, len(files), _BATCH_SIZE):
        yield from _predict_batch(model, files[start : start + _BATCH_SIZE])


def _predict_batch(model: TrainedModel, files: Sequence[str]) -> Iterator[Prediction]:
    inputs: dict[str, torch.Tensor] = {}
    errors: dict[str, str] = {}
    for file in files:
        try:
            inputs[file] = model.preprocess([read_image_file(file)])
        except Exception as error:  # noqa: BLE001 - a damaged file makes a decoder raise anything
            reason = error.strerror if isinstance(error, OSError) else None
            errors[file] = f"cannot be read: {reason or error}"
    probabilities = model.classify(torch.cat([*inputs.values()])).tolist() if inputs else []
    rows = dict(zip(inputs, probabilities, strict=True))
    for file in files:
        yield Prediction(file, _ranked(model.class_names, rows.get(file, ())), errors.get(file))


def _find_images(argument: str, left_out: Counter[str]) -> list[str]:
    try:
        root = Path(argument).expanduser()
        if root.is_file():
            return [argument]
        files = [path for path, _ in image_paths(root, left_out)] if root.is_dir() else []
    except OSError as error:
        rule = f"cannot be read: {error.strerror}"
        raise JobError([Problem("IMAGE", rule, repr(argument))], "arguments") from None
    if not files:
        rule = f"is neither a file nor a folder with files {', '.join(SUFFIXES)}"
        raise JobError([Problem("IMAGE", rule, repr(argument))], "arguments")
    return sorted(files)
