"""A shard of the weights: some tensors of the model, with the optimizer's state for them.

A tensor is never cut, so that an optimizer that looks at a layer's tensor (LARS) does what it does
elsewhere. The tensors of a shard lie one after the other in a flat buffer, in the order of
their elements in memory: one message, or one copy, moves them all.

Settings of an update by one micro-batch, from the settings of a step of P (why: docs/async.md):

    lr, d    rate and decoupled weight decay of a step        t    mean staleness, in updates
    w, D     weights, and their change by the last update     m    momentum

    rate      lr / P; where the size of an update does not depend on the gradient's, lr / sqrt(P)
              and d / sqrt(P) (Krizhevsky; Malladi et al. 2022, arXiv 2205.10287), and with t > P
              also times sqrt(P / t). Zhang et al. 2016 (arXiv 1511.05950) divide by t, which cost
              more where staleness did no harm than it gained where it did.
    momentum  stays (Mitliagkas et al., Asynchrony Begets Momentum, 2016)
    weights   workers get w + (m + m^2 + ... + m^t) D (as DANA: Hakimi et al. 2019, arXiv
              1907.11612, with D in place of the optimizer's buffer)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from raytrain_opt.async_training.scheduler import EpochPhase
from raytrain_opt.config.updates import OptimizerSection
from raytrain_opt.errors import JobError, Problem
from raytrain_opt.optim.batched import divide_evenly
from raytrain_opt.optim.factory import build_optimizer
from raytrain_opt.optim.update import set_lr
from raytrain_opt.results import BufferUpdates
from raytrain_opt.train.state import (
    PackedTensor,
    TrainingState,
    optimizer_state_dict,
    to_cpu_state,
)

Group = dict[str, Any]
CONVERTED = ("lr_multiplier", "weight_decay")
# Settings that only Adam and its kin, RMSprop, Adagrad, Adadelta and Adafactor have.
_NORMALIZED = {"betas", "centered", "initial_accumulator_value", "rho", "beta2_decay"}


def convert(group: Group, micro_batches: int) -> Group:
    """Return the settings that change, for a parameter group of any optimizer."""
    if not _is_normalized(group):
        return {"lr_multiplier": group.get("lr_multiplier", 1.0) / micro_batches}
    factor = micro_batches**-0.5
    changes = {"lr_multiplier": group.get("lr_multiplier", 1.0) * factor}
    if group.get("decoupled_weight_decay") or {"use_muon", "beta2_decay"} & group.keys():
        changes["weight_decay"] = group["weight_decay"] * factor
    return changes


def stale_lr_factor(micro_batches: int, staleness: float) -> float:
    """Return the factor of the rate while gradients are on average this stale."""
    return 1.0 if staleness <= micro_batches else math.sqrt(micro_batches / staleness)


def look_ahead(group: Group, staleness: float) -> float:
    """Return m + m^2 + ... + m^t for the group's momentum; 0 without momentum."""
    if "weight_lr_power" in group:  # schedule-free: its beta is a place between two averages
        return 0.0
    momentum: float = group.get("momentum") or group.get("betas", (0.0,))[0]
    if group.get("aux") == "adamw" and not group["use_muon"]:
        momentum = group["betas"][0]
    return float(momentum * (1 - momentum**staleness) / (1 - momentum))


def _is_normalized(group: Group) -> bool:
    """Return whether the size of an update does not depend on the gradient's size."""
    if "use_muon" in group:
        return bool(group["use_muon"] or group["aux"] == "adamw")
    return bool(_NORMALIZED & group.keys() or group.get("adapt"))


# Weight of a gradient in the running mean of the staleness, which counts about twenty of them.
_STALENESS_WEIGHT = 0.05
_WIRE_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16}

# A flat tensor as bytes, in the type in which it is sent.
WireArray = npt.NDArray[np.uint8]


