"""Find a batch size for training code outside this package, in the current process."""

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
from raytrain_opt.optim.epoch_steps import Length
from raytrain_opt.optim.factory import check_step
from raytrain_opt.results import Probe
from raytrain_opt.search.batch_size.strategy import ProbeRequest, SizeBounds, Updates, largest_size
from raytrain_opt.search.factory import build_strategy
from raytrain_opt.train.batch_size_probe import ProbedTraining, measure, open_probe_sampler

_SECTION: TypeAdapter[BatchSizeSection] = TypeAdapter(BatchSizeSection)


@dataclass(frozen=True)
class MinibatchChoice:
    """The chosen batch size with the reason, and all probes in order."""

    batch_size: int
    reason: str
    probes: tuple[Probe, ...]


class MinibatchSizeOptimizer:
    """Finds the batch size at which a model trains fastest, and leaves the model unchanged.

    `strategy` is throughput_knee (ours), gpu_usage_maximize or epoch_time_minimize (MBSO). The
    settings are the fields of `batch_size_search` in a job file.

    >>> best = MinibatchSizeOptimizer(tolerance=0.05).apply(model, optimizer, dataset)
    >>> loader = DataLoader(dataset, batch_size=best.batch_size, shuffle=True)
    """

    def __init__(self, strategy: str = "throughput_knee", **settings: Any) -> None:
        """Check the settings. Raises JobError for settings that the strategy does not have."""
        try:
            self.section = _SECTION.validate_python({"strategy": strategy, **settings})
        except ValidationError as error:
            # Each setting without the strategy's tag, which pydantic puts before it.
            problems = [
                Problem(".".join(map(str, details["loc"][1:])) or "strategy", details["msg"])
                for details in error.errors(include_url=False)
            ]
            raise JobError(problems, "MinibatchSizeOptimizer") from error

    def apply(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        dataset: Dataset[Any],
        loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
        *,
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
        scaler: torch.amp.GradScaler | None = None,
        epochs: int | None = None,
        **loader: Any,
    ) -> MinibatchChoice:
        """Probe training steps of `model` on its own device until the strategy has chosen.

        Weights, buffers, optimizer, gradients and random numbers are bit-identical afterwards.
        Sizes above `initial` leave `min_updates_per_epoch` and, with `epochs`, `min_updates`.

        Args:
            model: on the device to train on.
            optimizer: of the model's parameters.
            dataset: map-style, of samples (x, y).
            loss: a function of (output, y) that returns the mean over the batch.
            autocast: returns a context for forward passes.
            scaler: for training in float16.
            epochs: of the training.
            loader: arguments of the DataLoader (num_workers, collate_fn, ...) except batch_size.

        Raises:
            JobError: the step needs a closure. ResourcesError: not one sample fits into memory.
        """
        if problems := check_step(type(optimizer).__name__, optimizer.step):
            raise JobError(problems, "arguments")
        device = next(model.parameters()).device
        training = ProbedTraining(
            model,
            optimizer,
            lambda batch: loss(model(batch.x), batch.y),
            endless_batches(dataset, device, loader),
            device,
            autocast,
            scaler or torch.amp.GradScaler(device.type, enabled=False),
        )
        samples, length = len(dataset), Length(epochs or 0)  # type: ignore[arg-type]
        most = largest_size(self.section, self.section.initial, samples, length)
        strategy, probes = build_strategy(self.section, SizeBounds(most, samples)), list[Probe]()
        sampler = open_probe_sampler(self.section, device, torch.get_num_threads())
        while isinstance(choice := strategy.propose(probes), ProbeRequest):
            probes.append(measure(training, choice.batch_size, self.section, sampler))
        reason = f"{choice.reason}; updates: {Updates.count(samples, choice.batch_size, length)}"
        return MinibatchChoice(choice.batch_size, reason, tuple(probes))


def endless_batches(
    dataset: Dataset[Any], device: torch.device, arguments: dict[str, Any]
) -> Callable[[int, Callable[[], None]], Iterator[Batch]]:
    """Return the `batches` of a `ProbedTraining`: a DataLoader that starts again when it ends."""
    settings = {"shuffle": True, "drop_last": True, "pin_memory": device.type == "cuda"}

    def batches(size: int, on_copy: Callable[[], None]) -> Iterator[Batch]:
        loader = DataLoader(dataset, batch_size=size, **{**settings, **arguments})
        if len(loader) == 0:
            rule = f"has no full batch of {size} samples; set a smaller max_batch_size"
            raise DataError("dataset", rule)
        while True:
            for x, y in loader:
                on_copy()
                yield Batch(x.to(device, non_blocking=True), y.to(device, non_blocking=True))

    return batches
