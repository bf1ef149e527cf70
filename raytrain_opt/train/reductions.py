"""Sums over the ranks of the process group, or of the only process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

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
    if isinstance(totals, EvalTotals):
        columns = (totals.samples, totals.loss_squares, *totals.sums.values())
        samples, squares, *sums = reduce_sums(columns, device)
        named = dict(zip(totals.sums, sums, strict=True))
        failure = _first_failure(totals.failure, sum(sums))
        scored = replace(totals, samples=int(samples), sums=named, loss_squares=squares)
        return replace(scored, failure=failure)
    values = (totals.samples, totals.loss_sum, totals.skipped)
    samples, loss_sum, skipped = reduce_sums(values, device)
    failure = _first_failure(totals.failure, loss_sum)
    summed = replace(totals, samples=int(samples), loss_sum=loss_sum, skipped=int(skipped))
    return replace(summed, failure=failure)


def _first_failure(own: str, total: float) -> str:
    """Return the failure of the first rank that has one, where the total of all is not finite."""
    if math.isfinite(total) or not dist.is_initialized():
        return own
    of_ranks = [own] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    return next(filter(None, of_ranks), "")
