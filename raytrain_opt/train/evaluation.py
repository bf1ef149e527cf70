"""Evaluation of a model on one process's part of a split; of classifiers, their predictions."""

from __future__ import annotations

import math
from base64 import b64encode
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raytrain_opt.clock import monotonic_s
from raytrain_opt.data import TrainingData
from raytrain_opt.data.base import Batch
from raytrain_opt.data.transforms import Preprocessing
from raytrain_opt.errors import DataError
from raytrain_opt.results import MAX_MISTAKES, EvalTotals, Mistake, Predictions, Split
from raytrain_opt.train.phase import first_failure
from raytrain_opt.train.task import (
    Classification,
    Task,
    aggregate,
    aggregates,
    checked_metrics,
    keep_outputs,
    metric_of,
)

if TYPE_CHECKING:
    from raytrain_opt.train.learner import Learner

# Longest side of the image of a mistake, in pixels.
_THUMBNAIL_PX = 64
# Batches of an evaluation, and samples in each, where a task gives the mean loss of a batch alone.
_LEAST_MEANS, _LEAST_OF_MEANS = 16, 2


@torch.no_grad()
def evaluate(
    learner: Learner,
    split: Split,
    rank: int,
    world_size: int,
    on_step: Callable[[int, int], object],
) -> EvalTotals:
    """Evaluate this rank's samples of the split, see `Learner.evaluate`."""
    model, task, data, names = learner.model, learner.task, learner.data, learner.metric_names
    started_s, samples, skipped_before = monotonic_s(), 0, data.skipped
    outputs: dict[str, list[Any]] | None = {} if aggregates(task) else None
    sums = torch.zeros(len(names) + 1, device=learner.device, dtype=torch.float64)
    model.eval()
    sizes = {"test": data.info.test_size, "final": data.info.final_size}
    size, batch_size = sizes.get(split, data.info.validation_size), learner.config.eval_batch_size
    gives_means = split == "validation" and getattr(task, "gives_batch_means", False)
    if gives_means:
        batch_size = min(batch_size, _size_for_means(size))
    total = math.ceil(size / (world_size * batch_size))
    records = split == "test" and isinstance(task, Classification)
    recorder = PredictionRecorder(model, data.info.preprocessing) if records else None
    for done, batch in enumerate(data.eval_batches(split, rank, world_size, batch_size)):
        on_step(done, total)
        learner.seed(f"{split} {rank} {done}")
        values = None
        with learner.attempt(), learner.autocast():
            values = task.validation_metrics(recorder or model, batch.content)
        if values is None:  # it raised
            nothing, metric = dict.fromkeys(names, math.nan), metric_of(task)
            return EvalTotals(1, nothing, monotonic_s() - started_s, metric)
        values = checked_metrics(task, values, batch.size, names)
        if recorder is not None:
            recorder.add(batch)
        if outputs is not None:
            keep_outputs(outputs, values)
        columns = [*(values[name].double() for name in names), values["loss"].double() ** 2]
        sums += torch.stack([column.sum() for column in columns])
        samples += batch.size
    *values_sums, loss_squares = sums.tolist()
    return EvalTotals(
        samples,
        dict(zip(names, values_sums, strict=True)),
        monotonic_s() - started_s,
        metric_of(task),
        None if recorder is None else recorder.result(data),
        loss_squares=loss_squares,
        samples_per_loss=batch_size if gives_means else 1,
        skipped=data.skipped - skipped_before,
        outputs=outputs,
    )