def shard_parameters(model: nn.Module, shards: int) -> list[list[nn.Parameter]]:
    """Split the parameters into parts of about equal size, the same in every process.

    Raises JobError when they are not all of one type.
    """
    parameters = list(model.parameters())
    if len(dtypes := sorted({str(p.dtype).removeprefix("torch.") for p in parameters})) > 1:
        rule = f"async keeps weights of one type; this model has {' and '.join(dtypes)}"
        raise JobError([Problem("parallel.mode", rule, "async")])
    parts = divide_evenly([p.numel() for p in parameters], shards)
    return [[parameters[index] for index in part] for part in parts]


def flatten(parameters: Sequence[nn.Parameter]) -> tuple[Tensor, Tensor]:
    """Make parameters and gradients views of two buffers; values and strides stay as they are."""
    first = parameters[0] if parameters else torch.empty(0)
    sizes = [parameter.numel() for parameter in parameters]
    weights = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
    gradients = torch.zeros_like(weights)
    parts = zip(
        parameters, torch.split(weights, sizes), torch.split(gradients, sizes), strict=True
    )
    for parameter, weight, gradient in parts:
        layout = parameter.shape, parameter.stride()
        parameter.data = weight.as_strided(*layout).copy_(parameter.detach())
        parameter.grad = gradient.as_strided(*layout) if parameter.requires_grad else None
    return weights, gradients


def wire_dtype(compression: str, weights: torch.dtype) -> torch.dtype:
    """Return the type in which gradients are sent; weights travel in their own type."""
    return _WIRE_DTYPE.get(compression, weights)


def to_wire(flat: Tensor, dtype: torch.dtype) -> WireArray:
    """Return a flat tensor as bytes, in memory of its own."""
    return flat.detach().to("cpu", dtype, copy=True).view(torch.uint8).numpy()


