"""Evaluation of a model on one process's part of a split."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import nn

from raytrain_opt.clock import monotonic_s
from raytrain_opt.data import TrainingData
from raytrain_opt.results import EvalTotals, Split
from raytrain_opt.train.predictions import PredictionRecorder
from raytrain_opt.train.task import Classification, Task, metric_of


class Evaluator:
    """Evaluates a model by its task; `names` are those of the task's metrics."""

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        names: tuple[str, ...],
        data: TrainingData,
        autocast: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._model, self._task, self._names = model, task, names
        self._data, self._autocast = data, autocast
        self._metric = metric_of(task)

    @torch.no_grad()
    def evaluate(
        self,
        split: Split,
        rank: int,
        world_size: int,
        batch_size: int,
        on_step: Callable[[int, int], object],
    ) -> EvalTotals:
        """Evaluate this rank's samples of the split; see `Learner.evaluate`."""
        started_s, samples, info = monotonic_s(), 0, self._data.info
        device = next(self._model.parameters()).device
        sums = torch.zeros(len(self._names), device=device, dtype=torch.float64)
        self._model.eval()
        split_size = info.test_size if split == "test" else info.validation_size
        total = math.ceil(split_size / (world_size * batch_size))
        recorder = None
        if split == "test" and isinstance(self._task, Classification):
            recorder = PredictionRecorder(self._model)
        batches = self._data.eval_batches(split, rank, world_size, batch_size)
        for done, batch in enumerate(batches):
            on_step(done, total)
            with self._autocast():
                values = self._task.validation_metrics(recorder or self._model, batch.content)
            if recorder is not None:
                recorder.add(batch)
            sums += torch.stack([values[name].double().sum() for name in self._names])
            samples += batch.size
        named = dict(zip(self._names, sums.tolist(), strict=True))
        predictions = None if recorder is None else recorder.result(info.preprocessing)
        return EvalTotals(samples, named, monotonic_s() - started_s, self._metric, predictions)
