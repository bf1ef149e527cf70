"""The steps that gpu_train.py measures: cases, variants, networks, data and timed parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import count, product
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from raytrain_opt.clock import monotonic_s
from raytrain_opt.config.data import ArraysData, Augment, HoldOut
from raytrain_opt.data.base import Batch
from raytrain_opt.data.in_memory import InMemoryData
from raytrain_opt.data.in_memory_sets import DatasetArrays
from raytrain_opt.data.transforms import IMAGENET_MEAN_STD
from raytrain_opt.optim.lars import LARS

# Small enough that the networks' values stay in range, which timings depend on.
LR = 1e-3
WARM_UP_STEPS = 3


@dataclass(frozen=True)
class Case:
    """A network and its data: `distinct` images on the device; `padding` of the random crop."""

    network: str
    pixels: int
    classes: int
    batch_size: int
    distinct: int
    padding: int


CASES = {
    "resnet50_224": Case("torchvision:resnet50", 224, 1000, 256, 2048, 28),
    "vgg16_224": Case("torchvision:vgg16_bn", 224, 1000, 128, 2048, 28),
    "resnet50_32": Case("cifar_resnet50", 32, 100, 1024, 16384, 4),
    "vgg16_32": Case("vgg16_bn", 32, 100, 1024, 16384, 4),
}


@dataclass(frozen=True)
class Variant:
    """How a step is computed (see gpu_train.py).

    `dtype` is autocast's, `compile` torch.compile's mode; with `by_name_only` the variant is not
    part of a run of all variants.
    """

    dtype: torch.dtype | None = torch.bfloat16
    channels_last: bool = True
    optimizer: str = "fused_sgd"
    compile: str | None = None
    graph: bool = False
    meters_on_cpu: bool = False
    by_name_only: bool = False

    @property
    def needs_gpu(self) -> bool:
        return self.graph or self.compile is not None


BASE = "plain_amp"

VARIANTS = {
    "plain_fp32": Variant(None, False, "sgd", meters_on_cpu=True),
    BASE: Variant(torch.float16, False, "sgd", meters_on_cpu=True),
    "eager": Variant(),
    "eager_lars": Variant(optimizer="lars"),
    "eager_fp16": Variant(torch.float16),
    "compile": Variant(compile="default"),
    "graph": Variant(graph=True),
    "compile_graph": Variant(compile="default", graph=True),
    "compile_graph_lars": Variant(optimizer="lars", compile="default", graph=True),
    "autotune_graph": Variant(compile="max-autotune-no-cudagraphs", graph=True, by_name_only=True),
}

Mark = Callable[[str], None]


class Step(Protocol):
    """One update with a batch; `mark` is called with the name of each part at its end."""

    loss: Tensor

    def __call__(self, batch: Batch, mark: Mark) -> None: ...


class Training:
    """A `Step` whose kernels are launched one by one by the CPU."""

    def __init__(self, variant: Variant, model: nn.Module, device: torch.device) -> None:
        self.variant, self.model, self.device = variant, model, device
        # A step in fp16 takes minutes on CPU.
        on_cpu = device.type == "cpu" and variant.dtype is not None
        self._dtype = torch.bfloat16 if on_cpu else variant.dtype
        self.optimizer = build_optimizer(variant, model, device)
        self.scaler = torch.amp.GradScaler(device.type, enabled=variant.dtype == torch.float16)
        self.sums = torch.zeros(2, device=device, dtype=torch.float64)
        self.loss = torch.zeros((), device=device)

    def __call__(self, batch: Batch, mark: Mark) -> None:
        enabled = self._dtype is not None
        with torch.autocast(self.device.type, dtype=self._dtype, enabled=enabled):
            output = self.model(batch.x)
            loss = cross_entropy(output, batch.y, label_smoothing=0.1)
        mark("forward")
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        mark("backward")
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self._meters(output.detach(), loss.detach(), batch.y)
        mark("update")

    def _meters(self, output: Tensor, loss: Tensor, y: Tensor) -> None:
        self.loss.copy_(loss)
        if self.variant.meters_on_cpu:
            hits = output.topk(5, dim=1).indices == y.unsqueeze(1)
            loss.item(), hits[:, 0].sum().item(), hits.sum().item()
        else:
            hits = (output.argmax(1) == y).sum()
            self.sums += torch.stack((loss.double() * len(y), hits.double()))


class CapturedTraining:
    """The `Step` of a Training as one CUDA graph, which reads its batch from fixed memory.

    `pool` is the memory pool of graphs that never run at the same time and leave nothing in it
    for one another. The current stream must not be the default one.
    """

    def __init__(self, training: Training, batch: Batch, pool: Any) -> None:
        self.loss = training.loss
        # The graph writes to the optimizer's buffers, but does not keep them alive.
        self._training = training
        self._batch = Batch(batch.x.clone(), batch.y.clone())
        for _ in range(WARM_UP_STEPS):
            training(self._batch, unmarked)
        # So that the capture allocates the gradients in the graph's memory.
        training.optimizer.zero_grad(set_to_none=True)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, stream=torch.cuda.current_stream()):
            training(self._batch, unmarked)
        training.optimizer.zero_grad(set_to_none=True)

    def __call__(self, batch: Batch, mark: Mark) -> None:
        self._batch.x.copy_(batch.x)
        self._batch.y.copy_(batch.y)
        self._graph.replay()
        mark("graph")


def unmarked(_: str) -> None:
    """Ignore the mark: the parts are not timed."""


def build_optimizer(
    variant: Variant, model: nn.Module, device: torch.device
) -> torch.optim.Optimizer:
    """Return the optimizer; ours read the rate from the device, so a graph's rate can change."""
    settings: dict[str, Any] = {"momentum": 0.9, "weight_decay": 1e-4}
    if variant.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=LR, **settings)
    lr = torch.tensor(LR, device=device)
    if variant.optimizer == "lars":
        # In these networks every parameter of one dimension is a bias or of a normalization.
        layers = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() <= 1]
        groups: list[dict[str, Any]] = [
            {"params": layers},
            {"params": rest, "adapt": False, "weight_decay": 0.0},
        ]
        return LARS(groups, lr=lr, **settings)
    return torch.optim.SGD(model.parameters(), lr=lr, fused=True, **settings)


