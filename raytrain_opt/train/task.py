"""What a training minimizes and measures: classification, or a task of the user's own.

A task is a class with two methods and, for the metric that decides which weights are better, the
attributes `metric` (default: loss) and `higher_is_better`. See docs/tasks.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from raytrain_opt.config.error_messages import nearest
from raytrain_opt.config.functions import resolve_function
from raytrain_opt.config.schema import CLASSIFICATION, LossSection, TaskSection
from raytrain_opt.config.section import NameOrFunction, is_function_name
from raytrain_opt.data.base import Batch, DataInfo
from raytrain_opt.data.batch_reader import cause
from raytrain_opt.data.nesting import leaves, map_leaves
from raytrain_opt.errors import DataError, JobError, Problem
from raytrain_opt.models.dry_run import check_output, preserve_model
from raytrain_opt.results import Metric

_CROSS_ENTROPY = "cross_entropy"


class Task(Protocol):
    """The two methods of a task. `batch`: as the Datasets' samples are, stacked; else (x, y)."""

    def training_loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss over the samples of the batch, []."""

    def validation_metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        """Return `loss` and any other metrics of each sample, [samples] each."""


class Classification:
    """The built-in task: one label per sample; the accuracy decides."""

    metric = "accuracy"

    def __init__(self, section: LossSection, class_weights: Tensor | None = None) -> None:
        """Raise JobError with the problems that `check_loss` finds."""
        if problems := check_loss(section):
            raise JobError(problems)
        self._is_cross_entropy = section.name == _CROSS_ENTROPY
        self._class_weights = class_weights
        self.loss: Callable[..., Tensor] = (
            partial(functional.cross_entropy, label_smoothing=section.label_smoothing)
            if self._is_cross_entropy
            else partial(_call_user_loss, resolve_function(section.name, "loss.name"))
        )

    def training_loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss, of mixed samples over both labels."""
        x, labels, *mixed = batch
        output = model(x)
        loss = self._mean_loss(output, labels)
        if not mixed:
            return loss
        other_labels, weight = mixed
        mixed_loss: Tensor = weight * loss + (1 - weight) * self._mean_loss(output, other_labels)
        return mixed_loss

    def validation_metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        """Return loss (of a user's function: the batch's mean), accuracy and top-5."""
        x, labels = batch
        output = model(x)
        hits = output.topk(min(5, output.shape[1]), dim=1).indices == labels.unsqueeze(1)
        if self._is_cross_entropy:
            losses = self._losses(output, labels)
        else:
            losses = self.loss(output, labels).expand(len(labels))
        return {"loss": losses, "accuracy": hits[:, 0], "top5": hits.any(dim=1)}

    def _mean_loss(self, output: Tensor, labels: Tensor) -> Tensor:
        # torch divides by the weights of the batch: then micro-batches would count differently.
        weighted = self._class_weights is not None
        return self._losses(output, labels).mean() if weighted else self.loss(output, labels)

    def _losses(self, output: Tensor, labels: Tensor) -> Tensor:
        losses = self.loss(output, labels, reduction="none")
        return losses if self._class_weights is None else losses * self._class_weights[labels]


def check_task(section: TaskSection) -> list[Problem]:
    """Return the problems of the section without creating the task."""
    name = section.name
    if name == CLASSIFICATION:
        rule = "classification has none; its loss is chosen in the section loss"
        return [Problem("task.args", rule)] if section.args else []
    if problems := _check_name(name, "task.name", CLASSIFICATION, "package.module:Class"):
        return problems
    task = resolve_function(name, "task.name")
    methods = ("training_loss", "validation_metrics")
    missing = [m for m in methods if not hasattr(task, m)]
    rule = f"must be a class with the methods {' and '.join(methods)}(model, batch)"
    return [Problem("task.name", rule, f"without {', '.join(missing)}")] if missing else []


def build_task(
    section: TaskSection, loss: LossSection, info: DataInfo, device: torch.device | str = "cpu"
) -> Task:
    """Create the task. Raises JobError for a wrong name, or arguments that it does not take."""
    if problems := check_task(section):
        raise JobError(problems)
    if section.is_classification:
        return Classification(loss, _class_weights(loss, info, device))
    try:
        task: Task = resolve_function(section.name, "task.name")(**section.args)
    except Exception as error:
        rule = f"raised {type(error).__name__}: {error}"
        raise JobError([Problem("task.args", rule, repr(section.args))]) from error
    return task


def _class_weights(
    section: LossSection, info: DataInfo, device: torch.device | str
) -> Tensor | None:
    """Return `loss.class_weights` as float32 [num_classes]; raises JobError."""
    weights = section.class_weights
    if weights is None:
        return None
    path = "loss.class_weights"
    if weights == "balanced":
        if not info.class_counts:
            rule = "needs the class of each sample: `targets` of the training Dataset, or a list"
            raise JobError([Problem(path, rule, repr(weights))])
        mean = sum(info.class_counts) / info.num_classes
        weights = [mean / count for count in info.class_counts]
    if len(weights) != info.num_classes:
        rule = f"has {len(weights)} weights, but the data have {info.num_classes} classes"
        raise JobError([Problem(path, rule)])
    return torch.tensor(weights, dtype=torch.float32, device=device)


def metric_of(task: Task) -> Metric:
    """Return the metric that decides; without one, the loss does."""
    name = getattr(task, "metric", "loss")
    return Metric(name, getattr(task, "higher_is_better", name != "loss"))


