"""Plans for the buckets in which DDP sends gradients during the backward pass.

DDP sends a bucket as soon as all gradients in it are computed. Small buckets at first let the
exchange begin early, and large ones after them need fewer messages. A bucket that ends within
a layer only makes the rest of that layer wait, so buckets hold complete layers (Yamazaki et
al. 2019). Sizes are in bytes, in the order of the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import chain, groupby, repeat
from math import ceil, inf
from statistics import median
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

MIB = 2**20
DEFAULT = "default"
# torch's defaults: the first bucket, then all others.
_TORCH_SIZES = (1 * MIB, 25 * MIB)
# First bucket in MiB, factor from one to the next, largest bucket in MiB.
_GROWTH: dict[str, tuple[float, float, float]] = {
    "growing": (1, 2, 32),
    "growing_small": (1, 2, 8),
    "growing_large": (4, 2, 128),
    "single": (inf, 1, inf),
}
_TAKES_LIST = "bucket_cap_mb_list" in signature(DistributedDataParallel).parameters


class Gradient(NamedTuple):
    """The gradient of one parameter: the name of the parameter, and its size in bytes."""

    name: str
    size: int


@dataclass(frozen=True)
class BucketPlan:
    """The size of each bucket in bytes, in the order in which they are sent."""

    name: str
    sizes: tuple[int, ...]

    @property
    def sizes_mib(self) -> list[float]:
        """The sizes in MiB, rounded for records."""
        return [round(size / MIB, 3) for size in self.sizes]

    def ddp_arguments(self, takes_list: bool = _TAKES_LIST) -> dict[str, Any]:
        """Return the arguments with which DDP sends these buckets.

        DDP closes a bucket when it reaches the size in the list, so the list is these sizes. A
        torch version without the list gets the same number of buckets of one size. All parameters
        must have one dtype: DDP splits each dtype separately, from the head of the list.
        """
        if self.name == DEFAULT:
            return {}
        if takes_list:
            return {"bucket_cap_mb_list": [size / MIB for size in self.sizes]}
        return {"bucket_cap_mb": ceil(sum(self.sizes) / len(self.sizes) / MIB)}


def plan_buckets(
    buckets: Literal["default", "growing", "auto"], gradients: Sequence[Gradient]
) -> list[BucketPlan]:
    """Return the different plans to try, for `gradients` in the order of the backward pass."""
    names = {"default": [DEFAULT], "growing": ["growing"], "auto": [DEFAULT, *_GROWTH]}
    plans: dict[tuple[int, ...], BucketPlan] = {}
    for name in names[buckets]:
        sizes = _sizes(name, gradients)
        plans.setdefault(sizes, BucketPlan(name, sizes))
    return list(plans.values())


def fastest(seconds: Sequence[Sequence[float]]) -> int:
    """Return the index of the plan with the smallest median; of equals, the first."""
    medians = [median(steps) for steps in seconds]
    return medians.index(min(medians))


def _sizes(name: str, gradients: Sequence[Gradient]) -> tuple[int, ...]:
    if name == DEFAULT:
        first, others = _TORCH_SIZES
        return _fill((gradient.size for gradient in gradients), chain([first], repeat(others)))
    layers = groupby(gradients, key=lambda gradient: gradient.name.rpartition(".")[0])
    sizes = (sum(gradient.size for gradient in layer) for _, layer in layers)
    return _fill(sizes, _targets(*_GROWTH[name]))


def _targets(first_mib: float, factor: float, largest_mib: float) -> Iterator[float]:
    target_mib = first_mib
    while True:
        yield target_mib * MIB
        target_mib = min(target_mib * factor, largest_mib)


def _fill(pieces: Iterable[int], targets: Iterator[float]) -> tuple[int, ...]:
    """Fill buckets with complete pieces, each up to its target; the last may be smaller."""
    buckets, size, target = [], 0, next(targets)
    for piece in pieces:
        size += piece
        if size >= target:
            buckets.append(size)
            size, target = 0, next(targets)
    return (*buckets, size) if size else tuple(buckets)


class BackwardOrder:
    """Records the order of the gradients in a regular training step, in its first micro-batch."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self._order: dict[int, None] = {}
        self._hooks: list[RemovableHandle] = [
            p.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(self._record, index)
            )
            for index, (_, p) in enumerate(self._parameters)
        ]

    def finish(self) -> list[int]:
        """Stop recording; return parameter indices in backward order, unused ones last."""
        for hook in self._hooks:
            hook.remove()
        return list({**self._order, **dict.fromkeys(range(len(self._parameters)))})

    def gradients(self, order: Sequence[int]) -> list[Gradient]:
        """Return the gradients in this order, which may come from another process."""
        parameters = (self._parameters[index] for index in order)
        return [Gradient(name, p.numel() * p.element_size()) for name, p in parameters]

    def _record(self, index: int, _: Tensor) -> None:
        self._order.setdefault(index)
