"""Ray Train's process group of torch, whose key-value store listens on one address only."""

from __future__ import annotations

import socket
from importlib import import_module
from typing import Any

from ray.train.backend import Backend
from ray.train.torch import TorchConfig

_TorchBackend: Any = TorchConfig().backend_cls
_rendezvous: Any = import_module("torch.distributed.rendezvous")
_TCPStore = _rendezvous.TCPStore


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
