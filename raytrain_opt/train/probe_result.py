"""What a batch-size probe measured. Free of torch: the driver and strategies read it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from raytrain_opt.train.totals import GradientNorms


@dataclass(frozen=True)
class Probe:
    """One measurement. `parts_s`: mean seconds of a step by part (see `train.timing`), which add
    up to the step. Utilisation in percent: mean of the top half of the samples, and of all.
    `norms`: of gradients, where the search asks for them.
    """

    batch_size: int
    status: Literal["ok", "out_of_memory"]
    samples_per_s: float = math.nan
    samples_per_s_error: float = math.nan
    steps: int = 0
    seconds: float = 0.0
    parts_s: dict[str, float] = field(default_factory=dict)
    utilization_pct: float = math.nan
    utilization_mean_pct: float = math.nan
    utilization_samples: int = 0
    peak_memory_mib: float = math.nan
    joule_per_sample: float | None = None
    norms: GradientNorms | None = None
    why: str = ""
