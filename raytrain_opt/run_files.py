"""`python -m raytrain_opt.run_files RUN_DIR`: the small files of a run, on standard output.

How `raytrain-opt submit` takes them home from a cluster: as one line of a job's log, which is
there for whoever may submit, wherever the run's storage is.
"""

from __future__ import annotations

import base64
import json
import sys
import zlib

from raytrain_opt.paths import read_stored

FILES = ("result.json", "report.html", "schedule.json", "rounds.jsonl", "epochs.jsonl", "job.yaml")
MARK = "raytrain_opt-files:"


def packed(run_dir: str) -> str:
    """One line: the mark, then JSON of name and compressed content, of the files that exist."""
    contents = {name: read_stored(run_dir, name) for name in FILES}
    files = {
        name: base64.b64encode(zlib.compress(content)).decode()
        for name, content in contents.items()
        if content is not None
    }
    return MARK + json.dumps(files)


if __name__ == "__main__":
    print(packed(sys.argv[1]))
