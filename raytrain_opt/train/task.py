"""What a training minimizes and measures: classification, or a task of the user's own.

A task has two methods, the attributes `metric` and `higher_is_better` and perhaps `aggregate`, for
metrics of a whole set: see docs/tasks.md.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from traceback import extract_tb
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map

from raytrain_opt.config.error_messages import nearest
from raytrain_opt.config.load import resolve_function
from raytrain_opt.config.schema import CLASSIFICATION, CROSS_ENTROPY, LossSection, TaskSection
from raytrain_opt.config.section import Instance, NameOrFunction, is_function_name
from raytrain_opt.data.base import Batch, DataInfo
from raytrain_opt.data.batch_reader import cause
from raytrain_opt.data.nesting import leaves, map_leaves
from raytrain_opt.errors import DataError, JobError, Problem, problems_of
from raytrain_opt.models.factory import preserve_model
from raytrain_opt.results import Metric


class Task(Protocol):
    """The two methods of a task. `batch`: as the Datasets' samples are, stacked; else (x, y)."""

    def training_loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss over the samples of the batch, []."""

    def validation_metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        """Return `loss` and any other metrics of each sample, [samples] each.

        With `aggregate`, others are its inputs: tensors [samples, ...], or lists of any values.
        """


class Classification:
    """The built-in task: one label per sample; the accuracy decides."""

    metric = "accuracy"

    def __init__(
        self,
        section: LossSection,
        class_weights: Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._class_weights = class_weights
        own = None if section.is_cross_entropy else _user_loss(section.name, device)
        self.loss: Callable[..., Tensor] = (
            partial(functional.cross_entropy, label_smoothing=section.label_smoothing)
            if own is None
            else partial(_call_user_loss, own)
        )
        plain = partial(self.loss, reduction="none")
        self._of_each = plain if own is None else loss_of_each(own)
        self.gives_batch_means = self._of_each is None

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
        """Return loss (of a loss of the user's own, the batch's mean), accuracy and top-5."""
        x, labels = batch
        output = model(x)
        is_right = output.argmax(dim=1) == labels
        hits = output.topk(min(5, output.shape[1]), dim=1).indices == labels.unsqueeze(1)
        loss = self.loss(output, labels) if self._of_each is None else self._losses(output, labels)
        losses = loss if loss.dim() else loss.expand(len(labels))
        return {"loss": losses, "accuracy": is_right, "top5": hits.any(dim=1) | is_right}

    def _mean_loss(self, output: Tensor, labels: Tensor) -> Tensor:
        # torch divides by the weights of the batch: then micro-batches would count differently.
        weighted = self._class_weights is not None
        return self._losses(output, labels).mean() if weighted else self.loss(output, labels)

    def _losses(self, output: Tensor, labels: Tensor) -> Tensor:
        assert self._of_each is not None
        losses = self._of_each(output, labels)
        return losses if self._class_weights is None else losses * self._class_weights[labels]


def check_task(section: TaskSection) -> list[Problem]:
    """Return the problems of the section without creating the task."""
    name = section.name
    if section.is_classification:
        rule = "classification has none; its loss is chosen in the section loss"
        return [Problem("task.args", rule)] if section.args else []
    if problems := _check_name(name, "task.name", CLASSIFICATION, "package.module:Class"):
        return problems
    task: Any = resolve_function(name, "task.name")
    task = task.value if isinstance(task, Instance) else task
    methods = ("training_loss", "validation_metrics")
    missing = [m for m in methods if not hasattr(task, m)]
    rule = f"must be a class or object with the methods {' and '.join(methods)}(model, batch)"
    return [Problem("task.name", rule, f"without {', '.join(missing)}")] if missing else []


def build_task(
    section: TaskSection, loss: LossSection, info: DataInfo, device: torch.device | str = "cpu"
) -> Task:
    """Create the task that `check_task` accepts. Raises JobError for its arguments."""
    if section.is_classification:
        return Classification(loss, _class_weights(loss, info, device), device)
    try:
        task: Task = resolve_function(section.name, "task.name")(**section.args)
    except Exception as error:
        rule = f"raised {type(error).__name__}: {error}"
        raise JobError([Problem("task.args", rule, repr(section.args))]) from error
    return task


def _class_weights(
    section: LossSection, info: DataInfo, device: torch.device | str
) -> Tensor | None:
    """Return `loss.class_weights`, [num_classes]; raises JobError."""
    if (weights := section.class_weights) is None:
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
    """Return the metric that decides; without one, the loss does. Raises DataError."""
    name = getattr(task, "metric", None) or "loss"
    higher = getattr(task, "higher_is_better", name != "loss")
    if not isinstance(name, str) or not isinstance(higher, bool):
        rule = "metric must be the name of a metric, and higher_is_better True or False"
        raise DataError("task", f"{rule}, not {name!r} and {higher!r}")
    return Metric(name, higher)


def aggregates(task: Task) -> bool:
    """Return whether the task computes metrics of a whole set from the outputs of all samples."""
    return getattr(task, "aggregate", None) is not None


def keep_outputs(outputs: dict[str, list[Any]], values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        outputs.setdefault(name, []).append(tree_map(on_cpu, value))


def aggregate(task: Any, parts: Sequence[Mapping[str, list[Any]]]) -> dict[str, float]:
    """Return the task's metrics of a whole set; `parts`: the outputs of each rank, by batch.

    Raises DataError if it raises, or returns something else than numbers.
    """
    batches: dict[str, list[Any]] = {}
    for part in parts:
        for name, of_rank in part.items():
            batches.setdefault(name, []).extend(of_rank)
    try:
        outputs = {name: _join(name, values) for name, values in batches.items()}
        if hasattr(task.aggregate, "compute"):
            update = {"args": (outputs["preds"], outputs["target"]), "kwargs": {}}
            values = compute_metric(task.aggregate, [update])
        else:
            values = task.aggregate(outputs)
        metrics = {name: float(value) for name, value in values.items()}
    except DataError:
        raise
    except Exception as error:
        raise DataError("task", f"aggregate raised {cause(error)}") from error
    if "loss" in metrics:
        rule = "aggregate must not return loss, which is the mean over the samples"
        raise DataError("task", f"{rule}; give its own another name")
    if (name := metric_of(task).name) not in ("loss", *metrics):
        raise DataError("task", f"aggregate must return the metric {name}, not {list(metrics)}")
    return metrics


def _join(name: str, batches: list[Any]) -> Any:
    if isinstance(batches[0], list):
        return list(chain.from_iterable(batches))
    if len(shapes := sorted({tuple(batch.shape[1:]) for batch in batches})) > 1:
        rule = f"{name} has shapes {shapes[0]} and {shapes[-1]} in two batches, without the first"
        hint = f"axis; return a list with the values of each sample: list({name})"
        raise DataError("task", f"aggregate gets all outputs as one tensor, but {rule} {hint}")
    return torch.cat(batches)


def fresh_metric(metric: Any) -> Any:
    """Return a copy of a Metric or MetricCollection, on the CPU and without state."""
    fresh = copy.deepcopy(metric).cpu()
    fresh.reset()
    return fresh


def compute_metric(metric: Any, updates: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the numbers that a Metric or MetricCollection of torchmetrics computes.

    updates: `args` and `kwargs` of each call of `update`, of all ranks.
    """
    from torchmetrics import MetricCollection

    collection = fresh_metric(metric)
    if not isinstance(metric, MetricCollection):
        collection = MetricCollection([collection])
    for part in collection.values(copy_state=False):
        part.distributed_available_fn = lambda: False  # nothing is left to add
    for update in updates:
        collection.update(*update["args"], **update["kwargs"])
    return {n: v for n, v in collection.compute().items() if getattr(v, "ndim", 0) == 0}


