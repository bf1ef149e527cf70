"""Data parallelism: a single process, or DistributedDataParallel (DDP).

Both add gradients and buffers along one tree (`train.tree_sum`): shares do not change a bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from raytrain_opt.config.updates import ParallelSection
from raytrain_opt.errors import JobError, Problem, listed
from raytrain_opt.optim.batched import is_dense
from raytrain_opt.threads import start_thread
from raytrain_opt.train.batch_norm import StepBuffers
from raytrain_opt.train.micro_batches import LoadBalance, MicroBatches
from raytrain_opt.train.tree_sum import TreeExchange, TreeSum, additions_after

_DDP_ARGUMENTS = signature(DistributedDataParallel).parameters
# torch 2.15 gave `broadcast_buffers` a new name and warns about the old one.
_SYNC_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers"
    if "forward_sync_buffers" in _DDP_ARGUMENTS
    else "broadcast_buffers": False
}
_COMPRESSION = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Elements of the first message: NCCL connects more channels for a large one.
_FIRST_MESSAGE = {"cpu": 1, "cuda": 25 * 2**18}


class Parallel:
    """What the training loop needs from its process group; this class is a single process."""

    distributed = False
    forward: nn.Module

    def __init__(self, model: nn.Module, section: ParallelSection) -> None:
        self.forward = self._model = model
        # Each micro-batch's gradients are rounded to this type, so every sum is.
        self._dtype = _COMPRESSION.get(section.compression)
        self._buffers = StepBuffers(model)
        self.begin_phase(MicroBatches.all(1))

    def begin_phase(self, micro_batches: MicroBatches) -> None:
        """Begin a phase."""
        self._begin_phase(micro_batches.indices, micro_batches)

    def _begin_phase(self, share: range, micro_batches: MicroBatches) -> None:
        self.indices = share  # the micro-batches of each step that this process computes
        # Losses are divided by the number of micro-batches, so that the sum is the mean.
        self._count = self.divisor = len(micro_batches.indices)
        self._buffers.begin_phase(share, self._count)
        self._gradients = TreeSum(share, self._count)

    @contextmanager
    def forward_pass(self, number: int) -> Iterator[None]:
        """Wrap what changes the model's buffers in one micro-batch."""
        self._buffers.begin(number)
        yield
        self._buffers.take(number)

    @contextmanager
    def accumulate(self, number: int) -> Iterator[None]:
        """Wrap forward and backward of one micro-batch."""
        with self.forward_pass(number):
            yield
        if self._count > 1 or self._dtype is not None:
            self._take_gradients(number)

    def finish_backward(self) -> None:
        """Send zeros for the gradients that a micro-batch has not sent before it raised."""

    def end_backward(self) -> None:
        """Give each parameter the gradient of the step, and the model its buffers."""
        for total in self._gradients.nodes:
            for parameter, gradient in total.items():
                parameter.grad = gradient.to(parameter.dtype)
        self._gradients = TreeSum(self.indices, self._count)
        self.end_forward()

    def end_forward(self) -> None:
        """Give the model the buffers of the step, after all its forward passes."""
        self._buffers.end_step(lambda _: None)

    def after_step(self) -> None:
        """Call this after each update."""

    def end_phase(self) -> None:
        """End the phase."""

    def _take_gradients(self, number: int) -> None:
        gradients = {p: p.grad for p in self._model.parameters() if p.grad is not None}
        for parameter in gradients:
            parameter.grad = None
        if self._dtype is not None:
            gradients = {p: gradient.to(self._dtype) for p, gradient in gradients.items()}
        self._gradients.add(number, gradients)


