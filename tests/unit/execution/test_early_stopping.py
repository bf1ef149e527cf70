"""When a training ends before its last epoch."""

from __future__ import annotations

from typing import Any

import pytest

from raytrain_opt.config.schema import StopSection
from raytrain_opt.execution.length import lost_patience, reached_target
from raytrain_opt.results import Metric

LOSS = Metric("loss", higher_is_better=False)


@pytest.mark.parametrize(
    ("section", "metric", "values", "reached"),
    [
        ({"target": 0.9}, Metric(), [0.5, 0.9], True),
        ({"target": 0.9}, Metric(), [0.95, 0.8], False),
        ({"target": 0.9}, Metric(), [0.95, None], False),
        ({"target": 0.3}, LOSS, [0.2], True),
        ({"target": 0.3}, LOSS, [0.4], False),
        ({"patience": 1}, Metric(), [1.0], False),
        ({"target": 0.9}, Metric(), [], False),
    ],
)
def test_a_target_is_reached(
    section: dict[str, Any], metric: Metric, values: list[float | None], reached: bool
) -> None:
    assert reached_target(StopSection(**section), metric, values) is reached


@pytest.mark.parametrize(
    ("section", "metric", "values", "lost"),
    [
        ({"patience": 2}, Metric(), [0.5, 0.4, 0.5], True),
        ({"patience": 2}, Metric(), [0.5, 0.4, 0.6], False),
        ({"patience": 2}, Metric(), [0.5, None, 0.4, None, 0.3], True),
        ({"patience": 2}, Metric(), [0.5, 0.4, 0.3, None], False),  # not evaluated: nothing is new
        ({"patience": 3}, Metric(), [0.5, 0.4, 0.3], False),
        ({"patience": 1}, LOSS, [0.5, 0.6], True),
        ({"patience": 1}, LOSS, [0.5, 0.4], False),
        ({"target": 0.9}, Metric(), [0.5, 0.4], False),
    ],
)
def test_patience_counts_evaluated_epochs(
    section: dict[str, Any], metric: Metric, values: list[float | None], lost: bool
) -> None:
    assert lost_patience(StopSection(**section), metric, values) is lost