def find_metric_names(task: Task, model: nn.Module, batch: Batch) -> tuple[str, ...]:
    """Evaluate a batch of samples once, and preserve model and task; see `evaluate_once`.

    Only `loss` if the task aggregates the others. Raises DataError for mistakes in `aggregate`.
    """
    with preserve_model(model, next(leaves(batch.x)).device, task):
        values = evaluate_once(task, model, batch)
        if not aggregates(task):
            return tuple(values)
        outputs: dict[str, list[Any]] = {}
        keep_outputs(outputs, values)
        try:
            with warnings.catch_warnings(action="ignore"):
                aggregate(task, [outputs])
        except DataError as error:
            # Two samples may be too few for a metric, which no mistake of these kinds explains.
            mistakes = (TypeError, LookupError, AttributeError, NameError, ImportError)
            if error.__cause__ is None or isinstance(error.__cause__, mistakes):
                raise
        return ("loss",)


def evaluate_once(task: Task, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return the task's metrics of a batch in evaluation mode. Raises DataError."""
    model.eval()
    try:
        with torch.no_grad():
            values = task.validation_metrics(model, batch.content)
    except Exception as error:
        raise explained(task, error, batch, "validation_metrics", model) from error
    names = ("loss",) if aggregates(task) else ("loss", metric_of(task).name)
    return checked_metrics(task, values, batch.size, names)


def checked_metrics(
    task: Task, values: object, samples: int, names: Iterable[str]
) -> dict[str, Any]:
    """Return the metrics of a batch. Raises DataError unless `names` are among them.

    Each has one value per sample; what the task aggregates may also be a list of these.
    """
    needed, is_dict = dict.fromkeys(names), isinstance(values, Mapping)
    found: dict[Any, Any] = dict(values) if isinstance(values, Mapping) else {}
    if not (needed.keys() <= found.keys() and all(isinstance(name, str) for name in found)):
        rule = f"must return a dict with {' and '.join(needed)}"
        shown = list(found) if is_dict else _described(values)
        raise DataError("task", f"validation_metrics {rule}, not {shown}")
    for name, value in found.items():
        shape = value.shape if isinstance(value, torch.Tensor) else None
        if aggregates(task) and name != "loss":
            shape = torch.Size([len(value)]) if isinstance(value, list) else shape and shape[:1]
        if shape != (samples,):
            rule = f"must return one value per sample; for {samples} samples {name} is"
            raise DataError("task", f"validation_metrics {rule} {_described(value)}")
    return found


def count_flops(task: Task, model: nn.Module, batch: Batch) -> float:
    """Return the operations of one sample's training, 2 for each product; changes nothing.

    The backward pass counts twice the forward pass. Infinite where torch does not count: fused
    operations of recurrent layers, and derivatives within the loss.
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


def on_cpu(leaf: Any) -> Any:
    """Return a tensor on the CPU, of 16 bits as float32, which numpy and all metrics take."""
    if not isinstance(leaf, Tensor):
        return leaf
    leaf = leaf.detach().cpu()
    return leaf.float() if leaf.dtype in (torch.bfloat16, torch.float16) else leaf


def require_scalar(loss: object) -> None:
    if not isinstance(loss, torch.Tensor) or loss.dim():
        rule = "must return the mean over the batch, a tensor without dimensions"
        raise DataError("task", f"training_loss {rule}, not {_described(loss)}")


def explained(
    task: Task, error: Exception, batch: Batch, method: str, model: nn.Module
) -> Exception:
    """Return the error to raise where a method of the task raised `error` for a batch."""
    if isinstance(error, DataError | JobError | torch.OutOfMemoryError):
        return error
    shapes = map_leaves(lambda tensor: list(tensor.shape), batch.content)
    rule = f"raised {cause(error)}; called with {batch.size} samples, {shapes}"
    if getattr(error, "obj", None) is model:
        rule += ". Several workers wrap the network: call it as model(…)"
    if not isinstance(task, Classification):
        return DataError("task", f"{method} {rule}")
    if any(frame.name == _call_user_loss.__name__ for frame in extract_tb(error.__traceback__)):
        return DataError("loss.name", f"must be callable as (output, labels), but {rule}")
    mode = "training" if model.training else "evaluation"
    return DataError("model", f"its forward in {mode} mode {rule}")


def _described(value: object) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"a tensor of shape {list(shape)}"


def check_loss(section: LossSection) -> list[Problem]:
    if section.is_cross_entropy:
        return []
    form = "package.module:function"
    if problems := _check_name(section.name, "loss.name", CROSS_ENTROPY, form):
        return problems
    loss: Any = resolve_function(section.name, "loss.name")
    loss = loss.value if isinstance(loss, Instance) else loss
    is_weighted = getattr(loss, "weight", None) is not None
    ignores = getattr(loss, "ignore_index", -1) >= 0  # labels are not negative
    if _is_torchs(loss) and (is_weighted or ignores or loss.reduction != "mean"):
        rule = "must be the mean over samples that count alike, for any size of micro-batches"
        hint = 'write reduction="mean", weights as loss.class_weights of cross_entropy, and '
        hint += "leave samples to ignore out of the data"
        return [Problem("loss.name", rule, repr(loss), hint)]
    return []


def _check_name(name: NameOrFunction, path: str, built_in: str, form: str) -> list[Problem]:
    if not is_function_name(name):
        hint = nearest(str(name), [built_in])
        return [Problem(path, f"must be {built_in} or {form}", repr(name), hint)]
    return problems_of(lambda: resolve_function(name, path))


def _user_loss(name: NameOrFunction, device: torch.device | str) -> Callable[..., Any]:
    if not isinstance(function := resolve_function(name, "loss.name"), Instance):
        return function
    loss = function()
    return loss.to(device) if isinstance(loss, nn.Module) else loss


def loss_of_each(loss: Any) -> Callable[..., Tensor] | None:
    """Return the losses of each sample, as torch's own losses give them; None for others."""
    if _is_torchs(loss):
        loss = copy.copy(loss)
        loss.reduction = "none"
        return cast(Callable[..., Tensor], loss)
    is_function = getattr(loss, "__module__", "") == functional.__name__
    return partial(loss, reduction="none") if is_function else None


def _is_torchs(loss: object) -> bool:
    return type(loss).__module__ == nn.modules.loss.__name__


def _call_user_loss(function: Callable[..., Any], output: Tensor, labels: Tensor) -> Tensor:
    loss = function(output, labels)
    if isinstance(loss, torch.Tensor) and loss.dim() == 0:
        return loss
    rule = "must return the mean over the batch, a tensor without dimensions"
    raise JobError([Problem("loss.name", rule, f"returned {_described(loss)}")])
