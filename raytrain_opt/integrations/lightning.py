"""Train a LightningModule: its steps, its logged metrics, the Datasets of its loaders.

The network is the module itself, of a class that derives from its own. Several workers wrap a
network, so its steps are called within `forward`, as Lightning's strategies do. What is logged in
`validation_step` becomes a metric: means over batches weigh by their samples, as in Lightning, and
objects of torchmetrics are updated again with the inputs of all batches of all ranks.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import Any, ClassVar, cast

from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from raytrain_opt.config.schema import Job
from raytrain_opt.errors import DataError
from raytrain_opt.integrations.common import collated, of_each, refuse
from raytrain_opt.train.task import compute_metric, fresh_metric, on_cpu

# Orders that the job's own replaces.
_SAMPLERS = (RandomSampler, SequentialSampler, BatchSampler, type(None))
_STEPS = ("training_step", "validation_step")
# Methods beside those with on_ that the Trainer would call.
_UNCALLED = (
    "backward", "configure_callbacks", "configure_gradient_clipping", "configure_model",
    "lr_scheduler_step", "optimizer_step", "optimizer_zero_grad", "transfer_batch_to_device",
)  # fmt: skip
# Called by nobody here, and harmless: for tests, predictions and Lightning's own checkpoints.
_HARMLESS = ("on_test_", "on_predict_", "on_save_checkpoint", "on_load_checkpoint")


def from_module(
    module: Any,
    datamodule: Any = None,
    *,
    monitor: str = "loss",
    mode: str | None = None,
    **fields: Any,
) -> Job:
    """Return the job that trains a LightningModule.

    datamodule: default is the module itself, with its `train_dataloader` and `val_dataloader`.
    monitor: logged metric that decides which epoch is best, as for Lightning's ModelCheckpoint.
    mode: min or max; needed for names without "loss".
    fields: of the job, of `data` those beside the Datasets. Default batch size: the loader's.

    `configure_optimizers` is not called: the job chooses the optimizer, or names one.
    Raises JobError for what would be ignored: manual optimization, hooks, several loaders.
    """
    source = datamodule or module
    problems = [*_ignored(module), *(_ignored(datamodule) if datamodule else ())]
    if mode not in ("min", "max") and (mode or "loss" not in monitor):
        problems.append(("mode", f"says which values of {monitor} are better", "give min or max"))
    refuse(problems, "from_module")
    for owner in filter(None, (datamodule, module)):
        owner.prepare_data()
        owner.setup("fit")
    train, test = (getattr(source, f"{name}_dataloader")() for name in ("train", "val"))
    refuse([*_unusable("train", train), *_unusable("val", test)], "from_module")
    sets = tuple(collated(loader.dataset, loader.collate_fn) for loader in (train, test))
    loader = {"loader_workers": train.num_workers, "drop_last": train.drop_last}
    fields["data"] = {"name": sets, **loader, **fields.get("data", {})}
    defaults: dict[str, Any] = {
        "model": _network(module),
        "task": LightningTask(monitor, mode or "min"),
    }
    if train.batch_size is not None:
        defaults["global_batch_size"] = train.batch_size
    return Job.model_validate(defaults | fields)


class LightningTask:
    """A task that calls the steps of a `Network`."""

    gives_batch_means: ClassVar[bool] = True

    def __init__(self, monitor: str, mode: str) -> None:
        self.metric, self.higher_is_better = monitor, mode == "max"

    def training_loss(self, model: Any, batch: Any) -> Tensor:
        """Return what `training_step` returns."""
        output = model("training_step", batch[0])
        loss: Tensor = output["loss"] if isinstance(output, Mapping) else output
        return loss

    def validation_metrics(self, model: Any, batch: Any) -> dict[str, Any]:
        """Return what `validation_step` returns and logs, for each sample.

        In place of a Metric, an empty one and the inputs of its updates, at the first sample.
        """
        content, ones = batch
        output = model("validation_step", content)
        logged, updates = model.logged
        values = {
            name: [(fresh_metric(value), updates[id(value)]), *[None] * (len(ones) - 1)]
            if hasattr(value, "compute")
            else of_each(value, ones)
            for name, value in logged.items()
        }
        return {**values, "loss": of_each(self._loss(output, logged), ones)}

    def _loss(self, output: Any, logged: Mapping[str, Any]) -> Any:
        """Return the loss: the monitored one, else the returned one, else the logged one."""
        losses = {n: v for n, v in logged.items() if "loss" in n and not hasattr(v, "compute")}
        if self.metric in losses and not self.higher_is_better:
            return losses[self.metric]
        if isinstance(output, Mapping):
            output = output.get("loss")
        if isinstance(output, float) or (isinstance(output, Tensor) and output.dim() == 0):
            return output
        if "val_loss" in losses or len(losses) == 1:
            return losses.get("val_loss", next(iter(losses.values())))
        rule = f"returns no loss and logs {' and '.join(losses) or 'none'}; return or monitor one"
        raise DataError("task", f"validation_step {rule}, or log val_loss")

    def aggregate(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the logged metrics of all samples."""
        result: dict[str, Any] = {}
        for name, values in outputs.items():
            if name == "loss":
                continue
            if isinstance(values, Tensor):
                result[name] = values.double().mean()
                continue
            batches = [of_batch for of_batch in values if of_batch is not None]
            metric, updates = batches[0][0], [u for _, of_batch in batches for u in of_batch]
            if not updates:  # of a MetricCollection, or made of other metrics
                rule = f"validation_step logs {name}, a metric that it does not update itself"
                raise DataError("task", f"{rule}; log the MetricCollection, or each part of a sum")
            computed = compute_metric(metric, updates)
            is_one = len(computed) == 1 and not isinstance(metric, nn.ModuleDict)
            result |= {name: next(iter(computed.values()))} if is_one else computed
        return result


