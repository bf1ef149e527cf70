"""TensorBoard scalars that are on disk when a call returns.

tensorboardX's SummaryWriter writes in a thread. On a full disk that thread dies, and the run then
blocks forever when its queue is full. So this module writes events itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from time import time

from raytrain_opt.errors import StorageError


class TensorBoardWriter:
    """Writer of one event file in `folder`. Raises StorageError when it cannot be written."""

    def __init__(self, folder: Path) -> None:
        from tensorboardX.event_file_writer import EventsWriter

        self._folder, self._closed = folder, False
        try:
            folder.mkdir(exist_ok=True)
            self._writer = EventsWriter(str(folder / "events"))
        except OSError as error:
            raise self._storage_error(error) from error

    def scalars(self, step: int, values: Mapping[str, float | None]) -> None:
        """Write one point of each curve; none for None and for values that are not finite."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar

        try:
            for name, value in values.items():
                if value is not None and math.isfinite(value):
                    summary = scalar(name, value)
                    self._writer.write_event(Event(wall_time=time(), step=step, summary=summary))
            self._writer.flush()
        except OSError as error:
            raise self._storage_error(error) from error

    def _storage_error(self, error: OSError) -> StorageError:
        return StorageError(f"{self._folder} cannot be written: {error}")

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if not self._closed:
            self._closed = True
            with suppress(OSError):  # all points are written, or their error was raised
                self._writer.close()
