"""One process at a time in a run directory, by flock: a lock ends with its process."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from raytrain_opt.clock import utc_now
from raytrain_opt.errors import JobError, Problem
from raytrain_opt.remote.run_copy import INDEX, RAY_FOLDER
from raytrain_opt.storage import open_plain, remove_tree

_FILE = ".lock"
# What flock raises on a file system without locks, as some network file systems are.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
# Names in a run directory before its first record, beside hidden ones.
_START = {"job.yaml", "checkpoints", "tensorboard", RAY_FOLDER}
# `is_locked` holds the lock for microseconds; a run that starts just then tries once more.
_RETRY_S = 0.2


@contextmanager
def lock_run_directory(run_dir: Path) -> Iterator[Callable[[], bool]]:
    """Hold the lock of a run directory against every other process that sees this folder.

    Yields a function that writes this process into the lock, and returns whether it is held: False
    on a file system without locks. Until it is called, nothing is changed, and a new lock is
    removed again. Raises JobError when another process holds the lock, and OSError when its file
    cannot be made.
    """
    held, path = True, run_dir / _FILE
    is_new = not path.exists()
    with open(path, "a+", encoding="utf-8", opener=open_plain) as file:
        try:
            _lock_exclusively(file)
        except BlockingIOError as error:
            holder = Path(file.name).read_text(encoding="utf-8")
            rule = (
                "another run is writing to this directory: "
                f"{holder or 'a process that has just started'}; wait for it, or stop it"
            )
            raise JobError([Problem("--resume", rule, repr(str(run_dir)))], "arguments") from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            held = False

        def sign() -> bool:
            nonlocal is_new
            is_new = False
            if held:
                holder = f"process {os.getpid()} on {socket.gethostname()} since {utc_now()}"
                os.ftruncate(file.fileno(), 0)
                os.write(file.fileno(), holder.encode())  # a buffer would be written at the end
            return held

        try:
            yield sign
        finally:
            if is_new:
                path.unlink(missing_ok=True)


def _lock_exclusively(file: TextIO) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        time.sleep(_RETRY_S)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def remove_if_abandoned(run_dir: Path) -> None:
    """Remove the directory of a run that was killed on this machine before it had any result."""
    names = {path.name for path in run_dir.iterdir() if not path.name.startswith(".")}
    if names <= _START and not (run_dir / INDEX).exists():
        with open(run_dir / _FILE, "r+", errors="replace", opener=open_plain) as file:
            # Elsewhere a process may hold the lock although none is seen from here.
            is_here = f" on {socket.gethostname()} " in file.read(1000)
            if is_here and os.fstat(file.fileno()).st_uid == os.geteuid():
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_tree(run_dir)


def is_locked(run_dir: Path) -> bool:
    """Return whether a process holds the lock of a run directory."""
    try:
        with open(run_dir / _FILE, "rb", opener=open_plain) as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no such file, or no locks
        return False
    return False
