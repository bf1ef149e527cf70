"""Whether a training ends before its last epoch, as the `stop` section of the job says."""

from __future__ import annotations

from collections.abc import Sequence

from raytrain_opt.config.schema import StopSection
from raytrain_opt.results import Metric


def reached_target(section: StopSection, metric: Metric, values: Sequence[float | None]) -> bool:
    """Return whether the latest value of the metric is as good as the target."""
    if section.target is None or not values or values[-1] is None:
        return False
    return metric.score(values[-1]) >= metric.score(section.target)


def lost_patience(section: StopSection, metric: Metric, values: Sequence[float | None]) -> bool:
    """Return whether the last `patience` evaluated epochs brought no better value.

    `values`: of each epoch; None where it was not evaluated, or the value is not finite.
    """
    known = [metric.score(value) for value in values if value is not None]
    if section.patience is None or len(known) <= section.patience or values[-1] is None:
        return False
    return max(known[-section.patience :]) <= max(known[: -section.patience])
