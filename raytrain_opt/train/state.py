"""The state of a training as plain host memory: weights, buffers, optimiser, scaler.

`capture` gives arrays that Ray moves without pickling their contents and that all processes
of a node read in place; `restore` copies them into a live model and optimiser.

A tensor is kept in the order its elements have in memory, with the name of that order, so
that a channels_last weight is one contiguous block and neither side has to transpose it.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_LANES = 4
# Settings of an optimiser that training sets anew, before a step or a phase.
_SET_BY_THE_LOOP = ("lr", "weight_decay")
_TO_MEMORY_ORDER = {"channels_last": (0, 2, 3, 1), "channels_last_3d": (0, 2, 3, 4, 1)}
_TO_LOGICAL_ORDER = {"channels_last": (0, 3, 1, 2), "channels_last_3d": (0, 4, 1, 2, 3)}


@dataclass(frozen=True)
class HostTensor:
    """One tensor: its bytes in memory order, the shape of that order, and how to read it."""

    data: np.ndarray[Any, np.dtype[np.uint8]]
    shape: tuple[int, ...]
    dtype: str
    order: str

    @classmethod
    def of(cls, tensor: Tensor, copy: bool) -> HostTensor:
        """From a live tensor; on CPU without `copy` it shares the tensor's memory."""
        tensor, order = tensor.detach(), "contiguous"
        if not tensor.is_contiguous():
            if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
                order = "channels_last"
            elif tensor.dim() == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d):
                order = "channels_last_3d"
        if order in _TO_MEMORY_ORDER:
            tensor = tensor.permute(_TO_MEMORY_ORDER[order])
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        flat = tensor.contiguous().reshape(-1).view(torch.uint8).cpu()
        if copy and flat.data_ptr() == tensor.data_ptr():
            flat = flat.clone()
        return cls(flat.numpy(), shape, dtype, order)

    def tensor(self) -> Tensor:
        """As a tensor over the same memory. Never write to it: it may be shared."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            flat = torch.from_numpy(self.data)
        dtype: torch.dtype = getattr(torch, self.dtype)
        # Memory of no bytes cannot be viewed as another type.
        values = flat.view(dtype) if self.data.size else torch.empty(0, dtype=dtype)
        tensor = values.reshape(self.shape)
        back = _TO_LOGICAL_ORDER.get(self.order)
        return tensor if back is None else tensor.permute(back)


@dataclass(frozen=True)
class HostState:
    """Everything that a phase needs to go on from: tensors by dotted name, and plain values."""

    tensors: dict[str, HostTensor]
    plain: dict[str, Any]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.data.nbytes for tensor in self.tensors.values())

    def digest(self) -> str:
        """SHA-256 over names and contents, in the order of the names; hexadecimal.

        Of a few lanes, hashed at the same time (hashing leaves Python's lock to others), and
        then of their digests: which lane a tensor is in depends on the sizes only.
        """
        size = self.nbytes / _LANES + 1
        lanes: list[list[str]] = [[] for _ in range(_LANES)]
        seen = 0
        for name in sorted(self.tensors):
            lanes[int(seen / size)].append(name)
            seen += self.tensors[name].data.nbytes
        with ThreadPoolExecutor(_LANES) as pool:
            return hashlib.sha256(b"".join(pool.map(self._lane_digest, lanes))).hexdigest()

    def _lane_digest(self, names: list[str]) -> bytes:
        sha = hashlib.sha256()
        for name in names:
            tensor = self.tensors[name]
            sha.update(f"{name} {tensor.dtype} {tensor.order} {tensor.shape}".encode())
            sha.update(tensor.data.data)
        return sha.digest()


def capture(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    *,
    copy: bool,
) -> HostState:
    """The present state. Without `copy`, CPU tensors share the live model's memory: use it
    (hash it, hand it to `ray.put`) before training goes on.
    """
    return to_host(model.state_dict(), optimizer.state_dict(), scaler.state_dict(), copy=copy)


def to_host(
    model: Mapping[str, Tensor],
    optimizer: Mapping[str, Any],
    scaler: Mapping[str, Any],
    *,
    copy: bool,
) -> HostState:
    """A state from the three `state_dict`s."""
    tensors = {
        name: HostTensor.of(tensor, copy) for name, tensor in _named_tensors(model, optimizer)
    }
    plain = {
        "optimizer_state": _plain_state(optimizer),
        "param_groups": optimizer["param_groups"],
        "scaler": dict(scaler),
    }
    return HostState(tensors, plain)


def _plain_state(optimizer: Mapping[str, Any]) -> dict[Any, dict[str, Any]]:
    return {
        index: {key: value for key, value in values.items() if not isinstance(value, Tensor)}
        for index, values in optimizer["state"].items()
    }


def _named_tensors(
    model: Mapping[str, Tensor], optimizer: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in model.items():
        yield f"model.{name}", tensor
    for index, values in optimizer["state"].items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                yield f"optimizer.{index}.{key}", value


def restore(
    state: HostState,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
) -> None:
    """Copy `state` into a live model, optimiser and scaler; the parameters stay the same
    objects (DDP holds on to them).
    """
    with torch.no_grad():
        model.load_state_dict(model_tensors(state))
        if not _copied_in_place(state, optimizer):
            optimizer.load_state_dict(optimizer_state_dict(state))
    scaler.load_state_dict(state.plain["scaler"])


def _copied_in_place(state: HostState, optimizer: torch.optim.Optimizer) -> bool:
    """Fill the optimiser's own tensors, when it has just those of the state: new ones would
    cost as much again in page faults.
    """
    live = optimizer.state_dict()
    own = dict(_named_tensors({}, live))
    wanted = {n: t.tensor() for n, t in state.tensors.items() if n.startswith("optimizer.")}
    same = (
        {name: tensor.shape for name, tensor in own.items()}
        == {name: tensor.shape for name, tensor in wanted.items()}
        and _plain_state(live) == state.plain["optimizer_state"]
        and _settings(live["param_groups"]) == _settings(state.plain["param_groups"])
    )
    if same:
        for name, tensor in own.items():
            tensor.copy_(wanted[name])
        for group, saved in zip(optimizer.param_groups, state.plain["param_groups"], strict=True):
            group.update({key: saved[key] for key in _SET_BY_THE_LOOP if key in saved})
    return same


def _settings(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What two optimisers must agree on."""
    return [
        {key: str(value) for key, value in g.items() if key not in _SET_BY_THE_LOOP}
        for g in groups
    ]


def model_tensors(state: HostState) -> dict[str, Tensor]:
    """The model's part, by its own names; shares the state's memory."""
    prefix = "model."
    return {
        name.removeprefix(prefix): value.tensor()
        for name, value in state.tensors.items()
        if name.startswith(prefix)
    }


def optimizer_state_dict(state: HostState) -> dict[str, Any]:
    """The optimiser's `state_dict`, in memory of its own (the optimiser keeps these tensors)."""
    per_parameter: dict[int, dict[str, Any]] = {
        index: dict(values) for index, values in state.plain["optimizer_state"].items()
    }
    for name, value in state.tensors.items():
        kind, _, rest = name.partition(".")
        if kind == "optimizer":
            index, _, key = rest.partition(".")
            per_parameter[int(index)][key] = value.tensor().clone()
    return {"state": per_parameter, "param_groups": state.plain["param_groups"]}
