"""Connect the workers while model and data are built, instead of in the first step."""

from __future__ import annotations

from concurrent.futures import Future

import torch
import torch.distributed as dist

from raytrain_opt.clock import monotonic_s
from raytrain_opt.train.background import start_thread

# Elements of the first messages: NCCL uses separate connections for small and large ones.
_FIRST_MESSAGES = {"cpu": (1,), "cuda": (1, 25 * 2**18)}


def begin_communicator_warmup(device: torch.device) -> Future[float]:
    """Connect the workers in a background thread; return the seconds it takes.

    NCCL connects on first use, which would make the first step slow. gloo connects when the
    process group is initialized, so initialize it before. Until the result is there, this process
    must not communicate, or the ranks would mix up their messages: call `distribute` only
    afterwards.
    """
    return start_thread(lambda: _send_first_messages(device))


def _send_first_messages(device: torch.device) -> float:
    started_s = monotonic_s()
    # On a separate stream, so that it does not wait for the construction of the model.
    stream = None
    if device.type == "cuda":
        # A thread begins with the first GPU, where leaving the stream would take memory, too.
        torch.cuda.set_device(device)
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for elements in _FIRST_MESSAGES[device.type]:
            message = torch.zeros(elements, device=device)
            dist.all_reduce(message)
            dist.broadcast(message, src=0)
        if stream is not None:
            stream.synchronize()
    return monotonic_s() - started_s
