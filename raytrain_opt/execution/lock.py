"""One process at a time in a run directory.

The lock is the operating system's (flock): it ends with the process that holds it, however that
process dies, and leaves nothing behind that somebody would have to remove.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from raytrain_opt.clock import utc_now
from raytrain_opt.errors import JobError, Problem
from raytrain_opt.storage import refuse_links

_FILE = ".lock"
# What flock raises on a file system without locks, as some network file systems are.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


@contextmanager
def lock_run_directory(run_dir: Path) -> Iterator[bool]:
    """Hold the lock of a run directory against every other process that sees this folder.

    Yields whether the lock is held: False on a file system without locks. Raises JobError when
    another process holds it, and OSError when the lock's file cannot be made.
    """
    with open(run_dir / _FILE, "a+", encoding="utf-8", opener=refuse_links) as file:
        held = _try_lock(file.fileno(), run_dir, _read_holder(file.name))
        if held:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()} since {utc_now()}")
            file.flush()
        yield held


def _try_lock(descriptor: int, run_dir: Path, holder: str) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        rule = f"another run is writing to this directory: {holder}; wait for it, or stop it"
        raise JobError([Problem("--resume", rule, repr(str(run_dir)))], "arguments") from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def _read_holder(file: str) -> str:
    return Path(file).read_text(encoding="utf-8") or "a process that has just started"
