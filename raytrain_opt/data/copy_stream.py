"""Copy batches to a GPU while it trains on earlier ones."""

from __future__ import annotations

import torch
from torch import Tensor


def send(values: Tensor, device: torch.device) -> Tensor:
    """Return a small tensor on the device; from pinned memory, so that the CPU does not wait."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


class CopyStream:
    """Copies from pinned memory, on a CUDA stream of its own.

    The training loop never waits for the device, so the CPU is ahead of it: a copy that is queued
    on this stream runs beside the updates before it. Only the GPU waits for it, before it uses
    the copy. On CPU the tensors themselves are returned.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def copy(self, *tensors: Tensor) -> list[Tensor]:
        """Return the tensors on the device."""
        if self._stream is None:
            return [tensor.to(self._device) for tensor in tensors]
        with torch.cuda.stream(self._stream):
            copies = [t.pin_memory().to(self._device, non_blocking=True) for t in tensors]
        training = torch.cuda.current_stream(self._device)
        training.wait_stream(self._stream)
        for copied in copies:
            # Its memory must not be reused before the training has read it.
            copied.record_stream(training)
        return copies
