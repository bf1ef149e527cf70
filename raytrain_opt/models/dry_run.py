"""Check that a model accepts the data: one small forward pass before anything long starts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from raytrain_opt.errors import DataError
from raytrain_opt.random_state import preserve_modes, preserve_random_state


def check_output(
    model: nn.Module, samples: Tensor, num_classes: int, *, trains_on_one: bool = False
) -> None:
    """Pass `samples`, on the device of `model`, through it in eval mode.

    At least two: one would hide a model that drops or averages the batch dimension.
    `trains_on_one`: then one sample in training mode, which some layers (BatchNorm1d) refuse.
    Weights, buffers, random states, gradients and the mode of every layer are preserved, also
    when the check fails. Raises DataError: the model cannot take such samples, or its output is
    not [samples, num_classes]; the message names the fields to change.
    """
    with preserve_model(model, samples.device), torch.no_grad():
        model.eval()
        try:
            output = model(samples)
            if trains_on_one:
                model.train()
                model(samples[:1])
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
def preserve_model(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore the mode of every layer, every buffer and the random states on exit."""
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    with preserve_random_state(device), preserve_modes(model):
        try:
            yield
        finally:
            with torch.no_grad():
                for module, name, buffer, value in buffers:
                    buffer.copy_(value)
                    setattr(module, name, buffer)  # forward may have put another tensor there
