"""Seed random numbers, and leave them as they were."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

# What a user's object may draw from, other than the global generators.
Generator = np.random.Generator | np.random.RandomState | torch.Generator | random.Random
_GENERATORS = (np.random.Generator, np.random.RandomState, torch.Generator, random.Random)
# The search for them leaves out what holds none or is shared by all, and long lists, which hold
# data. With its limit it takes milliseconds.
_PASSED_OVER = (ModuleType, type, CodeType, torch.Tensor, np.ndarray, str)
_MEMBERS = (*_GENERATORS, FunctionType)
_LIBRARIES = sys.stdlib_module_names | {"numpy", "torch", "torchvision"}
_MAX_ITEMS, _MAX_OBJECTS = 1000, 20_000


def derive_seed(seed: int, use: str) -> str:
    """Return the seed of one use of random numbers in a job with this `seed`."""
    return f"{seed} {use}"


def seed_all(
    seed: int | str, device: torch.device | None = None, generators: Sequence[Generator] = ()
) -> None:
    """Seed all generators that a user's code may draw from, alike in every process.

    These are torch's of the CPU and of `device`, numpy's, Python's, and `generators`, each with a
    seed of its own. A text stands for its hash: `hash` differs between processes. Not
    `torch.manual_seed`, which also seeds devices that are not used, in 0.3 ms.
    """
    if isinstance(seed, str):
        seed = int.from_bytes(blake2b(seed.encode(), digest_size=8).digest(), "big") >> 1
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type != "cpu":
        torch.get_device_module(device).manual_seed_all(seed)
    np.random.seed(seed % 2**32)  # numpy takes no more bits
    random.seed(seed)
    for number, generator in enumerate(generators, 1):
        own_seed = (seed + 0x9E3779B1 * number) % 2**32
        if isinstance(generator, np.random.Generator):
            kind: type = type(generator.bit_generator)
            generator.bit_generator.state = kind(own_seed).state
        elif isinstance(generator, torch.Generator):
            generator.manual_seed(own_seed)
        else:
            generator.seed(own_seed)


def find_generators(*roots: object) -> list[Generator]:
    """Return the generators that these objects hold in attributes, containers and closures.

    Also those in global variables that their methods and functions use. The order is the same in
    every process.
    """
    generators: list[Generator] = []
    seen: set[int] = set()
    # Depth first: whether Python has made the dictionary of an object changes no order.
    stack = list(reversed(roots))
    while stack:
        value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, _GENERATORS):
            generators.append(value)
        elif len(seen) < _MAX_OBJECTS:
            stack += reversed(_referents(value))
    return generators


def _referents(value: object) -> list[Any]:
    """Return what may hold a generator among the objects that a value refers to."""
    is_long = isinstance(value, list | tuple | dict | set) and len(value) > _MAX_ITEMS
    if is_long or isinstance(value, _PASSED_OVER):
        return []
    if isinstance(value, FunctionType):
        used = map(value.__globals__.get, value.__code__.co_names)
        own = [v for v in used if isinstance(v, _GENERATORS)]
        return [*own, value.__closure__, value.__defaults__]
    kinds = [k for k in type(value).__mro__ if k.__module__.split(".")[0] not in _LIBRARIES]
    members = [m for kind in kinds for m in vars(kind).values()]
    return [m for m in members if isinstance(m, _MEMBERS)] + gc.get_referents(value)


@contextmanager
def preserve_random_state(device: torch.device | None = None) -> Iterator[None]:
    """Restore the generators of Python, NumPy, torch and, if it is a GPU, `device` on exit."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    gpus = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


@contextmanager
def seeded(seed: int | str, device: torch.device | None = None) -> Iterator[None]:
    """Seed all generators inside, and restore them on exit."""
    with preserve_random_state(device):
        seed_all(seed, device)
        yield
