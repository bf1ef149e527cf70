"""Sums along the tree over micro-batches, against its definition, for any shares."""

from __future__ import annotations

import math

import pytest
import torch

from raytrain_opt.train.tree_sum import TreeSum, additions_after, complete_nodes


def along_the_tree(values: list[float], start: int, size: int) -> float:
    """Add the micro-batches of the node that begins at `start`, as the definition says."""
    if size == 1:
        return values[start]
    left = along_the_tree(values, start, size // 2)
    middle = start + size // 2
    return left if middle >= len(values) else left + along_the_tree(values, middle, size // 2)


@pytest.mark.parametrize("count", range(1, 18))
def test_any_two_shares_add_along_the_tree(count: int) -> None:
    values = torch.rand(count, dtype=torch.float64).tolist()
    expected = along_the_tree(values, 0, 2 ** math.ceil(math.log2(count)))
    for cut in range(count):
        total: list[float] = []
        for share in (range(cut), range(cut, count)):
            sums = TreeSum(share, count)
            for number in share:
                sums.add(number, {"x": torch.tensor(values[number], dtype=torch.float64)})
            nodes = complete_nodes(share, count)
            assert len(nodes) == len(sums.nodes) <= 2 * math.log2(count) + 1
            for node, value in zip(nodes, sums.nodes, strict=True):
                last, part = node.stop - 1, float(value["x"])
                inside = additions_after(last, node.start, count)
                for _ in range(additions_after(last, 0, count) - inside):
                    part = total.pop() + part
                total.append(part)
        assert total == [expected]


def test_an_aligned_share_is_one_node() -> None:
    assert complete_nodes(range(4, 8), 8) == [range(4, 8)]
    assert complete_nodes(range(4, 7), 7) == [range(4, 7)]  # at the end of the tree
    assert complete_nodes(range(3, 7), 8) == [range(3, 4), range(4, 6), range(6, 7)]


def test_what_a_micro_batch_has_no_value_for_is_0() -> None:
    sums = TreeSum(range(2), 2)
    sums.add(0, {"a": torch.ones(1)})
    sums.add(1, {"a": torch.ones(1), "b": torch.ones(1)})
    assert sums.nodes == [{"a": torch.tensor([2.0]), "b": torch.tensor([1.0])}]
