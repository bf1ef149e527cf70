"""The state of a training in CPU memory: weights, buffers, optimizer and gradient scaler.

`capture` returns arrays that Ray moves without pickling their contents and that all processes
of a node read in place; `restore` copies them into a live model and optimizer. Tensors keep their
strides, also of axes of size 1: the choice of a kernel, and so how it rounds, may depend on them.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_leaves_with_path, tree_map_only, tree_map_with_path

from raytrain_opt.optim.batched import is_dense


@dataclass(frozen=True)
class PackedTensor:
    """One tensor as bytes in memory order; `trains`: a parameter that gradients change."""

    data: np.ndarray[Any, np.dtype[np.uint8]]
    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...]
    trains: bool = False

    @classmethod
    def from_tensor(cls, tensor: Tensor, copy: bool) -> PackedTensor:
        """Pack a live tensor; on CPU without `copy`, the result shares its memory."""
        trains, tensor = tensor.requires_grad, tensor.detach()
        if not is_dense(tensor):
            tensor = tensor.contiguous()
        dtype = str(tensor.dtype).removeprefix("torch.")
        flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).cpu()
        if copy and flat.data_ptr() == tensor.data_ptr():
            flat = flat.clone()
        return cls(flat.numpy(), tuple(tensor.shape), dtype, tensor.stride(), trains)

    def tensor(self) -> Tensor:
        """Return a tensor over the same memory. Do not write to it: it may be shared."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            flat = torch.from_numpy(self.data)
        dtype: torch.dtype = getattr(torch, self.dtype)
        # An empty array cannot be viewed as another dtype.
        values = flat.view(dtype) if self.data.size else torch.empty(0, dtype=dtype)
        return values.as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class TrainingState:
    """Everything that training continues from."""

    tensors: dict[str, PackedTensor]  # by dotted name
    # The rest of the optimizer's state, by parameter, with None in place of each tensor.
    optimizer_state: dict[int, Any] = field(default_factory=dict)
    param_groups: list[dict[str, Any]] = field(default_factory=list)
    scaler: dict[str, Any] = field(default_factory=dict)
    optimizer_index: int = 0  # among the optimizers of the job

    def first_not_finite(self) -> str | None:
        """Return the name of a tensor with NaN or, where training computed it, infinity, or None.

        Buffers may hold infinity (the lowest loss so far), masks -inf.
        """
        for name, packed in self.tensors.items():
            tensor = packed.tensor()
            if tensor.is_floating_point() and tensor.numel():
                # NaN is the maximum of any tensor that has one. Eight-bit types have no maximum.
                largest = (tensor.float() if tensor.itemsize == 1 else tensor).max()
                is_trained = packed.trains or name.startswith("optimizer.")
                if largest.isnan() or (is_trained and largest == torch.inf):
                    return name
        return None

    def digest(self) -> str:
        """Return the SHA-256 of names and contents, in the order of the names; hexadecimal."""
        sha = hashlib.sha256()
        for name, tensor in sorted(self.tensors.items()):
            sha.update(f"{name} {tensor.dtype} {tensor.stride} {tensor.shape}".encode())
            sha.update(tensor.data.data)
        return sha.hexdigest()


def capture(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    *,
    copy: bool,
    optimizer_index: int = 0,
) -> TrainingState:
    """Capture a training's state; see `to_cpu_state`."""
    states = (model.state_dict(keep_vars=True), optimizer.state_dict(), scaler.state_dict())
    return to_cpu_state(*states, copy=copy, optimizer_index=optimizer_index)


def to_cpu_state(
    model: Mapping[str, Tensor],
    optimizer: Mapping[str, Any],
    scaler: Mapping[str, Any],
    *,
    copy: bool,
    optimizer_index: int = 0,
) -> TrainingState:
    """Pack three `state_dict`s; without `copy`, CPU tensors share the live model's memory."""
    tensors = {
        name: PackedTensor.from_tensor(tensor, copy)
        for name, tensor in named_tensors(model, optimizer)
    }
    return TrainingState(
        tensors,
        tree_map_only(Tensor, lambda _: None, optimizer["state"]),
        optimizer["param_groups"],
        dict(scaler),
        optimizer_index,
    )


def named_tensors(
    model: Mapping[str, Tensor], optimizer: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of both `state_dict`s with their names in a `TrainingState`."""
    for name, tensor in model.items():
        yield f"model.{name}", tensor
    for path, value in tree_leaves_with_path(optimizer["state"]):
        if isinstance(value, Tensor):
            yield _optimizer_name(path), value


def _optimizer_name(path: tuple[Any, ...]) -> str:
    """Return the name of a tensor: index of the parameter, key, place in lists (`GG[0]`)."""
    index, key, *nested = path
    return f"optimizer.{index.key}.{key.key}{keystr(tuple(nested))}"


def restore(
    state: TrainingState,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
) -> None:
    """Copy `state` into model, optimizer and scaler, whose parameters stay the same objects."""
    model.load_state_dict(model_tensors(state))
    optimizer.load_state_dict(optimizer_state_dict(state))
    scaler.load_state_dict(state.scaler)
    if scaler.is_enabled():  # an update that raised may have left gradients marked as unscaled
        scaler._per_optimizer_states.clear()


def model_tensors(state: TrainingState) -> dict[str, Tensor]:
    """Return the model's tensors by their names in the model, over the state's memory."""
    prefix = "model."
    return {
        name.removeprefix(prefix): value.tensor()
        for name, value in state.tensors.items()
        if name.startswith(prefix)
    }


def optimizer_state_dict(state: TrainingState) -> dict[str, Any]:
    """Return the optimizer's `state_dict`, copied, because the optimizer keeps its tensors."""

    def unpack(path: tuple[Any, ...], value: Any) -> Any:
        if value is not None:
            return value
        packed = state.tensors.get(_optimizer_name(path))
        return None if packed is None else packed.tensor().clone()

    per_parameter = tree_map_with_path(unpack, state.optimizer_state)
    return {"state": per_parameter, "param_groups": state.param_groups}
