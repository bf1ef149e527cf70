"""Whether a training ends before its last epoch, as the `stop` section of the job says."""

from __future__ import annotations

from collections.abc import Sequence

from raytrain_opt.config.schema import StopSection


def reached_target(section: StopSection, values: Sequence[float | None]) -> bool:
    """Return whether the latest value of the metric is as good as the target."""
    if section.target is None or not values or values[-1] is None:
        return False
    sign = _sign(section)
    return sign * values[-1] >= sign * section.target


def lost_patience(section: StopSection, values: Sequence[float | None]) -> bool:
    """Return whether the last `patience` evaluated epochs brought no better value.

    `values`: of each epoch; None where it was not evaluated, or the value is not finite.
    """
    known = [_sign(section) * value for value in values if value is not None]
    if section.patience is None or len(known) <= section.patience or values[-1] is None:
        return False
    return max(known[-section.patience :]) <= max(known[: -section.patience])


def _sign(section: StopSection) -> int:
    return -1 if section.metric.endswith("loss") else 1
