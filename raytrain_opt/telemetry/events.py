"""TensorBoard events, on disk when a call returns.

tensorboardX's SummaryWriter leaves them to a thread. On a full disk that thread dies, and soon a
run would wait for it for ever; so we write ourselves what it would.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from time import time

from raytrain_opt.errors import CommitError


class Events:
    """One file of events in `folder`. Raises CommitError when it cannot be written."""

    def __init__(self, folder: Path) -> None:
        from tensorboardX.event_file_writer import EventsWriter

        self._folder, self._closed = folder, False
        try:
            folder.mkdir(exist_ok=True)
            self._writer = EventsWriter(str(folder / "events"))
        except OSError as error:
            raise self._refused(error) from error

    def scalars(self, step: int, values: Mapping[str, float | None]) -> None:
        """A point of each curve; none for None."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar

        try:
            for name, value in values.items():
                if value is not None:
                    summary = scalar(name, value)
                    self._writer.write_event(Event(wall_time=time(), step=step, summary=summary))
            self._writer.flush()
        except OSError as error:
            raise self._refused(error) from error

    def _refused(self, error: OSError) -> CommitError:
        return CommitError(f"{self._folder} cannot be written: {error}")

    def close(self) -> None:
        """Also a second time. All is written already, or was refused with an error."""
        if not self._closed:
            self._closed = True
            with suppress(OSError):
                self._writer.close()