class Bench:
    """Data and networks of one case and batch size, for all its variants."""

    def __init__(self, case: Case, batch_size: int, device: torch.device) -> None:
        self.case, self.batch_size, self.device = case, batch_size, device
        arrays = synthetic_arrays(case, batch_size, device)
        self.batches = {
            channels_last: self._batches(arrays, channels_last) for channels_last in (True, False)
        }
        self._network = cache(self._new_network)
        self._compiled = cache(self._compile)
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def step(self, variant: Variant) -> Step:
        """Return the variant's step, warmed up."""
        network = self._network(variant.channels_last)
        model = self._compiled(variant.compile) if variant.compile else network
        training = Training(variant, model, self.device)
        batches = self.batches[variant.channels_last]
        if variant.graph:
            return CapturedTraining(training, next(batches), self._pool)
        for _ in range(WARM_UP_STEPS):
            training(next(batches), unmarked)
        return training

    def block(self, step: Step, variant: Variant, steps: int) -> dict[str, float]:
        """Return the milliseconds of a step and of its parts."""
        batches = self.batches[variant.channels_last]
        synchronize(self.device)
        started_s = monotonic_s()
        timer = StepTimer(self.device)
        for _ in range(steps):
            batch = next(batches)
            timer("data")
            step(batch, timer)
        synchronize(self.device)
        total_ms = 1000 * (monotonic_s() - started_s)
        parts = {name: ms / steps for name, ms in timer.sums_ms().items()}
        return {"step": total_ms / steps, **parts}

    def _compile(self, mode: str) -> nn.Module:
        # torch.compile of a module returns an OptimizedModule; its annotation says Callable.
        return cast(nn.Module, torch.compile(self._network(True), mode=mode))

    def _new_network(self, channels_last: bool) -> nn.Module:
        layout = torch.channels_last if channels_last else torch.contiguous_format
        return network(self.case, self.device).to(memory_format=layout)

    def _batches(self, arrays: DatasetArrays, channels_last: bool) -> Iterator[Batch]:
        section = ArraysData(
            name="arrays",
            train=("", ""),
            test=("", ""),
            augment=Augment(crop_padding=self.case.padding, flip=True),
            normalize=(list(IMAGENET_MEAN_STD[0]), list(IMAGENET_MEAN_STD[1])),
        )
        data = InMemoryData(
            arrays,
            section,
            hold_out=HoldOut(0.0),
            seed=0,
            device=self.device,
            channels_last=channels_last,
        )
        steps = range(len(arrays.train_y) // self.batch_size)
        for epoch in count(1):
            yield from data.train_batches(epoch, product(steps, range(1)), 1, self.batch_size)


class StepTimer:
    """The ends of parts, in order: events on a GPU's stream, clock times on CPU."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._names: list[str] = []
        self._ends = [self._now()]

    def __call__(self, name: str) -> None:
        self._names.append(name)
        self._ends.append(self._now())

    def sums_ms(self) -> dict[str, float]:
        """Return each part's milliseconds over all steps; the device must be synchronized."""
        sums = dict.fromkeys(self._names, 0.0)
        for name, start, end in zip(self._names, self._ends, self._ends[1:], strict=False):
            sums[name] += start.elapsed_time(end) if self._on_gpu else 1000 * (end - start)
        return sums

    def _now(self) -> Any:
        if not self._on_gpu:
            return monotonic_s()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def work_of(case: Case) -> dict[str, float]:
    """Count the work per image on two images on the meta device."""
    from torch.utils.flop_counter import FlopCounterMode

    meta, elements = torch.device("meta"), 0

    def add(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        nonlocal elements
        elements += output.numel()

    model = network(case, meta)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(add)
    with FlopCounterMode(display=False) as counter:
        model(torch.empty(2, 3, case.pixels, case.pixels, device=meta)).sum().backward()
    return {
        "gflop_per_image": round(counter.get_total_flops() / 2 / 1e9, 3),
        "conv_mib_per_image": round(elements * 2 / 2 / 2**20, 3),
    }


def network(case: Case, device: torch.device) -> nn.Module:
    """Build the case's network, each time with the same weights."""
    torch.manual_seed(0)
    source, _, name = case.network.rpartition(":")
    with device:
        if source == "torchvision":
            from torchvision import models

            model: nn.Module = models.get_model(name, weights=None, num_classes=case.classes)
            return model
        from raytrain_opt.models.registry import model_function

        shape = (3, case.pixels, case.pixels)
        ours: nn.Module = model_function(name)(num_classes=case.classes, sample_shape=shape)
        return ours


def synthetic_arrays(case: Case, batch_size: int, device: torch.device) -> DatasetArrays:
    """Return images of a color per class plus noise, so training behaves as usual; no test set."""
    on_gpu = device.type == "cuda"
    samples = max(case.distinct if on_gpu else 2 * batch_size, batch_size, case.classes)
    random = torch.Generator(device).manual_seed(0)
    labels = torch.randperm(samples, generator=random, device=device) % case.classes
    colors = torch.randint(
        64, 192, (case.classes, 1, 1, 3), generator=random, device=device
    ).float()
    x = np.empty((samples, case.pixels, case.pixels, 3), np.uint8)
    for start in range(0, samples, 256):
        part = colors[labels[start : start + 256]].expand(-1, case.pixels, case.pixels, -1)
        noise = torch.randn(part.shape, generator=random, device=device)
        x[start : start + 256] = (part + 48 * noise).clamp(0, 255).byte().cpu().numpy()
    y = labels.cpu().numpy()
    return DatasetArrays(x, y, x[:1], y[:1], case.classes)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
