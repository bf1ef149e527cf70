"""Plans for the messages in which gradients travel while the backward pass still computes.

DDP sends a bucket as soon as the gradients in it are there. Small buckets at first let the
exchange begin early, large ones after them cost fewer messages; where a bucket ends within a
layer, the rest of that layer only waits (grouping as in Yamazaki et al. 2019). Sizes are
bytes, in the order of the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import chain, groupby, repeat
from math import ceil, inf
from statistics import median
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

MIB = 2**20
DEFAULT = "default"
# torch's own: the first bucket, then all others.
_TORCH_SIZES = (1 * MIB, 25 * MIB)
# First bucket, factor to the next, and the largest, in MiB.
_GROWTH: dict[str, tuple[float, float, float]] = {
    "growing": (1, 2, 32),
    "growing_small": (1, 2, 8),
    "growing_large": (4, 2, 128),
    "single": (inf, 1, inf),
}
_TAKES_LIST = "bucket_cap_mb_list" in signature(DistributedDataParallel).parameters


@dataclass(frozen=True)
class Gradient:
    """Of one parameter: its name in the model and its bytes."""

    name: str
    size: int

    @property
    def layer(self) -> str:
        """The module that the parameter belongs to."""
        return self.name.rpartition(".")[0]


@dataclass(frozen=True)
class Plan:
    """Bytes of each bucket, the first to be sent first."""

    name: str
    sizes: tuple[int, ...]

    @property
    def sizes_mib(self) -> list[float]:
        """For people."""
        return [round(size / MIB, 3) for size in self.sizes]

    def ddp_arguments(self, takes_list: bool = _TAKES_LIST) -> dict[str, Any]:
        """What makes DDP send these buckets.

        DDP closes a bucket when it holds what the list says, so the very sizes are its list.
        A torch without the list gets as many messages of one size. All parameters are taken
        to be of one type: DDP buckets each type by itself, each from the head of the list.
        """
        if self.name == DEFAULT:
            return {}
        if takes_list:
            return {"bucket_cap_mb_list": [size / MIB for size in self.sizes]}
        return {"bucket_cap_mb": ceil(sum(self.sizes) / len(self.sizes) / MIB)}


def plan_buckets(
    buckets: Literal["default", "growing", "auto"], gradients: Sequence[Gradient]
) -> list[Plan]:
    """The plans that `parallel.buckets` asks for, the one to begin with first.

    `gradients` are in the order of the backward pass. Plans that come to the same buckets as
    an earlier one (small models) are left out.
    """
    names = {"default": [DEFAULT], "growing": ["growing"], "auto": [DEFAULT, *_GROWTH]}
    plans: dict[tuple[int, ...], Plan] = {}
    for name in names[buckets]:
        sizes = _sizes(name, gradients)
        plans.setdefault(sizes, Plan(name, sizes))
    return list(plans.values())


def fastest(seconds: Sequence[Sequence[float]]) -> int:
    """The index of the plan with the smallest median; the earlier one of equals."""
    medians = [median(steps) for steps in seconds]
    return medians.index(min(medians))


def _sizes(name: str, gradients: Sequence[Gradient]) -> tuple[int, ...]:
    if name == DEFAULT:
        first, others = _TORCH_SIZES
        return _fill((gradient.size for gradient in gradients), chain([first], repeat(others)))
    return _fill(_layer_sizes(gradients), _targets(*_GROWTH[name]))


def _layer_sizes(gradients: Sequence[Gradient]) -> Iterator[int]:
    """Bytes of the gradients that follow one another and belong to one module."""
    for _, of_layer in groupby(gradients, key=lambda gradient: gradient.layer):
        yield sum(gradient.size for gradient in of_layer)


def _targets(first_mib: float, factor: float, largest_mib: float) -> Iterator[float]:
    target_mib = first_mib
    while True:
        yield target_mib * MIB
        target_mib = min(target_mib * factor, largest_mib)


def _fill(pieces: Iterable[int], targets: Iterator[float]) -> tuple[int, ...]:
    """Buckets of whole pieces, each closed once it holds its target; the last one may be less."""
    closed, held, target = [], 0, next(targets)
    for piece in pieces:
        held += piece
        if held >= target:
            closed.append(held)
            held, target = 0, next(targets)
    return (*closed, held) if held else tuple(closed)


class BackwardOrder:
    """Watches one training step for the order in which gradients come.

    A step that is done anyway costs nothing and leaves random state and running statistics
    alone. With several shares in the step, the order is that of the first.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self._seen: dict[int, None] = {}
        self._hooks: list[RemovableHandle] = [
            p.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(self._note, index)
            )
            for index, (_, p) in enumerate(self._parameters)
        ]

    def finish(self) -> list[int]:
        """Stop watching; indices of the parameters that are trained, in the order seen.

        Those without a gradient are last: DDP will refuse them itself, and says it better.
        """
        for hook in self._hooks:
            hook.remove()
        return list({**self._seen, **dict.fromkeys(range(len(self._parameters)))})

    def gradients(self, order: Sequence[int]) -> list[Gradient]:
        """Names and sizes in this order, which may be another process's."""
        chosen = (self._parameters[index] for index in order)
        return [Gradient(name, each.numel() * each.element_size()) for name, each in chosen]

    def _note(self, index: int, _: Tensor) -> None:
        self._seen.setdefault(index)
