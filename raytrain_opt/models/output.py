"""Does the model fit the data? One small forward pass before anything long starts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from raytrain_opt.errors import DataError

if TYPE_CHECKING:
    import torch
    from torch import nn

_BATCH = 2


def check_output(
    model: nn.Module,
    sample_shape: tuple[int, ...],
    num_classes: int,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
) -> None:
    """Pass a batch of two zero samples through `model`, which lives on `device`, in eval mode.

    `dtype` is that of the samples; None: float32. Weights, buffers, random states, gradients
    and the mode of every layer are as before afterwards, also when the check fails.
    Raises DataError: the model cannot take such samples, or its output is not
    [2, num_classes]; the message names the fields to mend.
    """
    import torch

    samples = torch.zeros(_BATCH, *sample_shape, device=device, dtype=dtype or torch.float32)
    with _untouched(model, torch.device(device)), torch.no_grad():
        model.eval()
        try:
            output = model(samples)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise DataError(
                f"model: it cannot take a batch of these data, shape {list(samples.shape)}: "
                f"{type(error).__name__}: {error}. Choose another model.name, mend model.args "
                "or give samples of another shape."
            ) from error
    found = list(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
    if found != [_BATCH, num_classes]:
        raise DataError(
            f"model: its output for {_BATCH} samples must be [{_BATCH}, {num_classes}] (samples, "
            f"classes of the data), but is {found}. Mend model.args, or data.num_classes if the "
            "data have another number of classes."
        )


@contextmanager
def _untouched(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Put back the mode of every layer, every buffer and the random states at the end."""
    import torch

    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module, _ in modes
        for name, buffer in module.named_buffers(recurse=False)
    ]
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for module, name, buffer, before in buffers:
                buffer.copy_(before)
                setattr(module, name, buffer)  # forward may have put another tensor there
