"""`python -m raytrain_opt.commands.download RUN_DIR`: print the small files of a run.

`raytrain-opt submit` runs this on the cluster as a second job and reads the files from its log.
"""

from __future__ import annotations

import base64
import sys
import zlib
from pathlib import Path

from raytrain_opt import storage
from raytrain_opt.execution.log_markers import marker_line

FILES = (
    "result.json",
    "report.html",
    "schedule.jsonl",
    "rounds.jsonl",
    "epochs.jsonl",
    "job.yaml",
)
MARKER = "files"


def pack_files(run_dir: str) -> str:
    """Return one line of a log: name and compressed content of those `FILES` that exist.

    Raises StorageError when the run directory cannot be read.
    """
    contents = {name: storage.read(run_dir, name) for name in FILES}
    files = {
        name: base64.b64encode(zlib.compress(content)).decode()
        for name, content in contents.items()
        if content is not None
    }
    return marker_line(MARKER, files)


def unpack_files(files: dict[str, str], folder: Path) -> list[Path]:
    """Write the files of a `MARKER` line into `folder`, which is made; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    # No other names: a log must not choose files of this machine.
    paths = {folder / name: files[name] for name in FILES if name in files}
    for path, content in paths.items():
        path.write_bytes(zlib.decompress(base64.b64decode(content)))
    return list(paths)


if __name__ == "__main__":
    print(pack_files(sys.argv[1]))
