"""Whatever generator user code draws from, equal seeds give equal numbers."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from raytrain_opt import run
from raytrain_opt.config.schema import Job
from raytrain_opt.random_state import find_generators, seed_all
from raytrain_opt.results import Steps
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.learner_config import LearnerConfig
from tests.support.small_jobs import small_job
from tests.unit.train.test_learner import LRS, all_of, learner

MODULE_GENERATOR = np.random.default_rng(3)


def draw(generator: Any) -> float:
    if isinstance(generator, torch.Generator):
        return float(torch.rand((), generator=generator))
    return float(generator.random())


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class ModuleWith(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


class WithClassAttribute:
    generator = random.Random(2)


class UsesGlobal:
    def __call__(self, x: float) -> float:
        return x + MODULE_GENERATOR.random()


def closure(generator: Any) -> Any:
    return lambda x: x + draw(generator)


@pytest.mark.parametrize("make", [np.random.default_rng, np.random.RandomState, random.Random,
                                  lambda seed: torch.Generator().manual_seed(seed)])  # fmt: skip
@pytest.mark.parametrize(
    "hold",
    [
        Holder,
        Slotted,
        closure,
        lambda g: Holder([{"transforms": (Slotted(g),)}]),
        lambda g: partial(draw, g),
        lambda g: nn.Sequential(nn.Identity(), ModuleWith(g)),
        lambda g: Holder([Holder(str(i)) for i in range(100)] + [g]),
    ],
)
def test_generators_are_found_and_seeded_wherever_they_are(make: Any, hold: Any) -> None:
    generator = make(7)
    holder = hold(generator)
    assert find_generators(holder) == [generator]
    draws = []
    for seed in (1, 1, 2):
        seed_all(seed, generators=find_generators(holder))
        draws.append([draw(generator), draw(generator)])
    assert draws[0] == draws[1] != draws[2]


def test_generators_of_classes_and_modules_are_found() -> None:
    assert find_generators(WithClassAttribute()) == [WithClassAttribute.generator]
    assert find_generators(UsesGlobal()) == [MODULE_GENERATOR]
    cyclic = Holder(None)
    cyclic.value = [cyclic, "text", torch.zeros(2), [0] * 5000, np]
    assert find_generators(cyclic) == []


def test_generators_get_different_seeds() -> None:
    twins = [np.random.default_rng(0), np.random.default_rng(0)]
    seed_all(5, generators=twins)
    assert len({draw(twins[0]), draw(twins[1])}) == 2


def any_numbers() -> float:
    return float(np.random.beta(1, 1)) + random.random() + float(torch.rand(()))


class DrawingTask:
    def __init__(self) -> None:
        self.offset, self.own = any_numbers(), np.random.default_rng()

    def training_loss(self, model: nn.Module, batch: Any) -> Tensor:
        noise = any_numbers() + self.own.random() + self.offset
        return noise * functional.cross_entropy(model(batch[0]), batch[1])

    def validation_metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        losses = functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return {"loss": losses * (any_numbers() + self.own.random())}


class DrawingSGD(torch.optim.SGD):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.scale, self.own = any_numbers(), random.Random()

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(1e-3 * self.scale * (any_numbers() + self.own.random()))


def drawing() -> Learner:
    return learner(task={"name": DrawingTask}, optimizer={"name": DrawingSGD})


def test_steps_and_evaluations_depend_on_the_seed_only() -> None:
    """Not on what was drawn before, nor on a stop in between."""
    random.seed()
    np.random.seed()
    torch.seed()
    undisturbed, stopped = drawing(), drawing()
    undisturbed.train(1, Steps(0, LRS), all_of(2))
    stopped.train(1, Steps(0, LRS[:1]), all_of(2))
    state = stopped.state(copy=True)
    stopped.evaluate("test")
    resumed = drawing()
    resumed.load(state)
    any_numbers()
    resumed.train(1, Steps(1, LRS[1:]), all_of(2))
    assert resumed.state(copy=True).digest() == undisturbed.state(copy=True).digest()
    sums = [each.evaluate("test").sums for each in (resumed, undisturbed, resumed)]
    assert sums[0] == sums[1] == sums[2]


class DrawingDataset(Dataset[Any]):
    """Draws from generators of its own, one of which it creates when it is first read."""

    num_classes = 2

    def __init__(self) -> None:
        self.own = np.random.default_rng(7)
        self.late: random.Random | None = None

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.late is None:
            self.late = random.Random()
        x = [self.own.random(), self.late.random(), any_numbers(), MODULE_GENERATOR.random()]
        return torch.tensor(x), index % 2


def make_datasets() -> tuple[Dataset[Any], Dataset[Any]]:
    return DrawingDataset(), DrawingDataset()


def reading_learner(data: dict[str, Any]) -> Learner:
    values = {"model": make_net, "data": data, "epochs": 2, "global_batch_size": 16}
    return Learner(LearnerConfig.from_job(Job.model_validate(values)), None, torch.device("cpu"))


def make_net(num_classes: int) -> nn.Module:
    return nn.Linear(4, num_classes)


DATA = {"name": make_datasets, "loader_workers": 0, "normalize": "none"}


@pytest.mark.parametrize("loader_workers", [0, 2])
def test_samples_depend_on_the_seed_and_their_place_only(loader_workers: int) -> None:
    data = {**DATA, "loader_workers": loader_workers}
    batches = []
    for epochs in ((1, 2), (2,)):  # the second reads the second epoch first, as a resume does
        trained = reading_learner(data)
        for epoch in epochs:
            trained.begin_micro_batches(epoch, 1)
            read = trained.micro_batches_at([(0, 0), (1, 0)])
            batches.append(torch.cat([batch.x for batch in read]))
        trained.close()
    first, second, again = batches
    assert torch.equal(second, again)
    assert len(torch.cat([first, second])[:, :3].unique()) == 2 * 32 * 3


def test_a_run_in_this_process_leaves_the_random_state_as_it_was(tmp_path: Path) -> None:
    seed_all(1)
    expected = any_numbers()
    seed_all(1)
    schedule = {"policy": "schedule"}
    changes = {"data": DATA, "model": make_net, "global_batch_size": 8, "learning_rate": schedule}
    run(small_job(tmp_path, epochs=1, **changes), in_process=True)
    assert any_numbers() == expected
