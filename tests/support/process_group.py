"""Run a module's `main` in several processes for a test, and join them in a gloo process group.

`main(rank, world_size, folder)` writes FOLDER/rank-RANK.pt.
"""

from __future__ import annotations

import importlib
import multiprocessing
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LIMIT_S = 240  # on machines that may be busy

# Processes are forked from one that has imported torch, which takes seconds of CPU time. Not from
# the test's own process, whose torch may have threads.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "tests.support.process_group",
        "torch._dynamo",
        "raytrain_opt.train.learner",
    ]
)


def run_ranks(module: str, world_size: int, folder: Path) -> list[dict[str, Any]]:
    """Run the module on all ranks; return what each wrote. Fails with the errors of all ranks."""
    folder.mkdir()
    processes = [
        _CONTEXT.Process(target=_run_rank, args=(module, rank, world_size, folder))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(LIMIT_S)
        errors = [path.read_text() for path in sorted(folder.glob("*.error"))]
        assert [process.exitcode for process in processes] == [0] * world_size, "".join(errors)
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(world_size)]


def _run_rank(module: str, rank: int, world_size: int, folder: Path) -> None:
    try:
        importlib.import_module(module).main(rank, world_size, folder)
    except BaseException:
        (folder / f"rank-{rank}.error").write_text(traceback.format_exc())
        raise


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
