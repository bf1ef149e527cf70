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
from typing import TYPE_CHECKING

from raytrain_opt.storage import storage_errors

if TYPE_CHECKING:
    from tensorboardX.event_file_writer import EventsWriter


# Of one file, about 1 MiB. A run under a URI copies the file that grows after every epoch.
_FILE_POINTS = 10_000


class TensorBoardWriter:
    """Writer of event files in `folder`. Raises StorageError when they cannot be written."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._closed, self._files = folder, False, 0
        self._action = f"{folder} cannot be written"
        with storage_errors(self._action):
            folder.mkdir(exist_ok=True)
            self._writer = self._open_file()

    def _open_file(self) -> EventsWriter:
        from tensorboardX.event_file_writer import EventsWriter

        self._points = 0
        self._files += 1  # in the names, which otherwise differ by seconds
        return EventsWriter(str(self._folder / "events"), f".{self._files:04d}")

    def scalars(self, step: int, values: Mapping[str, float | None]) -> None:
        """Write one point of each curve; none for None and for values that are not finite."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar

        with storage_errors(self._action):
            for name, value in values.items():
                if value is not None and math.isfinite(value):
                    summary = scalar(name, value)
                    self._writer.write_event(Event(wall_time=time(), step=step, summary=summary))
            self._writer.flush()
            self._points += len(values)
            if self._points >= _FILE_POINTS:
                self._writer.close()
                self._writer = self._open_file()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if not self._closed:
            self._closed = True
            with suppress(OSError):  # all points are written, or their error was raised
                self._writer.close()
