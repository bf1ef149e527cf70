"""Check that a model accepts the data: one small forward pass before anything long starts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from raytrain_opt.errors import DataError
from raytrain_opt.random_state import preserve_random_state


def check_output(model: nn.Module, samples: Tensor, num_classes: int) -> None:
    """Pass `samples`, on the device of `model`, through it in eval mode.

    At least two: one would hide a model that drops or averages the batch dimension. The model is
    preserved, also when the check fails. Raises DataError: the model cannot take such samples, or
    its output is not [samples, num_classes]; the message names the fields to change.
    """
    with preserve_model(model, samples.device), torch.no_grad():
        model.eval()
        try:
            output = model(samples)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            rule = f"it cannot process a batch of these data, shape {list(samples.shape)}"
            hint = "Choose another model.name, model.args or samples of another shape."
            text = f"{rule}: {type(error).__name__}: {error}. {hint}"
            raise DataError("model", text) from error
    shape = list(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
    count = len(samples)
    if shape != [count, num_classes]:
        rule = f"its output for {count} samples must be [{count}, {num_classes}]"
        hint = "Change model.args, or data.num_classes if that is wrong."
        raise DataError("model", f"{rule} (samples, classes of the data), but is {shape}. {hint}")


@contextmanager
def preserve_model(model: nn.Module, device: torch.device, *others: object) -> Iterator[None]:
    """Restore everything that calls of a model may change, on exit.

    These are parameters and buffers, whatever their shape is by then; the attributes of every
    layer and of `others` (a task, with its networks), including the contents of lists,
    dictionaries and sets; and the random states. The copies are in CPU memory. The inside of other
    objects may change: `train.step_check` finds out whether that matters.
    """
    values = (value for other in others for value in (other, *_attributes(other).values()))
    parts = [value for value in values if isinstance(value, nn.Module)]
    layers = [layer for part in (model, *parts) for layer in part.modules()]
    owners = [_attributes(owner) for owner in (*layers, *others)]
    attributes = [({n: (v, _copy_content(v)) for n, v in own.items()}, own) for own in owners]
    tensors = {id(leaf): leaf for own in owners for leaf in tree_leaves(own) if _is_value(leaf)}
    copies = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in tensors.values()]
    with preserve_random_state(device):
        try:
            yield
        finally:
            for before, own in attributes:
                for name in own.keys() - before.keys():
                    del own[name]
                for name, (value, content) in before.items():
                    own[name] = value
                    if content is not None:
                        value.clear()
                        (value.extend if isinstance(value, list | deque) else value.update)(
                            content
                        )
            for tensor, value in copies:
                if tensor.shape == value.shape:
                    tensor.detach().copy_(value)
                else:
                    tensor.data = value.to(tensor.device)


def _attributes(owner: object) -> dict[str, Any]:
    return getattr(owner, "__dict__", {})


def _is_value(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_leaf or not leaf.requires_grad)


def _copy_content(value: Any) -> Any:
    """Return a copy of a container and of those nested in it; None for another value."""
    if not isinstance(value, list | deque | dict | set):
        return None
    content = tree_map(lambda leaf: leaf, value)
    return copy(value) if content is value else content