def _size_for_means(samples: int) -> int:
    """Return a batch size that gives enough batches to see how far their mean losses vary."""
    batch_size = max(_LEAST_OF_MEANS, samples // _LEAST_MEANS)
    while batch_size < samples and samples % batch_size == 1:
        batch_size += 1  # code of a user may raise for a last batch of one sample
    return batch_size


def add_ranks(task: Task, part: EvalTotals, device: torch.device) -> EvalTotals:
    """Return the totals of all ranks, alike on all, with the task's metrics of a whole set.

    Times are this rank's. The first rank aggregates the outputs of all, in the order of the
    samples, if the loss is finite. Raises DataError.
    """
    grouped = dist.is_initialized()
    columns = (part.samples, part.skipped, part.loss_squares, *part.sums.values())
    sums = torch.tensor(columns, dtype=torch.float64, device=device)
    if grouped:
        dist.all_reduce(sums)
    samples, skipped, squares, *values = sums.tolist()
    totals = replace(
        part,
        samples=int(samples),
        sums=dict(zip(part.sums, values, strict=True)),
        loss_squares=squares,
        skipped=int(skipped),
        failure=first_failure(part.failure, sum(values)),
    )
    if not aggregates(task):
        return totals
    unknown = replace(totals, outputs=None, aggregated={metric_of(task).name: math.nan})
    if not math.isfinite(totals.loss):
        return unknown
    parts: list[Any] = [totals.outputs]
    if grouped:
        is_first = dist.get_rank() == 0
        parts = [None] * dist.get_world_size()
        dist.gather_object(totals.outputs, parts if is_first else None)
    result: list[Any] = [None]
    if parts[0] is not None:
        try:
            result = [aggregate(task, parts)]
        except DataError as error:
            result = [error]
    if grouped:
        dist.broadcast_object_list(result)
    if isinstance(result[0], DataError):
        raise result[0]
    return replace(unknown, aggregated=result[0])


class PredictionRecorder(nn.Module):
    """A classifier that remembers its predictions, on the device, in place of the model."""

    def __init__(self, model: nn.Module, preprocessing: Preprocessing | None) -> None:
        super().__init__()
        self._model, self._is_image = model, preprocessing is not None and preprocessing.is_image
        self._pairs: list[Tensor] = []  # [batch, 2]: label and predicted class
        self._samples = 0
        self._indices: list[int] = []  # in the test set, where unreadable samples are left out
        # Confidence, position in the split and image (else label) of the most confident mistakes.
        self._worst: tuple[Tensor, ...] | None = None

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self._model(x)
        self._output = output
        return output

    def add(self, batch: Batch) -> None:
        classes = self._output.argmax(dim=1)
        # A loss of the user's own may be finite where an output is not.
        confidences = self._output.float().softmax(dim=1).amax(dim=1).nan_to_num()
        self._pairs.append(torch.stack([batch.y, classes], dim=1))
        # Of a correct prediction -1, so that it comes after every mistake.
        scores = confidences.where(classes != batch.y, -1.0)
        scores, rows = scores.topk(min(MAX_MISTAKES, len(scores)))
        inputs = batch.x if self._is_image else batch.y  # padded texts differ in length
        worst: tuple[Tensor, ...] = (scores, rows + self._samples, inputs[rows])
        if self._worst is not None:
            worst = tuple(torch.cat(pair) for pair in zip(self._worst, worst, strict=True))
        best = worst[0].topk(min(MAX_MISTAKES, len(worst[0]))).indices
        self._worst = tuple(values[best] for values in worst)
        self._samples += batch.size
        self._indices += batch.indices or ()

    def result(self, data: TrainingData) -> Predictions | None:
        """Return the predictions, with pictures if the samples are images; None without any."""
        if self._worst is None:
            return None
        pairs = torch.cat(self._pairs).cpu()
        scores, positions, samples = (values.cpu() for values in self._worst)
        mistakes = []
        for score, i, sample in zip(scores.tolist(), positions.tolist(), samples, strict=True):
            if score >= 0:
                label, predicted = pairs[i].tolist()
                mistake = Mistake(
                    file=data.source.file("test", self._indices[i]) if self._indices else None,
                    sample=i,
                    label=label,
                    predicted=predicted,
                    confidence=score,
                    jpeg=_thumbnail(sample, data.info.preprocessing),
                )
                mistakes.append(mistake)
        counts = Counter(map(tuple, pairs.tolist()))
        confusion = tuple((*pair, count) for pair, count in counts.items())
        return Predictions(confusion=confusion, mistakes=tuple(mistakes))


def _thumbnail(x: Tensor, preprocessing: Preprocessing | None) -> str | None:
    """Return an input of the network [C, H, W] as JPEG in base64; None if it is no image."""
    from PIL import Image

    if preprocessing is None or not preprocessing.is_image or preprocessing.mean_std is None:
        return None
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in preprocessing.mean_std)
    pixels = (255 * (x.float() * std + mean)).round().clamp(0, 255).byte()
    array = pixels.permute(1, 2, 0).numpy() if len(pixels) == 3 else pixels[0].numpy()
    image = Image.fromarray(array)
    image.thumbnail((_THUMBNAIL_PX, _THUMBNAIL_PX))
    image.save(file := BytesIO(), "JPEG", quality=92)
    return b64encode(file.getvalue()).decode()
