"""Connect the workers while model and data are built, instead of in the first step."""

from __future__ import annotations

from concurrent.futures import Future
from threading import Thread
from typing import Protocol

import torch
import torch.distributed as dist

from raytrain_opt.clock import monotonic_s
from raytrain_opt.config.updates import ParallelSection

# Elements of the first messages: NCCL uses separate connections for small and large ones.
_FIRST_MESSAGES = {"cpu": (1,), "cuda": (1, 25 * 2**18)}


class Connection(Protocol):
    """The connections between the workers, which may not be established yet."""

    def wait(self) -> float:
        """Wait until the workers are connected; return the seconds that connecting took.

        Raises the error with which connecting failed.
        """
        ...


class WarmedUpCommunicator:
    """Connects the workers in a background thread.

    Until `wait` returns, this process must not communicate, or the ranks would mix up their
    messages. In particular, call `distribute` only afterwards.
    """

    def __init__(self, device: torch.device) -> None:
        self._seconds: Future[float] = Future()
        # A daemon thread: a missing peer must not keep this process alive.
        Thread(target=self._connect, args=(device,), name="connect", daemon=True).start()

    def wait(self) -> float:
        """Wait for the thread; see `Connection`."""
        return self._seconds.result()

    def _connect(self, device: torch.device) -> None:
        try:
            self._seconds.set_result(connect(device))
        except BaseException as error:  # noqa: BLE001 - raised by `wait`
            self._seconds.set_exception(error)


class LazyCommunicator:
    """Leaves connecting to the first messages of the training."""

    def wait(self) -> float:
        """Return 0: there is nothing to wait for."""
        return 0.0


def begin_communicator_warmup(section: ParallelSection, device: torch.device) -> Connection:
    """Begin to connect, if the job says so; the process group must be initialized."""
    return WarmedUpCommunicator(device) if section.warm_up_communicators else LazyCommunicator()


def connect(device: torch.device) -> float:
    """Send the first message of each kind that training sends; return the seconds it took.

    NCCL connects on first use, which would make the first step slow. gloo connects when the
    process group is initialized.
    """
    started_s = monotonic_s()
    stream = _separate_stream(device)
    # On a separate stream, so that it does not wait for the construction of the model.
    with torch.cuda.stream(stream):
        for elements in _FIRST_MESSAGES.get(device.type, (1,)):
            message = torch.zeros(elements, device=device)
            dist.all_reduce(message)
            dist.broadcast(message, src=0)
        if stream is not None:
            stream.synchronize()
    return monotonic_s() - started_s


def _separate_stream(device: torch.device) -> torch.cuda.Stream | None:
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
