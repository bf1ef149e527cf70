"""The classes of image files, by the network of a run; one process, no Ray."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from raytrain_opt.data.image_folder import image_paths, left_out_note
from raytrain_opt.data.images import SUFFIXES, read_image_file
from raytrain_opt.errors import JobError, Problem, printable
from raytrain_opt.train.trained_model import TrainedModel

# Images in memory at a time.
_BATCH_SIZE = 64
_CLASSES_SHOWN = 3


@dataclass(frozen=True)
class Prediction:
    """The most probable classes of one image as (name, probability), or why it has none."""

    image: str
    classes: tuple[tuple[str, float], ...] = ()
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the prediction for scripts."""
        if self.error is not None:
            return {"image": self.image, "error": self.error}
        classes = [{"name": name, "probability": value} for name, value in self.classes]
        return {"image": self.image, "classes": classes}

    def line(self) -> str:
        """Return a line for the terminal."""
        texts = [f"{name} {100 * value:.1f} %" for name, value in self.classes]
        return f"{self.image}  {self.error or '  '.join(texts)}"


def print_predictions(model: TrainedModel, images: Sequence[str], *, as_json: bool) -> bool:
    """Print what `predict` yields, a line or an object each; return whether all are images."""
    predictions = []
    for prediction in predict(model, images):
        predictions.append(prediction)
        if not as_json:
            print(printable(prediction.line(), kept=""), flush=True)
    if as_json:
        rows = [prediction.to_json() for prediction in predictions]
        print(json.dumps({"checkpoint": model.checkpoint, "predictions": rows}))
    return not any(prediction.error for prediction in predictions)


def predict(model: TrainedModel, images: Sequence[str]) -> Iterator[Prediction]:
    """Yield the three most probable classes of each image, the most probable first.

    images: files, or folders that are searched with all their subfolders. A file that
    is not an image yields an error. Raises JobError for an argument that is no such file or
    folder, or a network that does not take images.
    """
    if not model.preprocessing.is_image:
        rule = f"takes arrays of shape {model.sample_shape}, not images"
        hint = "use raytrain_opt.load_model and its probabilities()"
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
        pairs = zip(model.class_names, rows.get(file, ()), strict=False)
        ranked = sorted(pairs, key=lambda pair: -pair[1])
        yield Prediction(file, tuple(ranked[:_CLASSES_SHOWN]), errors.get(file))


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