def try_task(task: Task, model: nn.Module, batch: Batch, num_classes: int) -> tuple[str, ...]:
    """Call model and task with a batch of two samples in eval mode; return the metrics' names.

    Model and task are preserved (`models.dry_run.preserve_model`). Raises DataError: the model
    does not fit the data, or a method of the task raised or returned something else than
    documented. Raises JobError: model and loss are both wrong.
    """
    unfit: DataError | None = None
    if isinstance(task, Classification):
        try:
            check_output(model, batch.x, num_classes)
        except DataError as error:
            unfit = error

    def zeros(samples: Tensor) -> Tensor:
        return torch.zeros(
            2, num_classes, device=samples.device
        )  # the loss needs no fitting model

    forward: Any = zeros if isinstance(task, Classification) else model
    try:
        names = _try_methods(task, forward, model, batch)
    except (DataError, JobError) as error:
        if unfit is None:
            raise
        problems = error.problems if isinstance(error, JobError) else [error.problem]
        raise JobError([unfit.problem, *problems]) from error
    if unfit is not None:
        raise unfit
    return names


def count_flops(task: Task, model: nn.Module, batch: Batch) -> float:
    """Return the operations of one sample's training, 2 for each product, on the CPU.

    The backward pass counts twice the forward pass. Infinite where torch does not count: fused
    operations of recurrent layers, and derivatives within the loss. Model and task are preserved.
    """
    from torch.utils.flop_counter import FlopCounterMode  # 0.1 s, of the driver alone

    counter = FlopCounterMode(display=False)
    if any(isinstance(module, torch.nn.RNNBase) for module in model.modules()):
        return float("inf")
    # Without gradients transformers have fused operations, too.
    with preserve_model(model, torch.device("cpu"), task), torch.enable_grad(), counter:
        model.eval()
        try:
            task.training_loss(model, batch.content)
        except RuntimeError:  # of the counter: the loss, which was tried, uses autograd.grad
            return float("inf")
    return 3 * counter.get_total_flops() / batch.size


def require_scalar(loss: object) -> None:
    """Raise DataError unless a task's loss is a tensor without dimensions."""
    if not isinstance(loss, torch.Tensor) or loss.dim():
        rule = "must return the mean over the batch, a tensor without dimensions"
        raise DataError("task", f"training_loss {rule}, not {_described(loss)}")


def wrapped(model: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """Return a module as DistributedDataParallel: parameters and mode, but no other attributes."""
    module = cast("Any", torch.nn.Module())
    module.module, module.forward, module.training = model, forward, model.training
    return cast(nn.Module, module)


def raised(task: Task, error: Exception, batch: Batch, method: str, model: nn.Module) -> DataError:
    """Return the error of a method of the task, or of the loss function of a classification."""
    shapes = map_leaves(lambda tensor: list(tensor.shape), batch.content)
    rule = f"raised {cause(error)}; called with {batch.size} samples, {shapes}"
    if getattr(error, "obj", None) is model:
        rule += ". Several workers wrap the network: call it as model(…)"
    if isinstance(task, Classification):
        return DataError("loss.name", f"must be callable as (output, labels), but {rule}")
    return DataError("task", f"{method} {rule}")


def _try_methods(task: Task, forward: Any, model: nn.Module, batch: Batch) -> tuple[str, ...]:
    """Call the methods of the task with `forward`; see `try_task`."""
    device = next(leaves(batch.x)).device
    with preserve_model(model, device, task), torch.no_grad():
        model.eval()
        method, module = "training_loss", wrapped(model, forward.__call__)
        try:
            with torch.enable_grad():  # a loss may use torch.autograd.grad
                loss = task.training_loss(module, batch.content)
            require_scalar(loss)
            method = "validation_metrics"
            values = task.validation_metrics(forward, batch.content)
            return _metric_names(values, metric_of(task))
        except (DataError, JobError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise raised(task, error, batch, method, module) from error


def _metric_names(values: Any, metric: Metric) -> tuple[str, ...]:
    needed = dict.fromkeys(("loss", metric.name))
    if not isinstance(values, Mapping) or not needed.keys() <= values.keys():
        rule = f"must return a dict with {' and '.join(needed)}"
        found = list(values) if isinstance(values, Mapping) else _described(values)
        raise DataError("task", f"validation_metrics {rule}, not {found}")
    for name, value in values.items():
        if not isinstance(value, torch.Tensor) or value.shape != (2,):
            rule = "must return one value per sample, [samples]"
            raise DataError(
                "task", f"validation_metrics {rule}; for two samples {name} is {_described(value)}"
            )
    return tuple(values)


def _described(value: object) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"a tensor of shape {list(shape)}"


def check_loss(section: LossSection) -> list[Problem]:
    """Return the problems of the name, without calling the function."""
    if section.name == _CROSS_ENTROPY:
        return []
    return _check_name(section.name, "loss.name", _CROSS_ENTROPY, "package.module:function")


def _check_name(name: NameOrFunction, path: str, built_in: str, form: str) -> list[Problem]:
    if not is_function_name(name):
        hint = nearest(str(name), [built_in], cutoff=0.4)
        return [Problem(path, f"must be {built_in} or {form}", repr(name), hint)]
    try:
        resolve_function(name, path)
    except JobError as error:
        return error.problems
    return []


def _call_user_loss(function: Callable[..., Any], output: Tensor, labels: Tensor) -> Tensor:
    loss = function(output, labels)
    if isinstance(loss, torch.Tensor) and loss.dim() == 0:
        return loss
    rule = "must return the mean over the batch, a tensor without dimensions"
    raise JobError([Problem("loss.name", rule, f"returned {_described(loss)}")])
