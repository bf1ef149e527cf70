"""Read what a run has written for TensorBoard."""

from __future__ import annotations

from pathlib import Path


def read_scalars(folder: Path) -> dict[str, tuple[int, float]]:
    """Return the last step and value of each scalar."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    scalars = {}
    for file in sorted(folder.iterdir()):
        for raw in RawEventFileLoader(str(file)).Load():
            event = Event.FromString(raw)
            for value in event.summary.value:
                scalars[value.tag] = (event.step, value.simple_value)
    return scalars