class Network:
    """The part of a module's class that calls its steps, and keeps what they log."""

    modules: Callable[[], Iterator[nn.Module]]
    get_submodule: Callable[[str], nn.Module]
    kept_in_eval: list[str]  # names

    @property
    def current_epoch(self) -> int:
        """Unknown here, where Lightning would return 0 without a Trainer. Raises DataError."""
        rule = "uses current_epoch or global_step, of which a candidate's short schedule has none"
        raise DataError("task", f"{type(self).__name__} {rule}; count steps in a buffer")

    global_step = current_epoch

    def train(self, mode: bool = True) -> Any:
        """Set the mode; as in Lightning, modules that were in eval mode at first stay in it."""
        super().train(mode)  # type: ignore[misc]
        for module in map(self.get_submodule, self.kept_in_eval):
            module.training = False
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call a step, if the first argument names one, else the module's own forward."""
        if not args or not isinstance(args[0], str) or args[0] not in _STEPS:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        name, batch = args
        step = getattr(self, name)
        spec = inspect.getfullargspec(step)
        index = (0,) if spec.varargs or len(spec.args) > 2 else ()  # as in Lightning's Trainer
        self.logged: tuple[dict[str, Any], dict[int, list[Any]]] = {}, {}
        metrics = [m for m in self.modules() if hasattr(m, "compute") and hasattr(m, "update")]
        for metric in metrics:
            metric.reset()  # type: ignore[operator]
        if name == "training_step":
            return step(batch, *index)
        with _recorded(metrics, self.logged[1]):
            return step(batch, *index)

    def log(self, name: str, value: Any, *_: Any, **options: Any) -> None:
        """Keep a value that `validation_step` logs; other options than the mean are refused."""
        if options.get("reduce_fx", "mean") != "mean":
            raise DataError("task", f"self.log({name!r}) has reduce_fx; only the mean is computed")
        self.logged[0][name] = value

    def log_dict(self, dictionary: Any, *_: Any, **options: Any) -> None:
        """Keep several values; a MetricCollection as one."""
        values = {"metrics": dictionary} if hasattr(dictionary, "compute") else dictionary
        for name, value in values.items():
            self.log(name, value, **options)


def _network(module: nn.Module) -> nn.Module:
    """Return a module with the same parts, whose class also is a `Network`."""
    network, kind = copy.copy(module), type(module)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    network.__class__ = type(kind.__name__, (Network, kind), names)
    vars(network)["kept_in_eval"] = [n for n, part in module.named_modules() if not part.training]
    return network


@contextmanager
def _recorded(metrics: list[Any], updates: dict[int, list[Any]]) -> Iterator[None]:
    """Record the inputs of metrics, by id; within a call, those that it makes do not count."""
    depth, methods = 0, [(metric, metric.update, metric.forward) for metric in metrics]

    def recording(method: Callable[..., Any], record: list[Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            if depth == 0:
                record.append(tree_map(on_cpu, {"args": args, "kwargs": kwargs}))
            depth += 1
            try:
                return method(*args, **kwargs)
            finally:
                depth -= 1

        return call

    for metric, update, forward in methods:
        record = updates.setdefault(id(metric), [])
        metric.update, metric.forward = recording(update, record), recording(forward, record)
    try:
        yield
    finally:
        for metric, update, _ in methods:
            metric.update = update
            del metric.forward


def _ignored(owner: Any) -> Iterator[tuple[str, str, str]]:
    """Yield what a module or datamodule defines and nobody here would call."""
    bases = ("LightningModule", "LightningDataModule")
    base = next((kind for kind in type(owner).__mro__ if kind.__name__ in bases), None)
    if base is None:
        yield "module", f"{type(owner).__name__} is none of {' and '.join(bases)}", ""
        return
    if not getattr(owner, "automatic_optimization", True):
        rule = "manual optimization makes its own steps, which no worker could share"
        yield "automatic_optimization", rule, "return the loss from training_step"
    for name in dir(base):
        is_hook = name in _UNCALLED or name.startswith("on_")
        own, original = (inspect.getattr_static(kind, name) for kind in (type(owner), base))
        if is_hook and own is not original and not name.startswith(_HARMLESS):
            rule = "is a hook of Lightning's Trainer, and nobody here calls it"
            yield name, rule, "do it in a step, or by a field of the job (docs/lightning.md)"


def _unusable(name: str, loader: Any) -> Iterator[tuple[str, str, str]]:
    name = f"{name}_dataloader"
    if not isinstance(loader, DataLoader):
        yield name, f"returns {type(loader).__name__}", "return one torch DataLoader"
    elif not isinstance(loader.dataset, IterableDataset):  # which is refused for itself
        inner = getattr(loader.batch_sampler, "sampler", None)
        for sampler in dict.fromkeys((loader.sampler, loader.batch_sampler, inner)):
            draws = getattr(sampler, "num_samples", size := len(cast(Sized, loader.dataset)))
            repeats = getattr(sampler, "replacement", False) or draws != size
            if type(sampler) not in _SAMPLERS or repeats:
                kind = type(sampler).__name__
                yield name, f"has a {kind}, which nobody here asks", "write data.sampler"
