"""A shard of the weights: some tensors of the model, with the optimiser's state for them.

Shards are cut at whole tensors, so that an optimiser which looks at a whole layer (LARS) does what
it does elsewhere. The tensors of a shard lie one after the other in a flat buffer, in the order of
their elements in memory: one message, or one copy, moves them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from raytrain_opt.config.schema import Job
from raytrain_opt.errors import JobError, Problem
from raytrain_opt.optim.build import build_optimizer, set_lr, set_weight_decays, weight_decays
from raytrain_opt.train.share_clock import Update
from raytrain_opt.train.state import HostState, HostTensor, optimizer_state_dict, to_host

_WIRE_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16}

# Tensors on the wire: flat, of any type that gradients are sent in, as bytes.
Wire = npt.NDArray[np.uint8]


def split_parameters(model: nn.Module, shards: int) -> list[list[nn.Parameter]]:
    """The parameters in `shards` parts of about as many bytes, the same in every process that
    builds the same model. The largest are given out first, each to the smallest part.

    Raises JobError when they are not all of one type.
    """
    parameters = list(model.parameters())
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in parameters})
    if len(dtypes) > 1:
        rule = f"async keeps weights of one type; this model has {' and '.join(dtypes)}"
        raise JobError([Problem("parallel.mode", rule, "async")])
    sizes = [0] * shards
    parts: list[list[int]] = [[] for _ in range(shards)]
    for index in sorted(range(len(parameters)), key=lambda i: -parameters[i].numel()):
        smallest = sizes.index(min(sizes))
        sizes[smallest] += parameters[index].numel()
        parts[smallest].append(index)
    return [[parameters[index] for index in sorted(part)] for part in parts]


class Flat:
    """Tensors as views of one buffer, each laid out in memory as one of `like`."""

    def __init__(self, like: Sequence[Tensor]) -> None:
        first = like[0] if like else torch.empty(0)
        size = sum(tensor.numel() for tensor in like)
        self.buffer = torch.zeros(size, dtype=first.dtype, device=first.device)
        parts = torch.split(self.buffer, [tensor.numel() for tensor in like]) if like else ()
        self.views = [_laid_out(part, as_) for part, as_ in zip(parts, like, strict=True)]


def _laid_out(flat: Tensor, like: Tensor) -> Tensor:
    order = sorted(range(like.dim()), key=like.stride, reverse=True)
    back = [order.index(d) for d in range(like.dim())]
    return flat.view([like.shape[d] for d in order]).permute(back)


def move_into(flat: Flat, parameters: Sequence[nn.Parameter]) -> None:
    """Let the parameters be the views, with the values they have."""
    for parameter, view in zip(parameters, flat.views, strict=True):
        view.copy_(parameter.detach())
        parameter.data = view


def wire_dtype(compression: str, weights: torch.dtype) -> torch.dtype:
    """In which gradients are sent, and weights are not."""
    return _WIRE_DTYPE.get(compression, weights)


def to_wire(flat: Tensor, dtype: torch.dtype) -> Wire:
    """In memory of its own."""
    sent = flat.detach().to(dtype).cpu()
    own = sent.clone() if sent.data_ptr() == flat.data_ptr() else sent
    return own.view(torch.uint8).numpy()


def from_wire(wire: Wire, dtype: torch.dtype) -> Tensor:
    """Over the same memory. Never write to it: it may be shared."""
    return HostTensor(wire, (wire.nbytes // dtype.itemsize,), _name(dtype), "contiguous").tensor()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Weights:
    """Those of all shards as flat tensors; `version`: the smallest of theirs."""

    version: int
    parts: tuple[Tensor, ...]


class Shard:
    """One part of the weights: takes gradients, applies updates, gives weights.

    It is built from the whole model, whose other parameters are then emptied: they have no
    gradient, and optimisers pass over such.
    """

    def __init__(
        self, job: Job, model: nn.Module, index: int, shards: int, steps_per_epoch: int
    ) -> None:
        """Part `index` of `split_parameters`. The model belongs to the shard from here on."""
        self.version = 0
        self.parameters = split_parameters(model, shards)[index]
        self.optimizer = build_optimizer(job.optimizer, model, steps_per_epoch=steps_per_epoch)
        self._decays = weight_decays(self.optimizer)
        own = {id(p) for p in self.parameters}
        _empty(p for p in model.parameters() if id(p) not in own)
        named = model.state_dict(keep_vars=True)
        self._named = {name: p for name, p in named.items() if id(p) in own}  # shared ones too
        self._own_indices = {i for i, p in enumerate(_in_groups(self.optimizer)) if id(p) in own}
        self.weights, self._gradient = Flat(self.parameters), Flat(self.parameters)
        move_into(self.weights, self.parameters)
        self._gradients: dict[int, Tensor] = {}
        self.lost = 0

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.weights.buffer.dtype

    def load(self, state: HostState, decay: float = 1.0, version: int = 0) -> None:
        """Own tensors and their optimiser's state, of a state of the whole training or a part of
        it; version 0 of a new phase, with `decay` times the weight decay.
        """
        with torch.no_grad():
            for name, parameter in self._named.items():
                parameter.copy_(state.tensors[f"model.{name}"].tensor())
        self.optimizer.load_state_dict(optimizer_state_dict(self._own(state)))
        set_weight_decays(self.optimizer, [decay * each for each in self._decays])
        self._gradients.clear()
        self.version, self.lost = version, 0

    def _own(self, state: HostState) -> HostState:
        """Its part for the optimiser."""
        mine = {
            name: tensor
            for name, tensor in state.tensors.items()
            if name.startswith("optimizer.") and int(name.split(".")[1]) in self._own_indices
        }
        plain = {
            index: values
            for index, values in state.plain["optimizer_state"].items()
            if index in self._own_indices
        }
        return HostState(mine, {**state.plain, "optimizer_state": plain})

    def add(self, share: int, gradient: Tensor) -> None:
        """The flat gradient of a share, which an update will name."""
        self._gradients[share] = gradient

    def apply(self, update: Update) -> None:
        """The optimiser's step on the weighted sum of the update's gradients. One that was done
        before changes nothing; gradients that died with this shard are missing in the sum.
        """
        if update.number < self.version:
            return
        self._gradient.buffer.zero_()
        for share, weight in update.weights:
            gradient = self._gradients.pop(share, None)
            if gradient is None:
                self.lost += 1
            else:
                self._gradient.buffer.add_(gradient, alpha=weight)
        for parameter, view in zip(self.parameters, self._gradient.views, strict=True):
            parameter.grad = view if parameter.requires_grad else None
        set_lr(self.optimizer, update.lr)
        self.optimizer.step()
        self.version = update.number + 1

    def state(self) -> HostState:
        """Own tensors and their optimiser's state, in memory of their own."""
        own = {name: parameter.data for name, parameter in self._named.items()}
        return to_host(own, self.optimizer.state_dict(), {}, copy=True)


def _empty(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.data = parameter.data.new_empty(0)


def _in_groups(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """In the order of the numbers that `state_dict` gives them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def joined(
    start: HostState, parts: Sequence[HostState], buffers: Mapping[str, HostTensor]
) -> HostState:
    """The state of the whole training, from those of all shards and the buffers that moved since
    the phase began at `start`.
    """
    tensors = {name: at for name, at in start.tensors.items() if name.startswith("model.")}
    tensors |= {f"model.{name}": tensor for name, tensor in buffers.items()}
    optimizer_state: dict[int, object] = {}
    for part in parts:
        tensors |= part.tensors
        optimizer_state |= part.plain["optimizer_state"]
    plain = {
        "optimizer_state": dict(sorted(optimizer_state.items())),
        "param_groups": parts[0].plain["param_groups"],
        "scaler": start.plain["scaler"],
    }
    return HostState(tensors, plain)
