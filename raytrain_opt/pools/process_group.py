"""The process group of the workers: Ray Train connects it, commands travel in it."""

from __future__ import annotations

import json
import os
import pickle
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib import import_module
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from ray.train.backend import Backend
from ray.train.torch import TorchConfig

from raytrain_opt.cluster.ray_private import dump_command
from raytrain_opt.pools.resident import Group

_TorchBackend: Any = TorchConfig().backend_cls
_rendezvous: Any = import_module("torch.distributed.rendezvous")
_TCPStore = _rendezvous.TCPStore

# A worker whose peer died fails in its next collective, with an error that nothing distinguishes
# from a user's. Ray Train ends the whole group as soon as it knows: of a process on this node
# within seconds, of another node after half a minute. A worker that is still alive after this
# time reports the error as its own.
_PROCESS_FAILURE_GRACE_S, _NODE_FAILURE_GRACE_S = 15.0, 60.0
# Ranks wait for the next command as long as the search by slots takes, or the driver lives.
_NO_LIMIT = timedelta(days=1000)

T = TypeVar("T")


def backend_of(*, use_gpu: bool) -> Literal["nccl", "gloo"]:
    return "nccl" if use_gpu else "gloo"


class CommandGroup(Group):
    """A gloo group of all ranks for commands and replies; gradients have another group.

    `dump` pickles a value; references in it stay valid while the sender keeps the value.
    """

    def __init__(self, local_size: int, dump: Callable[[object], bytes] = dump_command) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        on_one_node = local_size == self.size
        self.peer_failure_grace_s = (
            _PROCESS_FAILURE_GRACE_S if on_one_node else _NODE_FAILURE_GRACE_S
        )
        self._dump = dump
        self._group: Any = dist.new_group(backend="gloo", timeout=_NO_LIMIT)
        # A connection of its own: a client serves one call at a time.
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._store = _TCPStore(address, port, is_master=False, wait_for_workers=False)
        self._keys = [f"raytrain_opt/{rank}" for rank in range(self.size)]

    def broadcast(self, value: T | None) -> T:
        content = [b"" if self.rank else self._dump(value)]
        dist.broadcast_object_list(content, 0, self._group)
        return cast(T, pickle.loads(content[0]) if self.rank else value)

    def gather(self, value: T) -> list[T]:
        if self.rank:
            dist.gather_object(self._dump(value), None, 0, self._group)
            return []
        contents: list[Any] = [None] * self.size
        dist.gather_object(b"", contents, 0, self._group)
        return [value, *map(pickle.loads, contents[1:])]  # the first rank's own is not copied

    def all(self, flag: bool) -> bool:
        value = torch.tensor(int(flag))
        dist.all_reduce(value, dist.ReduceOp.MIN, self._group)
        return bool(value)

    def share(self, values: Sequence[int]) -> list[Sequence[int]]:
        self._store.set(self._keys[self.rank], json.dumps(values))
        return [] if self.rank else [*map(json.loads, self._store.multi_get(self._keys))]


def listen_on_one_address() -> None:
    """Let a store that this process hosts listen on the address that the other ranks get.

    Torch lets it listen on all interfaces, where anybody may change the addresses at which the
    ranks meet. Replaces a name in `torch.distributed.rendezvous`; checked with torch 2.15.
    """
    _rendezvous.TCPStore = _make_store


def _make_store(host_name: str, port: int, *, is_master: bool, **options: Any) -> Any:
    if is_master:
        family = socket.AF_INET6 if ":" in host_name else socket.AF_INET
        listener = socket.create_server((host_name, port), family=family)
        options["master_listen_fd"] = listener.detach()
    return _TCPStore(host_name, port, is_master=is_master, **options)


class OneAddressBackend(_TorchBackend):  # type: ignore[misc]
    """Prepares each worker, then connects them as Ray Train does."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        worker_group.execute(listen_on_one_address)
        super().on_start(worker_group, backend_config)


class OneAddressTorchConfig(TorchConfig):
    """A TorchConfig with this backend."""

    @property
    def backend_cls(self) -> type[Backend]:
        return OneAddressBackend
