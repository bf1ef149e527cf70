"""Time to write the report of a long run, and the size of its page.

    python -m benchmarks.report_speed [--rounds 10000]

The records are synthetic: 2 workers, 2 slots, a round of 8 candidates in each epoch, a batch-size
search. `wall_s` is the wall time of the process `raytrain-opt report RUN_DIR`: imports, reading,
10 plots as PNG and SVG, and the page. `cpu_s` is its CPU time.

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

from benchmarks.common import machine
from tests.support import synthetic_runs

MULTIPLIERS = (1.25, 1.17, 1.08, 1.00, 0.95, 0.90, 0.85, 0.80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10_000)
    rounds = parser.parse_args().rounds
    synthetic_runs.MULTIPLIERS = MULTIPLIERS
    with tempfile.TemporaryDirectory() as folder:
        run = synthetic_runs.write_run(Path(folder) / "run", rounds)
        synthetic_runs.with_batch_size_search(run)
        start_s = time.monotonic()
        command = [sys.executable, "-m", "raytrain_opt", "report", str(run)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        wall_s = time.monotonic() - start_s
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        size_mb = (run / "report.html").stat().st_size / 1e6
    result = {
        "rounds": rounds,
        "wall_s": round(wall_s, 2),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 2),
        "page_mb": round(size_mb, 2),
        "machine": machine(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
