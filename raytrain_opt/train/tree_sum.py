"""Sums over the micro-batches of a step in one order, whoever computed them.

The micro-batches 0 .. M-1 are the leaves of a binary tree: a node of level l has 2^l leaves, the
first of which is a multiple of 2^l, and is the sum of its two children; the last nodes of a level
may have fewer. Floating-point addition is commutative but not associative, so a sum along the tree
has the same bits for any number of processes and any shares.

A process that computes neighboring micro-batches adds along the tree and keeps the nodes that are
complete (`TreeSum`): one if its share is a node itself, at most 2 log2 M otherwise. Each of W
processes adds one of W parts of all nodes, then everyone gets all parts (`TreeExchange`): with one
node in each process, these are the bytes of a ring all-reduce.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def additions_after(number: int, first: int, count: int) -> int:
    """Return how many nodes of micro-batches from `first` on `number` completes, leaves aside.

    Each is an addition: the node's left child plus its right child.
    """
    additions, half = 0, 1
    while half < count:
        start = number // (2 * half) * (2 * half)
        if min(start + 2 * half, count) != number + 1 or start < first:
            break
        additions += start + half <= number  # a node at the end may have one child only
        half *= 2
    return additions


def complete_nodes(share: range, count: int) -> list[range]:
    """Return the largest nodes that consist of micro-batches of the share, from left to right."""
    nodes: list[range] = []
    for number in share:
        start = number
        for _ in range(additions_after(number, share.start, count)):
            start = nodes.pop().start
        nodes.append(range(start, number + 1))
    return nodes


class TreeSum:
    """The sums of a process so far, one for each complete node, by name."""

    def __init__(self, share: range, count: int) -> None:
        self._first, self._count = share.start, count
        self.nodes: list[dict[Any, Tensor]] = []

    def add(self, number: int, values: dict[Any, Tensor]) -> None:
        """Add the values of a micro-batch, which may be overwritten; a missing one is 0."""
        for _ in range(additions_after(number, self._first, self._count)):
            values = _add(self.nodes.pop(), values)
        self.nodes.append(values)


def _add(left: dict[Any, Tensor], right: dict[Any, Tensor]) -> dict[Any, Tensor]:
    both: list[Hashable] = [name for name in left if name in right]
    if both:
        torch._foreach_add_([left[name] for name in both], [right[name] for name in both])
    return {**right, **left}


class TreeExchange:
    """Adds the nodes of all ranks of the process group, whose shares are known to all."""

    def __init__(self, shares: Sequence[range], count: int) -> None:
        self._rank, self._size = dist.get_rank(), len(shares)
        self._nodes = [complete_nodes(share, count) for share in shares]

        def additions(node: range) -> int:
            last = node.stop - 1
            return additions_after(last, 0, count) - additions_after(last, node.start, count)

        self._additions = [[additions(node) for node in nodes] for nodes in self._nodes]

    def reduce(self, nodes: Sequence[Tensor]) -> None:
        """Replace the last of this rank's nodes, [n] each, by the sum over all ranks."""
        total, rank, ranks = nodes[-1], self._rank, range(self._size)
        cuts = [len(total) * part // self._size for part in range(self._size + 1)]
        parts = [slice(*cuts[part : part + 2]) for part in ranks]
        own = parts[rank]
        received = {
            other: [torch.empty_like(total[own]) for _ in self._nodes[other]]
            for other in ranks
            if other != rank
        }
        _transfer(
            ((other, node[parts[other]]) for other in received for node in nodes),
            ((other, part) for other, values in received.items() for part in values),
        )
        received[rank] = [node[own] for node in nodes]
        sums: list[Tensor] = []
        for other in ranks:
            for value, additions in zip(received[other], self._additions[other], strict=True):
                for _ in range(additions):
                    value = sums.pop().add_(value)
                sums.append(value)
        if sums[0].data_ptr() != total[own].data_ptr():
            total[own] = sums[0]
        others = [other for other in ranks if other != rank]
        _transfer(
            ((other, total[own]) for other in others),
            ((other, total[parts[other]]) for other in others),
        )


def _transfer(sent: Iterable[tuple[int, Tensor]], received: Iterable[tuple[int, Tensor]]) -> None:
    """Send tensors to ranks and receive others, in place; return when all have arrived."""
    operations = [
        dist.P2POp(kind, tensor, rank)
        for kind, messages in ((dist.irecv, received), (dist.isend, sent))
        for rank, tensor in messages
        if len(tensor)
    ]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
