"""Several processes that meet in a gloo group: started by a test, met in its script.

A script is called as: python SCRIPT RANK WORLD_SIZE FOLDER, and leaves FOLDER/rank-RANK.pt.
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

LIMIT_S = 240


def run_ranks(script: Path, world_size: int, folder: Path) -> list[dict[str, Any]]:
    """What each of the processes left. Fails with the output of the one that failed."""
    folder.mkdir()
    search_path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, search_path)),
    }
    started = [
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
        for process in started:
            output, _ = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0, output
    finally:
        for process in started:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(world_size)]


@contextmanager
def gloo_group(rank: int, world_size: int, folder: Path) -> Iterator[None]:
    """The process group of the script's processes; none for one process."""
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
