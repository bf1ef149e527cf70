"""The trend in the losses of the epochs so far."""

from __future__ import annotations

import pytest

from raytrain_opt.search.loss_trend import has_spiked, has_stalled


@pytest.mark.parametrize(
    ("losses", "spiked"),
    [
        ((), False),
        ((2.0,), False),
        ((2.0, 2.1), False),
        ((2.0, 2.3), True),
        ((2.0, 2.3, 2.2), False),
        ((1.0, 0.5, 0.6), True),
    ],
)
def test_a_spike_is_far_above_the_epoch_before(losses: tuple[float, ...], spiked: bool) -> None:
    assert has_spiked(losses) == spiked


@pytest.mark.parametrize(
    ("losses", "stalled"),
    [
        ((), False),
        ((1.0, 1.0, 1.0), False),
        ((1.0, 1.0, 1.0, 1.0), True),
        ((1.0, 1.2, 1.1, 0.99), False),
        ((1.0, 1.2, 1.1, 0.999), True),
        ((0.5, 1.0, 0.9, 0.8), True),
        ((3.0, 2.0, 1.5, 1.2, 1.0), False),
    ],
)
def test_stalled_is_three_epochs_without_progress(
    losses: tuple[float, ...], stalled: bool
) -> None:
    assert has_stalled(losses) == stalled
