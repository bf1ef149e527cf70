"""Averaged weights: the formula, the exchange with the training's weights, saved states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import nn

from raytrain_opt.config.updates import OptimizerSection
from raytrain_opt.optim.averaging import attach_ema, averages_weights, use_weights
from raytrain_opt.optim.factory import build_optimizer
from raytrain_opt.optim.update import set_lr
from raytrain_opt.train.state import capture, restore

NAMES = ["SGD", "AdamW", "Muon", "LARS", "Adafactor", "RMSpropWarmup"]
SCHEDULE_FREE = ["ScheduleFreeSGD", "ScheduleFreeAdamW"]
SCALER = torch.amp.GradScaler(enabled=False)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(12, 4)).to(
        memory_format=torch.channels_last
    )


def make(
    name: str, model: nn.Module, decay: float | Literal["auto"] = 0.5, **args: Any
) -> torch.optim.Optimizer:
    section = OptimizerSection(name=name, args=args)
    optimizer = build_optimizer(section, model, steps_per_epoch=5)
    if name not in SCHEDULE_FREE:
        attach_ema(optimizer, decay)
    return optimizer


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    lr: Callable[[int], float] = lambda _: 0.1,
) -> list[list[torch.Tensor]]:
    """Train a phase; return the weights after each update."""
    use_weights(optimizer, training=True)
    after = []
    for step in steps:
        random = torch.Generator().manual_seed(step)
        for param in model.parameters():
            gradient = torch.randn(param.shape, generator=random)
            is_unused = step % 4 == 3 and param.dim() == 1
            param.grad = None if is_unused else torch.empty_like(param).copy_(gradient)
        set_lr(optimizer, lr(step))
        optimizer.step()
        after.append(weights(model))
    use_weights(optimizer, training=False)
    return after


@pytest.mark.parametrize("decay", [0.0, 0.25, 0.999])
def test_the_average_is_that_of_the_formula(decay: float) -> None:
    model = network()
    optimizer = make("SGD", model, decay, momentum=0.9)
    trained = train(model, optimizer, range(3)) + train(model, optimizer, range(3, 20))
    expected = trained[0]
    for t, updated in enumerate(trained):
        d = min(decay, (1 + t) / (10 + t))
        expected = [d * a + (1 - d) * w for a, w in zip(expected, updated, strict=True)]
    torch.testing.assert_close(weights(model), expected)


def test_the_average_covers_a_quarter_of_the_updates_and_less_as_the_rate_falls() -> None:
    model = network()
    optimizer = make("SGD", model, "auto", momentum=0.9)

    def lr(step: int) -> float:
        return 0.1 * (1 - step / 40)

    trained = train(model, optimizer, range(30), lr)
    expected, halfway = trained[0], 1 - 1 / (0.25 * 20 * 0.525)
    for t, updated in enumerate(trained):
        d = 1 - 1 / max(1.0, 0.25 * (1 + t) * (1 - t / 40))
        assert t != 19 or d == pytest.approx(halfway)
        expected = [d * a + (1 - d) * w for a, w in zip(expected, updated, strict=True)]
    torch.testing.assert_close(weights(model), expected)
    # At the end of the decay the average is the weights themselves.
    last = train(model, optimizer, range(30, 40), lr)[-1]
    torch.testing.assert_close(weights(model), last, rtol=0, atol=0)


def test_an_update_left_out_for_an_overflow_counts_with_unchanged_weights() -> None:
    model = network()
    optimizer = make("SGD", model, momentum=0.9)
    [before] = train(model, optimizer, range(1))
    scaler = torch.amp.GradScaler("cpu")
    use_weights(optimizer, training=True)
    for param in model.parameters():
        param.grad = torch.full_like(param, torch.inf)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    torch.testing.assert_close(weights(model), before, rtol=0, atol=0)
    use_weights(optimizer, training=False)
    torch.testing.assert_close(weights(model), before)
    after = train(model, optimizer, range(1, 2))[0]
    d = min(0.5, 3 / 12)
    expected = [d * a + (1 - d) * w for a, w in zip(before, after, strict=True)]
    torch.testing.assert_close(weights(model), expected)


@pytest.mark.parametrize("name", NAMES)
def test_training_goes_on_as_without_an_average(name: str) -> None:
    model, plain_model = network(), network()
    plain = build_optimizer(OptimizerSection(name=name, args={}), plain_model, steps_per_epoch=5)
    averaging = make(name, model)
    assert (averages_weights(averaging), averages_weights(plain)) == (True, False)
    for phase in (range(4), range(4, 8)):
        trained, expected = train(model, averaging, phase), train(plain_model, plain, phase)
        for one, other in zip(trained, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
        assert not torch.equal(weights(model)[0], trained[-1][0])


@pytest.mark.parametrize("name", [*NAMES, *SCHEDULE_FREE])
def test_a_look_at_the_averaged_weights_changes_no_bit_of_the_training(name: str) -> None:
    model, other = network(), network()
    expected = train(model, make(name, model), range(9))
    optimizer = make(name, other)
    trained = [step for i in range(0, 9, 3) for step in train(other, optimizer, range(i, i + 3))]
    for one_step, other_step in zip(expected, trained, strict=True):
        for one, two in zip(one_step, other_step, strict=True):
            assert torch.equal(one, two)


@pytest.mark.parametrize("name", [*NAMES, *SCHEDULE_FREE])
@pytest.mark.parametrize("fresh", [True, False], ids=["into a new optimizer", "in place"])
def test_a_saved_state_continues_bit_for_bit(name: str, fresh: bool) -> None:
    model = network()
    optimizer = make(name, model)
    train(model, optimizer, range(3))
    state = capture(model, optimizer, SCALER, copy=True)
    averaged = weights(model)
    resumed = network()
    other = make(name, resumed)
    if not fresh:
        train(resumed, other, range(50, 55))
        use_weights(other, training=True)  # as after a phase that was interrupted
    restore(state, resumed, other, SCALER)
    for one, two in zip(averaged, weights(resumed), strict=True):
        assert torch.equal(one, two)
    for one_step, other_step in zip(
        train(model, optimizer, range(3, 6)), train(resumed, other, range(3, 6)), strict=True
    ):
        for one, two in zip(one_step, other_step, strict=True):
            assert torch.equal(one, two)
    ends = [capture(m, o, SCALER, copy=True) for m, o in ((model, optimizer), (resumed, other))]
    assert ends[0].digest() == ends[1].digest()
