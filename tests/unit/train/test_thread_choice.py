"""The number of compute threads follows the time of training steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from raytrain_opt.config.schema import LossSection
from raytrain_opt.data.base import Batch
from raytrain_opt.train import thread_choice
from raytrain_opt.train.task import Classification
from raytrain_opt.train.thread_choice import fewest_fast_threads, time_threads


class Clock:
    """Time that passes only in steps, as `step_s(threads)` says; `tried`: threads of each step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step_s: Callable[[int], float]) -> None:
        self.now_s, self.threads, self.step_s = 0.0, 3, step_s
        self.tried: list[int] = []
        monkeypatch.setattr(thread_choice, "monotonic_s", lambda: self.now_s)
        monkeypatch.setattr(torch, "get_num_threads", lambda: self.threads)
        monkeypatch.setattr(torch, "set_num_threads", self._set)

    def _set(self, threads: int) -> None:
        self.threads = threads

    def step(self) -> None:
        self.tried.append(self.threads)
        self.now_s += self.step_s(self.threads)


@pytest.mark.parametrize(
    ("step_s", "most", "expected"),
    [
        (lambda threads: 0.1 / threads, 16, 16),
        # Waking threads takes longer than the operations.
        (lambda threads: 0.001 + 0.002 * (threads > 1), 16, 1),
        (lambda threads: 0.01 / threads + 0.001 * threads, 12, 3),
        # More threads that save less than 5 % leave their cores to others.
        (lambda threads: 0.0102 if threads < 8 else 0.01, 8, 1),
        (lambda threads: 0.1, 1, 1),
    ],
)
def test_the_fewest_threads_that_are_about_as_fast_as_any_compute(
    monkeypatch: pytest.MonkeyPatch, step_s: Callable[[int], float], most: int, expected: int
) -> None:
    clock = Clock(monkeypatch, step_s)
    assert fewest_fast_threads(clock.step, most) == expected
    assert clock.threads == 3


def test_long_steps_are_timed_once_with_each_number_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch, lambda threads: 8.0 / threads)
    assert fewest_fast_threads(clock.step, 4) == 4
    assert clock.tried == [4, 2, 1]


def test_threads_remain_when_a_step_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("no memory")

    clock = Clock(monkeypatch, lambda threads: 1.0)
    with pytest.raises(RuntimeError, match="no memory"):
        fewest_fast_threads(fail, 2)
    assert clock.threads == 3


def test_steps_on_trial_have_the_batch_size_and_change_nothing() -> None:
    class Net(nn.Sequential):
        sizes: set[int] = set()

        def forward(self, x: Tensor) -> Tensor:
            self.sizes.add(len(x))
            output: Tensor = super().forward(x)
            return output

    net = Net(nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 4)).eval()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    random_state = torch.get_rng_state()
    samples = Batch(torch.randn(2, 8, generator=torch.Generator()), torch.tensor([0, 1]))
    threads = time_threads(Classification(LossSection()), net, samples, "bf16", 5, 1)
    assert threads == 1
    assert net.sizes == {5}
    assert not net.training
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)
