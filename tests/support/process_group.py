"""Start several processes of a script for a test, and join them in a gloo process group.

A script is called as python SCRIPT RANK WORLD_SIZE FOLDER and writes FOLDER/rank-RANK.pt.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Starting a process takes about ten seconds of CPU time, on machines that may be busy.
LIMIT_S = 240


def run_ranks(script: Path, world_size: int, folder: Path) -> list[dict[str, Any]]:
    """Run the script on all ranks; return what each wrote. Fails with the output of a failure."""
    folder.mkdir()
    search_path = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, search_path)),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(world_size), folder],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0, output
    finally:
        for process in processes:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(world_size)]


@contextmanager
def gloo_group(rank: int, world_size: int, folder: Path) -> Iterator[None]:
    """Join the process group of the script's processes; do nothing for a single process."""
    if world_size == 1:
        yield
        return
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting-point",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    yield
    dist.destroy_process_group()
