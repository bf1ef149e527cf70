"""Private folders for temporary files: removed at the end, or by the next run after a kill."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

_PREFIX, _OWNER = "rto-", ".owner"  # short, for paths of sockets
_RANDOM = 8  # characters that `mkdtemp` adds
# Processes that have been told to end may still write: for a tenth of a second on an idle machine.
_REMOVE_TRIES, _REMOVE_PAUSE_S = 50, 0.1


class TemporaryFolder:
    """A new folder of mode 0700. `max_bytes`: limit of its path, for sockets in it.

    This process holds a lock in it, which ends with the process. So the next one knows that
    nobody needs the folder. Raises OSError where none can be made.
    """

    def __init__(self, max_bytes: int = 4096) -> None:
        remove_abandoned()
        length = max_bytes - len(f"/{_PREFIX}") - _RANDOM
        if not (short := [path for path in _parents() if len(os.fsencode(path)) <= length]):
            raise OSError("the path of the folder for temporary files is too long; set TMPDIR")
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=short[0]))
        unlocked = self.path / ".unlocked"
        self._lock = os.open(unlocked, os.O_CREAT | os.O_RDWR, 0o600)
        with suppress(OSError):  # a file system without locks: the folder stays after a kill
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            unlocked.rename(self.path / _OWNER)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()

    def keep(self) -> None:
        """Let the folder stay when this process ends."""
        (self.path / _OWNER).unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the folder."""
        for _ in range(_REMOVE_TRIES):
            shutil.rmtree(self.path, ignore_errors=True)
            if not self.path.exists():
                break
            time.sleep(_REMOVE_PAUSE_S)
        os.close(self._lock)


def remove_abandoned() -> None:
    """Remove the folders of this user whose processes were killed."""
    for folder in (path for parent in _parents() for path in Path(parent).glob(f"{_PREFIX}*")):
        with suppress(OSError):
            if not folder.is_symlink() and folder.stat().st_uid == os.geteuid():
                _remove_if_abandoned(folder)


def _parents() -> list[str]:
    paths = (os.environ.get("RAY_TMPDIR"), tempfile.gettempdir(), "/tmp", "/var/tmp")
    return [path for path in paths if path and os.access(path, os.W_OK)]


def _remove_if_abandoned(folder: Path) -> None:
    with open(folder / _OWNER, "r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while its process lives
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != _OWNER:
                path.unlink()
        # Processes of a killed Ray write for up to a minute: then the next one removes the rest.
        if os.listdir(folder) == [_OWNER]:
            shutil.rmtree(folder)
