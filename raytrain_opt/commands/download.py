"""`python -m raytrain_opt.commands.download RUN_DIR`: print a run's files for `submit`."""

from __future__ import annotations

import base64
import sys
import zlib
from pathlib import Path
from typing import Any

from raytrain_opt import storage
from raytrain_opt.errors import ClusterError
from raytrain_opt.remote.log_markers import marker_line

FILES = (
    "result.json", "report.html", "schedule.jsonl", "rounds.jsonl", "epochs.jsonl", "job.yaml",
)  # fmt: skip
MARKER = "files"
# Far more than any of these files has: a few bytes of a log must not fill memory or disk.
_MAX_BYTES = 2**30


def pack_files(run_dir: str) -> str:
    """Return a log line: names, compressed contents of existing `FILES`. Raises StorageError."""
    contents = {name: storage.read(run_dir, name) for name in FILES}
    files = {
        name: base64.b64encode(zlib.compress(content)).decode()
        for name, content in contents.items()
        if content is not None
    }
    return marker_line(MARKER, files)


def unpack_files(files: Any, folder: Path) -> list[Path]:
    """Write the files of a `MARKER` line into `folder`, which is made; return their paths.

    Raises ClusterError if a log, which anybody on the cluster may write to, has something else.
    """
    try:
        # No other names: a log must not choose files of this machine.
        contents = {folder / name: _unpack(files[name]) for name in FILES if name in files}
    except (TypeError, ValueError, zlib.error) as error:
        raise ClusterError(f"the job's log has damaged files of the run: {error}") from error
    folder.mkdir(parents=True, exist_ok=True)
    for path, content in contents.items():
        path.write_bytes(content)
    return list(contents)


def _unpack(text: str) -> bytes:
    unpacker = zlib.decompressobj()
    content = unpacker.decompress(base64.b64decode(text), _MAX_BYTES)
    if unpacker.unconsumed_tail:
        raise ValueError(f"a file has more than {_MAX_BYTES:,} bytes")
    return content


if __name__ == "__main__":
    print(pack_files(sys.argv[1]))
