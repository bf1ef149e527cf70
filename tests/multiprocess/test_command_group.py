"""Commands and replies in the process group, whose first rank speaks for all."""

from __future__ import annotations

import os
import pickle
import socket
import threading
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.process_group import run_ranks

RANKS = 3
SIZES = (0, 1, 4000, 4100, 10**6)  # of messages, which have room for 4 KiB in the first part


def main(port: int, rank: int, world_size: int, folder: Path) -> Any:
    """Run as one rank."""
    from raytrain_opt.pools.process_group import CommandGroup

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.destroy_process_group()  # of the tests: this one has a store of its own
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    group = CommandGroup(2, pickle.dumps)
    group.share((0,))
    heard = [group.broadcast("x" * n if rank == 0 else None) for n in SIZES]
    gathered = [group.gather({"rank": rank, "content": "x" * n * rank}) for n in SIZES]
    agreed = group.all(True), group.all(rank != 1)
    group.share((7, rank))
    waiting = threading.Thread(target=group.broadcast, args=(None,), daemon=True)
    if rank:
        waiting.start()
    dist.barrier()
    # While the ranks wait for a command, and while one hangs.
    results: dict[str, Any] = {
        "heard": heard,
        "gathered": gathered,
        "agreed": agreed,
        "shared": group.share((7, rank)),
    }
    torch.save(results, folder / f"rank-{rank}.pt")
    dist.barrier()
    os._exit(0)


def test_the_first_rank_tells_all_and_hears_of_all(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    first, *others = run_ranks(partial(main, port), RANKS, tmp_path / "ranks")
    for results in (first, *others):
        assert results["heard"] == ["x" * size for size in SIZES]
        assert results["agreed"] == (True, False)
    assert first["gathered"] == [
        [{"rank": rank, "content": "x" * size * rank} for rank in range(RANKS)] for size in SIZES
    ]
    assert [tuple(values) for values in first["shared"]] == [(7, rank) for rank in range(RANKS)]
    assert [(r["gathered"], r["shared"]) for r in others] == [([[]] * len(SIZES), [])] * 2
