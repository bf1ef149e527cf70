"""Sums over the ranks of the process group, or of the only process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from raytrain_opt.results import EvalTotals, TrainTotals

Totals = TypeVar("Totals", bound=TrainTotals | EvalTotals)


def reduce_sums(values: Sequence[float], device: torch.device) -> list[float]:
    """Sum each value over the process group, in float64; without a group, return the values."""
    if not dist.is_initialized():
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    return [float(value) for value in tensor.tolist()]


def sum_over_ranks(totals: Totals, device: torch.device) -> Totals:
    """Return the totals of the process group; times are this rank's."""
    counts = ("samples", "correct", "skipped", "correct_top5")
    names = [name for name in counts if hasattr(totals, name)]
    values = [totals.loss_sum, *(getattr(totals, name) for name in names)]
    loss_sum, *sums = reduce_sums(values, device)
    changes: dict[str, Any] = dict(zip(names, map(int, sums), strict=True))
    return replace(totals, loss_sum=loss_sum, **changes)
