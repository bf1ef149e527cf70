"""Choose the batch size of a training that is not run by this package, in its own process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from raytrain_opt.config.batch_size import BatchSizeSection
from raytrain_opt.data.base import Batch
from raytrain_opt.errors import DataError, JobError, Problem
from raytrain_opt.search.batch_size import Choice, Limits, Measurement
from raytrain_opt.search.batch_size_build import build_strategy, check_sampler
from raytrain_opt.train.probe import Subject, measure, sampler_of
from raytrain_opt.train.probe_result import Probe

_SECTION: TypeAdapter[BatchSizeSection] = TypeAdapter(BatchSizeSection)


@dataclass(frozen=True)
class MinibatchChoice:
    """The chosen batch size, why, and every probe in its order."""

    batch_size: int
    reason: str
    probes: tuple[Probe, ...]


class MinibatchSizeOptimizer:
    """Finds the batch size at which a model trains fastest, and leaves the model as it was.

    `strategy`: throughput_knee (ours), gpu_usage_maximize or epoch_time_minimize (MBSO). The
    settings are the fields of the job file's `batch_size_search`.

    >>> best = MinibatchSizeOptimizer(tolerance=0.05).apply(model, optimizer, dataset)
    >>> loader = DataLoader(dataset, batch_size=best.batch_size, shuffle=True)
    """

    def __init__(self, strategy: str = "throughput_knee", **settings: Any) -> None:
        """Raises JobError for settings that the strategy does not have."""
        try:
            self.section = _SECTION.validate_python({"strategy": strategy, **settings})
        except ValidationError as error:
            raise JobError(_problems(error), "MinibatchSizeOptimizer") from error

    def apply(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        dataset: Dataset[Any],
        loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
        *,
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
        scaler: torch.amp.GradScaler | None = None,
        **loader: Any,
    ) -> MinibatchChoice:
        """Probe training steps of `model` on its own device until the strategy has chosen.

        `dataset`: map-style, of (x, y); `loader`: arguments of its DataLoader (num_workers,
        collate_fn, ...), all but batch_size. Weights, buffers, optimiser, gradients and random
        numbers are bit-identical afterwards. Raises ResourcesError when no size fits, JobError
        when the strategy needs a GPU.
        """
        device = next(model.parameters()).device
        check_sampler(self.section, use_gpu=device.type == "cuda")
        subject = Subject(
            model,
            optimizer,
            loss,
            endless_batches(dataset, device, loader),
            device,
            autocast,
            scaler or torch.amp.GradScaler(device.type, enabled=False),
        )
        size = len(dataset)  # type: ignore[arg-type]
        limits = Limits(min(size, self.section.max_batch_size or size), size)
        return self._search(subject, limits)

    def _search(self, subject: Subject, limits: Limits) -> MinibatchChoice:
        strategy = build_strategy(self.section, limits)
        probes: list[Probe] = []
        sampler = sampler_of(self.section, subject.device, torch.get_num_threads())
        try:
            while True:
                proposed = strategy.propose([Measurement.of(probe) for probe in probes])
                if isinstance(proposed, Choice):
                    return MinibatchChoice(proposed.batch_size, proposed.reason, tuple(probes))
                probes.append(measure(subject, proposed.batch_size, self.section, sampler))
        finally:
            sampler.close()


def endless_batches(
    dataset: Dataset[Any], device: torch.device, arguments: dict[str, Any]
) -> Callable[[int, Callable[[], None]], Iterator[Batch]]:
    """The `batches` of a probe's `Subject`: a DataLoader of the wanted size, again and again."""
    settings = {"shuffle": True, "drop_last": True, "pin_memory": device.type == "cuda"}

    def batches(size: int, on_copy: Callable[[], None]) -> Iterator[Batch]:
        loader = DataLoader(dataset, batch_size=size, **{**settings, **arguments})
        if len(loader) == 0:
            raise DataError(f"the DataLoader yields no whole batch of {size} samples")
        while True:
            for x, y in loader:
                on_copy()
                yield Batch(x.to(device, non_blocking=True), y.to(device, non_blocking=True))

    return batches


def _problems(error: ValidationError) -> list[Problem]:
    """The setting's own name, without that of the strategy's section before it."""
    return [
        Problem(".".join(str(part) for part in at["loc"][1:]) or "strategy", at["msg"])
        for at in error.errors(include_url=False)
    ]
