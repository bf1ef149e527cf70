"""Values for programs in a job's log: one JSON line each, `{"raytrain_opt": {NAME: VALUE}}`.

The log is the one thing that everybody who may submit a job can read, wherever the run's storage
is. `raytrain-opt submit` learns the run directory and downloads small files this way.
"""

from __future__ import annotations

import json
import os
from typing import Any

# Set by `submit` for the job: a run that a person starts prints no lines for programs.
ANNOUNCE_VARIABLE = "RAYTRAIN_OPT_ANNOUNCE"
_KEY = "raytrain_opt"


def marker_line(name: str, value: Any) -> str:
    """Return the line, without its end, that `find_marker` finds under `name`."""
    return json.dumps({_KEY: {name: value}})


def is_marker(line: str) -> bool:
    """Return whether a line of a log is one that `marker_line` made."""
    return line.startswith(f'{{"{_KEY}": {{')


def find_marker(log: str, name: str) -> Any | None:
    """Return the value of the last marker of this name in a log; None if there is none."""
    for line in reversed(log.splitlines()):
        if not is_marker(line):
            continue
        try:
            values = json.loads(line)[_KEY]
        except (ValueError, RecursionError):  # the log was cut within the line, or is forged
            continue
        if isinstance(values, dict) and name in values:
            return values[name]
    return None


def announce_run_dir(run_dir: str) -> None:
    """Print where this run writes, if the process that started it asks for it."""
    if os.environ.get(ANNOUNCE_VARIABLE):
        print(marker_line("run_dir", run_dir), flush=True)
