"""Train a model of Hugging Face's transformers with its collator and `compute_metrics`.

As with its Trainer: a batch goes to `forward` by name, the loss is the one that the model returns
with labels, columns that `forward` does not take are dropped before the collator sees them, and
`compute_metrics` gets the predictions of the whole set, padded with -100.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from raytrain_opt.config.schema import Job
from raytrain_opt.errors import DataError
from raytrain_opt.integrations.common import collated, of_each

ComputeMetrics = Callable[[Any], Mapping[str, float]]
# Targets of question answering.
_POSITIONS = ("start_positions", "end_positions")
# Columns that collators rename to labels.
_LABELS = ("label", "label_ids", "labels")
_PADDING = -100


def from_model(
    model: Any,
    train: Any,
    test: Any,
    collator: Callable[[list[Any]], Any] | None = None,
    compute_metrics: ComputeMetrics | None = None,
    *,
    metric_for_best_model: str = "loss",
    greater_is_better: bool | None = None,
    **fields: Any,
) -> Job:
    """Return the job that trains a model of transformers.

    train, test: Datasets of dicts, also of the library datasets.
    collator: makes a batch of a list of samples. Default: `default_data_collator`.
    compute_metrics: gets an EvalPrediction of the whole test set, and returns numbers.
    metric_for_best_model, greater_is_better: one of them, as in TrainingArguments.
    fields: of the job, such as epochs and global_batch_size; `data` has those beside the Datasets.

    The job chooses optimizer and rate, or names them.
    """
    from transformers import default_data_collator

    names = dict.fromkeys((*inspect.signature(model.forward).parameters, *_LABELS))
    collate = collator or default_data_collator

    def columns(samples: list[Any]) -> Any:
        if isinstance(samples[0], Mapping):
            samples = [{k: v for k, v in s.items() if k in names} for s in samples]
        return collate(samples)

    metric = metric_for_best_model.removeprefix("eval_")
    task = TransformersTask(
        [name for name in names if "label" in name or name in _POSITIONS],
        getattr(model.config, "keys_to_ignore_at_inference", ()),
        compute_metrics,
        metric,
        not metric.endswith("loss") if greater_is_better is None else greater_is_better,
    )
    sets = {"name": (collated(train, columns), collated(test, columns))}
    fields["data"] = sets | fields.get("data", {})
    return Job.model_validate({"model": model, "task": task} | fields)


@dataclass(frozen=True)
class TransformersTask:
    """A task that calls the model with a batch by name; `labels`: names of its targets."""

    gives_batch_means: ClassVar[bool] = True

    labels: Sequence[str]
    ignored: Sequence[str]
    compute_metrics: ComputeMetrics | None
    metric: str
    higher_is_better: bool

    @property
    def aggregate(self) -> ComputeMetrics | None:
        """What computes metrics of the whole set, if anything does."""
        return None if self.compute_metrics is None else self._aggregate

    def training_loss(self, model: Any, batch: Any) -> Tensor:
        """Return the loss that the model computes."""
        return _loss(model(**batch[0]), batch[0])

    def validation_metrics(self, model: Any, batch: Any) -> dict[str, Any]:
        """Return the loss, and predictions and labels of each sample for `compute_metrics`."""
        content, ones = batch
        output = model(**content)
        values: dict[str, Any] = {"loss": of_each(_loss(output, content), ones)}
        if self.aggregate is not None:
            labels = {name: content[name] for name in self.labels if name in content}
            for side, tensors in (("predictions", output), ("label_ids", labels)):
                for name, value in tensors.items():
                    if name not in ("loss", *self.ignored) and isinstance(value, Tensor):
                        values[f"{side} {name}"] = list(value)
        return values

    def _aggregate(self, outputs: Mapping[str, Any]) -> dict[str, float]:
        from transformers import EvalPrediction

        assert self.compute_metrics is not None
        sides: dict[str, Any] = {}
        for side in ("predictions", "label_ids"):
            arrays = [_stack(outputs[n]).numpy() for n in outputs if n.startswith(side)]
            sides[side] = arrays[0] if len(arrays) == 1 else tuple(arrays)
        metrics = self.compute_metrics(EvalPrediction(**sides))
        # As in the Trainer, the loss is the mean over the samples.
        named = {name.removeprefix("eval_"): value for name, value in metrics.items()}
        return {name: value for name, value in named.items() if name != "loss"}


def _loss(output: Any, content: Mapping[str, Any]) -> Tensor:
    loss: Tensor | None = output.get("loss")
    if loss is None:
        rule = f"the model returns no loss for batches with {', '.join(content)}"
        raise DataError("data.collate", f"{rule}; the collator must add the labels")
    return loss


def _stack(values: Sequence[Tensor]) -> Tensor:
    """Return the values of all samples as one tensor, padded at the end of shorter ones."""
    shape = [max(sizes) for sizes in zip(*(value.shape for value in values), strict=True)]
    first = values[0].float() if values[0].is_floating_point() else values[0]
    stacked = first.new_full((len(values), *shape), _PADDING)
    for row, value in zip(stacked, values, strict=True):
        row[tuple(map(slice, value.shape))] = value
    return stacked
