"""The command line in a machine with faults, for `benchmarks.chaos`.

    python -m benchmarks.chaos_command FAULTS ARGUMENTS...

FAULTS are separated by commas: `no_locks` for a file system without locks; a number of seconds by
which the date is wrong.
"""

from __future__ import annotations

import datetime as dates
import errno
import fcntl
import os
import sys
from types import SimpleNamespace

from raytrain_opt import clock, paths
from raytrain_opt.cli import main
from raytrain_opt.execution import workspace


def _refuse(*_: object) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def set_faults(faults: list[str]) -> None:
    """Let this process meet the faults."""
    if "no_locks" in faults:
        vars(workspace)["fcntl"] = SimpleNamespace(**vars(fcntl) | {"flock": _refuse})
    error = dates.timedelta(seconds=float(faults[-1]))

    class WrongDate(dates.datetime):
        @classmethod
        def now(cls, tz: dates.tzinfo | None = None) -> dates.datetime:  # type: ignore[override]
            return dates.datetime.now(tz) + error

    for module in (clock, paths):
        vars(module)["datetime"] = WrongDate


if __name__ == "__main__":
    set_faults(sys.argv.pop(1).split(","))
    main(prog_name="raytrain-opt")
