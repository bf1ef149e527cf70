"""The store at which the ranks of a process group meet listens where they were told only."""

from __future__ import annotations

import socket
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import pytest

from raytrain_opt.pools import process_group


def listening_addresses(port: int) -> set[str]:
    """Return the local addresses of listening sockets on this port, as the kernel writes them."""
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    local = [fields[1].rsplit(":", 1) for fields in lines if fields[3] == "0A"]
    return {address for address, number in local if int(number, 16) == port}


def test_the_store_listens_on_one_address(monkeypatch: pytest.MonkeyPatch) -> None:
    rendezvous = import_module("torch.distributed.rendezvous")
    monkeypatch.setattr(rendezvous, "TCPStore", rendezvous.TCPStore)  # restores it afterwards
    process_group.listen_on_one_address()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    limit = timedelta(seconds=30)
    arguments = ("127.0.0.1", port)
    store = rendezvous._create_c10d_store(*arguments, 0, 1, limit)
    assert listening_addresses(port) == {"0100007F"}
    client = rendezvous._create_c10d_store(*arguments, 1, 1, limit)
    store.set("key", "value")
    assert client.get("key") == b"value"


def test_ray_train_prepares_the_workers_before_it_connects_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[object] = []
    config = process_group.OneAddressTorchConfig()

    class Workers:
        def execute(self, function: object) -> None:
            calls.append(function)

    base = process_group.OneAddressBackend.__mro__[1]
    monkeypatch.setattr(base, "on_start", lambda _, *arguments: calls.append(arguments))
    workers = Workers()
    config.backend_cls().on_start(workers, config)
    assert calls == [process_group.listen_on_one_address, (workers, config)]