def from_wire(wire: WireArray, dtype: torch.dtype) -> Tensor:
    """Return a flat tensor over the same memory, which may be shared: never write to it."""
    name = str(dtype).removeprefix("torch.")
    return PackedTensor(wire, (wire.nbytes // dtype.itemsize,), name, (1,)).tensor()


@dataclass(frozen=True)
class Weights:
    """The weights of all shards as flat tensors, and the smallest of the shards' versions."""

    version: int
    parts: tuple[Tensor, ...]


class WeightShard:
    """Part `index` of `shard_parameters`: applies gradients as they arrive, gives weights.

    The model belongs to it; its other parameters are emptied, and optimizers skip them.
    """

    def __init__(
        self,
        optimizer: OptimizerSection,
        model: nn.Module,
        index: int,
        shards: int,
        updates_per_epoch: int,
    ) -> None:
        self.parameters = shard_parameters(model, shards)[index]
        self.optimizer = build_optimizer(optimizer, model, steps_per_epoch=updates_per_epoch)
        own = {id(p) for p in self.parameters}
        for parameter in model.parameters():
            if id(parameter) not in own:
                parameter.data = parameter.data.new_empty(0)
        named = model.state_dict(keep_vars=True)
        # All names of a tensor that several layers share.
        self._named = {name: p for name, p in named.items() if id(p) in own}
        # The numbers of the parameters in the optimizer's `state_dict`.
        numbered = [p for group in self.optimizer.param_groups for p in group["params"]]
        self._own_indices = {i for i, p in enumerate(numbered) if id(p) in own}
        self.weights, self._gradient = flatten(self.parameters)
        self._last_change = torch.zeros_like(self.weights)
        self._mean_staleness = 0.0
        self._applied: set[int] = set()

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.dtype

    @property
    def version(self) -> int:
        return len(self._applied)

    def load(self, state: TrainingState, phase: EpochPhase) -> None:
        """Begin a phase from this state of the training."""
        with torch.no_grad():
            for name, parameter in self._named.items():
                parameter.copy_(state.tensors[f"model.{name}"].tensor())
        self.optimizer.load_state_dict(optimizer_state_dict(self._own(state)))
        self._loaded_groups = state.param_groups
        for group in self.optimizer.param_groups:
            group |= convert(group, phase.micro_batches)
            if "weight_decay" in group:
                group["weight_decay"] *= phase.steps.weight_decay_factor
        self.phase, self._applied = phase, set[int]()
        self._last_change.zero_()

    def _own(self, state: TrainingState) -> TrainingState:
        """Return the part of a state that this shard's optimizer needs."""
        own = {
            name: tensor
            for name, tensor in state.tensors.items()
            if name.startswith("optimizer.") and int(name.split(".")[1]) in self._own_indices
        }
        others = {i: value for i, value in state.optimizer_state.items() if i in self._own_indices}
        return replace(state, tensors=own, optimizer_state=others)

    def apply(self, number: int, version: int, gradient: Tensor) -> int:
        """Update the weights by the flat gradient of a micro-batch; return its staleness.

        `version`: of the weights that it was computed on. A second gradient of a micro-batch, as
        of a worker in the place of one that died, changes nothing.
        """
        staleness = max(0, self.version - version)
        if number in self._applied:
            return staleness
        self._gradient.copy_(gradient)
        self._last_change.copy_(self.weights)
        per_step = self.phase.micro_batches
        lr = self.phase.steps.lrs[self.version // per_step]
        set_lr(self.optimizer, lr * stale_lr_factor(per_step, self._mean_staleness))
        self.optimizer.step()
        torch.sub(self.weights, self._last_change, out=self._last_change)
        self._mean_staleness += _STALENESS_WEIGHT * (staleness - self._mean_staleness)
        self._applied.add(number)
        return staleness

    def weights_ahead(self) -> Tensor:
        """Return the flat weights that workers compute on."""
        factors = {
            id(parameter): look_ahead(group, self._mean_staleness)
            for group in self.optimizer.param_groups
            for parameter in group["params"]
        }
        ahead, sizes = self.weights.clone(), [p.numel() for p in self.parameters]
        parts = zip(torch.split(ahead, sizes), torch.split(self._last_change, sizes), strict=True)
        for parameter, (part, change) in zip(self.parameters, parts, strict=True):
            part.add_(change, alpha=factors.get(id(parameter), 0.0))
        return ahead

    def state(self) -> TrainingState:
        """Return this shard's tensors and optimizer state, in memory of their own."""
        own, optimizer = self._named, self.optimizer.state_dict()
        groups = [
            {key: (loaded if key in CONVERTED else group)[key] for key in loaded}
            for group, loaded in zip(optimizer["param_groups"], self._loaded_groups, strict=True)
        ]
        return to_cpu_state(own, {**optimizer, "param_groups": groups}, {}, copy=True)


def assemble_state(
    start: TrainingState, parts: Sequence[TrainingState], buffers: Mapping[str, PackedTensor]
) -> TrainingState:
    """Return `start` with the shards' tensors and optimizer state, and updated buffers."""
    tensors = {n: packed for n, packed in start.tensors.items() if n.startswith("model.")}
    tensors |= {f"model.{name}": tensor for name, tensor in buffers.items()}
    optimizer_state: dict[int, object] = {}
    for part in parts:
        tensors |= part.tensors
        optimizer_state |= part.optimizer_state
    return replace(
        start,
        tensors=tensors,
        optimizer_state=dict(sorted(optimizer_state.items())),
        param_groups=parts[0].param_groups,
    )


def advance_buffers(
    start: TrainingState, workers: Sequence[BufferUpdates], updates: int
) -> dict[str, PackedTensor]:
    """Return the model's buffers by name after a phase of this many `updates`.

    Floating-point ones are means over the workers, weighted by their micro-batches.
    """
    active = [worker for worker in workers if worker.batches]
    total = sum(worker.batches for worker in active)
    fractions = [worker.batches / total for worker in active]
    counts = {f"{layer}.num_batches_tracked" for worker in workers for layer in worker.trained}
    buffers = {}
    for key, packed in start.tensors.items():
        name, before = key.removeprefix("model."), packed.tensor()
        if active and name in active[0].values:
            mean = np.tensordot(fractions, [worker.values[name] for worker in active], 1)
            after = torch.from_numpy(mean).to(before.dtype)
            buffers[name] = PackedTensor.from_tensor(after.reshape(before.shape), copy=True)
        elif name in counts:
            buffers[name] = PackedTensor.from_tensor(before + updates, copy=True)
    return buffers
