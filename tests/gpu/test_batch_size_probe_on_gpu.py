"""Batch-size probes on a GPU: times of the device, memory that runs out, nothing left behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from raytrain_opt.config.batch_size import ThroughputKneeSearch
from raytrain_opt.train.batch_size_finder import MinibatchSizeOptimizer, endless_batches
from raytrain_opt.train.batch_size_probe import ProbedTraining, measure, open_probe_sampler

# The compiler and the debug mode warn about themselves, each version of torch differently.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

CUDA = torch.device("cuda")
SECTION = ThroughputKneeSearch(strategy="throughput_knee", max_probe_s=1.0)


def network() -> nn.Module:
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(64, 64, 3, padding=1, bias=False) for _ in range(4)]
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1)]
    for convolution in convolutions:
        layers += [convolution, nn.BatchNorm2d(64), nn.ReLU()]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(*layers).to(CUDA)


def data(samples: int) -> TensorDataset:
    """One image, repeated any number of times without taking memory for it."""
    x = torch.randn(1, 3, 64, 64).expand(samples, -1, -1, -1)
    return TensorDataset(x, torch.zeros(samples, dtype=torch.int64))


def probed(samples: int = 4096) -> ProbedTraining:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return ProbedTraining(
        model,
        optimizer,
        lambda batch: nn.functional.cross_entropy(model(batch.x), batch.y),
        endless_batches(data(samples), CUDA, {}),
        CUDA,
        lambda: torch.autocast("cuda", dtype=torch.bfloat16),
        torch.amp.GradScaler("cuda", enabled=False),
    )


def test_parts_are_the_devices_and_add_up() -> None:
    training = probed()
    sampler = open_probe_sampler(SECTION, CUDA, threads=1)
    probe = measure(training, 128, SECTION, sampler)
    assert probe.status == "ok"
    assert probe.duration_s == pytest.approx(sum(probe.timings_s.values()) * probe.steps)
    assert probe.timings_s["backward_s"] > probe.timings_s["forward_s"] / 4 > 0
    assert 0 <= probe.utilization_pct <= 100  # NVML averages over up to a second
    assert probe.peak_memory_mib > 128 * 64 * 64 * 64 * 2 / 1024**2


def test_running_out_of_memory_is_a_result_and_gives_it_back() -> None:
    total = torch.cuda.get_device_properties(CUDA).total_memory
    too_large = 2 * total // (64 * 64 * 64 * 2)  # twice the device in one layer's output
    training = probed(samples=too_large)
    before = {name: value.clone() for name, value in training.model.state_dict().items()}
    free = torch.cuda.mem_get_info()[0]
    sampler = open_probe_sampler(SECTION, CUDA, threads=1)
    training.batches = lambda size, on_copy: iter(_on_device(size, on_copy))
    assert measure(training, too_large, SECTION, sampler).status == "out_of_memory"
    assert torch.cuda.mem_get_info()[0] > free - 512 * 1024**2
    assert all(
        torch.equal(value, before[name]) for name, value in training.model.state_dict().items()
    )
    training.batches = probed().batches
    assert measure(training, 32, SECTION, sampler).status == "ok"


def _on_device(size: int, on_copy: object) -> list[object]:
    from raytrain_opt.data.base import Batch

    assert callable(on_copy)
    on_copy()
    x = torch.randn(1, 3, 64, 64, device=CUDA).expand(size, -1, -1, -1)
    return [Batch(x, torch.zeros(size, dtype=torch.int64, device=CUDA))] * 100


def test_a_search_ends_with_a_size_that_fits_and_restores_the_rng() -> None:
    training = probed()
    torch.cuda.manual_seed(5)
    expected = torch.rand(3, device=CUDA)
    torch.cuda.manual_seed(5)
    search = MinibatchSizeOptimizer(max_probe_s=0.5, max_batch_size=1024)
    chosen = search.apply(
        training.model, training.optimizer, data(2048), autocast=training.autocast
    )
    assert torch.equal(torch.rand(3, device=CUDA), expected)
    assert chosen.batch_size in {probe.batch_size for probe in chosen.probes}
