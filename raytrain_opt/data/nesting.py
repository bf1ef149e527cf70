"""Samples and batches of a user's task: tensors in dicts, lists and tuples, nested in any way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def map_leaves(function: Callable[[Any], Any], nest: Any) -> Any:
    """Return the same nesting of `function(leaf)`; lists become tuples, NamedTuples stay."""
    if isinstance(nest, Mapping):
        return {key: map_leaves(function, value) for key, value in nest.items()}
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)(*(map_leaves(function, value) for value in nest))
    if isinstance(nest, list | tuple):
        return tuple(map_leaves(function, value) for value in nest)
    return function(nest)


def leaves(nest: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a nesting, in its order, without what else a batch may hold."""
    import torch

    if isinstance(nest, Mapping):
        nest = tuple(nest.values())
    if isinstance(nest, list | tuple):
        for value in nest:
            yield from leaves(value)
    elif isinstance(nest, torch.Tensor):
        yield nest
