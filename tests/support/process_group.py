"""Run a function in several processes for a test, joined in a gloo process group."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Iterator
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
    ["tests.support.process_group", "torch._dynamo", "raytrain_opt.train.learner"]
)

Results = dict[str, Any]
# Called with rank, number of ranks and a folder that the ranks share.
Rank = Callable[[int, int, Path], Results]


def run_ranks(function: Rank, world_size: int, folder: Path) -> list[Results]:
    """Call the function on all ranks; return what each returned: {} of one that died.

    Fails with the errors of all ranks.
    """
    folder.mkdir()
    processes = [
        _CONTEXT.Process(target=_run_rank, args=(function, rank, world_size, folder))
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
    paths = [folder / f"rank-{rank}.pt" for rank in range(world_size)]
    return [torch.load(path) if path.exists() else {} for path in paths]


def _run_rank(function: Rank, rank: int, world_size: int, folder: Path) -> None:
    try:
        torch.set_num_threads(1)
        with _gloo_group(rank, world_size, folder):
            results = function(rank, world_size, folder)
        torch.save(results, folder / f"rank-{rank}.pt")
    except BaseException:
        (folder / f"rank-{rank}.error").write_text(traceback.format_exc())
        raise


@contextmanager
def _gloo_group(rank: int, world_size: int, folder: Path) -> Iterator[None]:
    """Join the process group of the processes; do nothing for a single process."""
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