class DataParallel(Parallel):
    """DistributedDataParallel, which sends gradients in buckets during the backward pass."""

    distributed = True
    forward: DistributedDataParallel

    def __init__(self, model: nn.Module, section: ParallelSection) -> None:
        self._section = section
        self._device = next(model.parameters()).device
        needs_all = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
        self._balance = LoadBalance(self._device, equal=needs_all)
        self._sender = _SideStream(self._device) if self._device.type == "cuda" else _Thread()
        super().__init__(model, section)
        self.forward = self._wrap()

    def begin_phase(self, micro_batches: MicroBatches) -> None:
        count = len(micro_batches.indices)
        # A group of one has one share, also before there are as many micro-batches as workers.
        self._balance.share(max(count, dist.get_world_size()))
        shares, rank = self._balance.shares, dist.get_rank()
        self._exchange = TreeExchange(shares, count)
        self._begin_phase(shares[rank], micro_batches)
        self._balance.begin_measurement()

    @contextmanager
    def accumulate(self, number: int) -> Iterator[None]:
        self._last = number == self.indices[-1]
        with self.forward_pass(number), nullcontext() if self._last else self.forward.no_sync():
            yield
        if not self._last:
            self._take_gradients(number)

    def finish_backward(self) -> None:
        if not self._last:
            return  # the other ranks wait for no gradients yet
        # A micro-batch begins without gradients: by `zero_grad` or `_take_gradients`.
        trained = [p for p in self._model.parameters() if p.requires_grad]
        missing = [p for p in trained if p.grad is None]
        if len(missing) == len(trained):  # DDP expects gradients after a forward pass only
            self.forward.module = nn.Identity()
            try:
                self.forward(torch.zeros((), device=self._device))
            finally:
                self.forward.module = self._model
        torch.autograd.backward(missing, [torch.zeros_like(p) for p in missing])

    def end_backward(self) -> None:
        self._sender.raise_failure()
        self._gradients = TreeSum(self.indices, self._count)
        self.end_forward()

    def end_forward(self) -> None:
        self._buffers.end_step(self._exchange.reduce)

    def after_step(self) -> None:
        """Raise JobError for parameters without a gradient, for which other workers would wait."""
        named = self._model.named_parameters()
        if unused := [name for name, p in named if p.grad is None and p.requires_grad]:
            rule = f"parameters get no gradient, for which workers would wait: {listed(unused)}"
            hint = (
                "name them if the loss never uses them; if layers are left out at random, "
                "multiply their output by 0 instead, or train with workers.count: 1"
            )
            raise JobError([Problem("model.freeze", rule, None, hint)])
        self._balance.after_update()

    def end_phase(self) -> None:
        self._balance.end_measurement()

    def _wrap(self) -> DistributedDataParallel:
        arguments = dict(_SYNC_BUFFERS)
        if sizes_mib := self._section.gradient_buckets:  # torch before 2.15 takes one size
            is_list = "bucket_cap_mb_list" in _DDP_ARGUMENTS
            arguments |= (
                {"bucket_cap_mb_list": sizes_mib} if is_list else {"bucket_cap_mb": sizes_mib[-1]}
            )
        ddp = DistributedDataParallel(
            self._model,
            device_ids=[self._device] if self._device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            **arguments,
        )

        def exchange(_: None, bucket):  # type: ignore[no-untyped-def]  # DDP checks the types
            return self._exchange_bucket(bucket)

        ddp.register_comm_hook(None, exchange)
        return ddp

    def _exchange_bucket(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Add the last micro-batch's gradients to the others, here and of all ranks."""
        if bucket.is_last():
            self._balance.on_gradients()
        result = bucket.buffer()
        total = result if self._dtype is None else result.to(self._dtype)
        *nodes, total = self._complete_nodes(bucket, total)

        def send() -> Tensor:
            self._exchange.reduce([*nodes, total])
            return result if total is result else result.copy_(total)

        return self._sender.submit(send, result)

    def _complete_nodes(self, bucket: GradBucket, last: Tensor) -> list[Tensor]:
        nodes, parameters = list(self._gradients.nodes), bucket.parameters()
        for _ in range(additions_after(self.indices[-1], self.indices[0], self._count)):
            _add_to(_views(bucket, last), nodes.pop(), parameters)
        flat = [torch.zeros_like(last) for _ in nodes]
        for tensor, node in zip(flat, nodes, strict=True):
            _add_to(_views(bucket, tensor), node, parameters)
        return [*flat, last]


def _views(bucket: GradBucket, flat: Tensor) -> list[Tensor]:
    """Return views of a tensor like the bucket's, which lie in memory as DDP's gradients do."""
    parameters = bucket.parameters()
    parts = torch.split(flat, [parameter.numel() for parameter in parameters])
    return [
        part.as_strided(p.shape, p.stride()) if is_dense(p) else part.view(p.shape)
        for part, p in zip(parts, parameters, strict=True)
    ]


def _add_to(
    views: Sequence[Tensor], node: dict[Any, Tensor], parameters: Sequence[Tensor]
) -> None:
    if pairs := [(v, node[p]) for v, p in zip(views, parameters, strict=True) if p in node]:
        torch._foreach_add_([view for view, _ in pairs], [value for _, value in pairs])


class _Thread:
    """Sends in a thread, in order, while the backward pass goes on."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "exchange")
        self._failure: Exception | None = None

    def submit(self, send: Callable[[], Tensor], fallback: Tensor) -> torch.futures.Future[Tensor]:
        """Return what `send` will return; `fallback` after an exception."""
        future: torch.futures.Future[Tensor] = torch.futures.Future()

        def run() -> None:
            result = fallback
            try:
                if self._failure is None:
                    result = send()
            except Exception as error:  # noqa: BLE001 - raised in the training's thread
                self._failure = error
            future.set_result(result)

        self._thread.submit(run)
        return future

    def raise_failure(self) -> None:
        """Raise what `send` raised: DDP would lose it."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


class _SideStream:
    """Sends on a CUDA stream of its own, while the backward pass goes on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def submit(self, send: Callable[[], Tensor], fallback: Tensor) -> torch.futures.Future[Tensor]:
        """Return what `send` will return; whoever uses it waits on the device."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[self._device])
        with torch.cuda.stream(self._stream):
            future.set_result(send())
        return future

    def raise_failure(self) -> None:
        """Do nothing: `submit` raises at once."""


def begin_communicator_warmup(device: torch.device) -> Future[None]:
    """Connect the workers in a thread, while model and data are built (Honda et al.).

    NCCL connects on first use, which would make the first step slow. Until the result is there,
    this process must not communicate: create `DataParallel` only afterwards.
    """

    def connect() -> None:
        # On a separate stream, so that it does not wait for the construction of the model.
        stream = None
        if device.type == "cuda":
            # A thread begins with the first GPU, where leaving the stream would take memory, too.
            torch.cuda.set_device(device)
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            message = torch.zeros(_FIRST_MESSAGE[device.type], device=device)
            dist.all_reduce(message)
            dist.broadcast(message, src=0)
            ranks = range(dist.get_world_size())
            TreeExchange([range(rank, rank + 1) for rank in ranks], len(ranks)).reduce([message])
            if stream is not None:
                stream.synchronize()

    return start_thread(connect)
