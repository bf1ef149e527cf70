"""One process on a GPU: training, moving the state, the data kept on the device. No Ray."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from raytrain_opt.config.schema import Job
from raytrain_opt.data import load_shared_data
from raytrain_opt.results import Steps
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.learner_config import LearnerConfig
from raytrain_opt.train.micro_batches import MicroBatches

# The compiler and the debug mode warn about themselves, each version of torch differently.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

ONE = MicroBatches(range(1), 1)
CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def learner(device: torch.device, **changes: Any) -> Learner:
    values = {
        "model": "small_cnn",
        "data": {"name": "digits", "augment": {"crop_padding": 1, "flip": True}},
        "epochs": 2,
        "global_batch_size": 64,
    }
    job = Job.model_validate(values | changes)
    return Learner(LearnerConfig.from_job(job), load_shared_data(job.data), device)


@pytest.mark.parametrize("precision", ["auto", "fp32", "fp32_strict", "bf16", "fp16"])
def test_digits_are_learned(precision: str) -> None:
    plain: dict[str, Any] = {"data": "digits", "optimizer": "SGD", "average": None}
    on_gpu = learner(CUDA, precision=precision, **plain)
    steps = on_gpu.info.steps_per_epoch(64)
    for epoch in range(1, 7):
        totals = on_gpu.train(epoch, Steps(0, (0.1,) * steps), ONE)
    assert totals.samples == steps * 64
    assert on_gpu.evaluate("test").means["accuracy"] > 0.9


@pytest.mark.parametrize("mode", ["default", "max-autotune"])
def test_a_compiled_model_trains_as_an_eager_one(mode: str) -> None:
    strict: dict[str, Any] = {"precision": "fp32_strict", "optimizer": "SGD", "average": None}
    losses = [
        learner(CUDA, compile=setting, **strict).train(1, Steps(0, (0.1,) * 5), ONE).loss
        for setting in ("none", mode)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize("channels_last", [True, False])
def test_a_state_moves_bit_exactly(channels_last: bool) -> None:
    first = learner(CUDA, channels_last=channels_last)
    first.train(1, Steps(0, (0.1,) * 5), ONE)
    state = first.state(copy=False)
    second = learner(CUDA, channels_last=channels_last, seed=1)
    second.load(state)
    assert second.state(copy=False).digest() == state.digest()


def images() -> tuple[TensorDataset, TensorDataset]:
    x = torch.arange(512 * 64).reshape(512, 1, 8, 8).to(torch.uint8)
    return TensorDataset(x, torch.arange(512) % 2), TensorDataset(x[:9], torch.arange(9) % 2)


@pytest.mark.parametrize("changes", [{}, {"data": {"name": images, "num_classes": 2}}])
def test_the_batches_equal_those_on_the_cpu(changes: dict[str, Any]) -> None:
    """Digits lie on the GPU; those of a Dataset are copied on a stream of their own."""
    on_gpu, on_cpu = learner(CUDA, **changes), learner(CPU, **changes)
    batches = zip(
        on_gpu.data.train_batches(1, product(range(3), range(2)), 2, 64),
        on_cpu.data.train_batches(1, product(range(3), range(2)), 2, 64),
        strict=True,
    )
    for gpu, cpu in batches:
        assert gpu.x.is_cuda
        assert torch.equal(gpu.y.cpu(), cpu.y)
        torch.testing.assert_close(gpu.x.cpu(), cpu.x)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"data": {"name": "digits", "augment": {"mixup": 0.5}}},
        {"optimizer": {"name": "SGD", "clip_norm": 0.1}, "precision": "fp16"},
    ],
    ids=str,
)
def test_no_step_waits_for_the_device(changes: dict[str, Any]) -> None:
    on_gpu = learner(CUDA, **changes)
    on_gpu.train(1, Steps(0, (0.1,) * 3), ONE)
    try:
        torch.cuda.set_sync_debug_mode("warn")
        with pytest.warns(UserWarning, match="synchroniz") as caught:
            on_gpu.train(1, Steps(3, (0.1,) * 8), ONE)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # The sums are read once, at the end; copies of batches come from pinned memory.
    assert len(caught) <= 2


def test_released_memory_is_free_for_the_other_pool() -> None:
    on_gpu = learner(CUDA)
    on_gpu.train(1, Steps(0, (0.1,) * 3), ONE)
    before = torch.cuda.memory_reserved()
    on_gpu.release_memory()
    assert torch.cuda.memory_reserved() <= before
