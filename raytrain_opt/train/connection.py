"""Connect the workers while model and data are built, not in the first step."""

from __future__ import annotations

from concurrent.futures import Future
from threading import Thread
from typing import Protocol

import torch
import torch.distributed as dist

from raytrain_opt.clock import monotonic_s
from raytrain_opt.config.optimizer import ParallelSection

# Elements of the first messages: NCCL connects small and large ones in different ways.
_FIRST_MESSAGES = {"cpu": (1,), "cuda": (1, 25 * 2**18)}


class Connection(Protocol):
    """The connections between the workers, perhaps still being made."""

    def wait(self) -> float:
        """Until they are there; seconds that making them took. Raises what went wrong."""
        ...


class EarlyConnection:
    """Makes them in a thread, from now on.

    Until `wait` returns, this process must send nothing else: the ranks would take each
    other's messages for something else. `distribute` sends.
    """

    def __init__(self, device: torch.device) -> None:
        self._seconds: Future[float] = Future()
        # A daemon: a peer that is missing must not keep this process from ending.
        Thread(target=self._connect, args=(device,), name="connect", daemon=True).start()

    def wait(self) -> float:
        """See `Connection`."""
        return self._seconds.result()

    def _connect(self, device: torch.device) -> None:
        try:
            self._seconds.set_result(connect(device))
        except BaseException as error:  # noqa: BLE001 - raised by `wait`
            self._seconds.set_exception(error)


class LateConnection:
    """Left to the first messages of the training."""

    def wait(self) -> float:
        """Nothing was begun."""
        return 0.0


def begin_connection(section: ParallelSection, device: torch.device) -> Connection:
    """As `parallel.early_communicators` says; the process group must be there."""
    return EarlyConnection(device) if section.early_communicators else LateConnection()


def connect(device: torch.device) -> float:
    """Send the first message of each kind that training sends; seconds that took.

    NCCL connects when it is first used: that is what this takes out of the first step. gloo
    has connected before.
    """
    started_s = monotonic_s()
    stream = _own_stream(device)
    # On a stream of its own, so as not to wait for what the model's building does.
    with torch.cuda.stream(stream):
        for elements in _FIRST_MESSAGES.get(device.type, (1,)):
            message = torch.zeros(elements, device=device)
            dist.all_reduce(message)
            dist.broadcast(message, src=0)
        if stream is not None:
            stream.synchronize()
    return monotonic_s() - started_s


def _own_stream(device: torch.device) -> torch.cuda.Stream | None:
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
