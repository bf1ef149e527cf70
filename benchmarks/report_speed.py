"""How long the report of a long run takes, and how large its page is.

    python benchmarks/report_speed.py [--rounds 10000]

The run is made of invented records: 2 workers, 2 slots, a round of 8 candidates in each epoch, a
batch-size search. `seconds` is the wall time of the process `raytrain-opt report RUN_DIR`: its
imports, reading, 10 plots as PNG and SVG, and the page. `cpu_s` is its CPU time.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import machine

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
import made_runs  # noqa: E402 - its place is known only now

MULTIPLIERS = (1.25, 1.17, 1.08, 1.00, 0.95, 0.90, 0.85, 0.80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10_000)
    rounds = parser.parse_args().rounds
    made_runs.MULTIPLIERS = MULTIPLIERS
    with tempfile.TemporaryDirectory() as folder:
        run = made_runs.made_run(Path(folder) / "run", rounds)
        made_runs.with_batch_size_search(run)
        began_s = time.monotonic()
        command = [sys.executable, "-m", "raytrain_opt", "report", str(run)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds = time.monotonic() - began_s
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        size_mb = (run / "report.html").stat().st_size / 1e6
    found = {
        "rounds": rounds,
        "seconds": round(seconds, 2),
        "cpu_s": round(used.ru_utime + used.ru_stime, 2),
        "page_mb": round(size_mb, 2),
        "machine": machine(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
