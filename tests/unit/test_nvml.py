"""The right GPU, and clear words where NVML cannot watch it; against a fake of `pynvml`."""

# ruff: noqa: N802 - the fake has pynvml's names

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from raytrain_opt.errors import ResourcesError
from raytrain_opt.monitoring import NvmlSampler, gpu_names

CPU_INSTEAD = "batch_size_search.utilization.sampler: cpu"
H100 = "NVIDIA H100"
A, B, C = (
    "GPU-aaaa1111-0000-0000-0000-000000000000",
    "GPU-aaaa2222-0000-0000-0000-000000000000",
    "GPU-cccc3333-0000-0000-0000-000000000000",
)


class NVMLError(Exception):
    """As in pynvml: every error of NVML is one of these."""


_KINDS = ("LibraryNotFound", "NotSupported", "NotFound", "NoPermission", "GpuIsLost")
ERRORS = {kind: type(f"NVMLError_{kind}", (NVMLError,), {}) for kind in _KINDS}


@dataclass
class FakeGpu:
    uuid: str
    name: str = H100
    busy: int = 0
    allowed: bool = True
    reports: bool = True


class FakeNvml(ModuleType):
    """NVML of one machine: GPUs in its own order."""

    def __init__(self, *gpus: FakeGpu, driver: bool = True) -> None:
        super().__init__("pynvml")
        self.NVMLError = NVMLError
        self.__dict__.update({error.__name__: error for error in ERRORS.values()})
        self.gpus, self.driver, self.lost = gpus, driver, False

    def nvmlInit(self) -> None:
        if not self.driver:
            raise ERRORS["LibraryNotFound"]

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        if not self.gpus[index].allowed:
            raise ERRORS["NoPermission"]
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:
        for gpu in self.gpus:
            if gpu.uuid == uuid:
                return gpu
        raise ERRORS["NotFound"]

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> str:
        if self.lost:
            raise ERRORS["GpuIsLost"]("GPU is lost")
        return gpu.name

    def nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu) -> SimpleNamespace:
        if self.lost:
            raise ERRORS["GpuIsLost"]("GPU is lost")
        if not gpu.reports:
            raise ERRORS["NotSupported"]
        return SimpleNamespace(gpu=gpu.busy, memory=0)


Machine = Callable[..., FakeNvml]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    def install(*gpus: FakeGpu, **values: Any) -> FakeNvml:
        nvml = FakeNvml(*gpus, **values)
        monkeypatch.setattr("raytrain_opt.monitoring.pynvml", nvml)
        return nvml

    return install


def test_the_fake_has_only_what_the_library_has() -> None:
    import pynvml

    ours = [name for name in vars(FakeNvml) if name.startswith("nvml")]
    assert len(ours) > 5
    assert [name for name in ours if not hasattr(pynvml, name)] == []
    for error in ERRORS.values():
        assert issubclass(getattr(pynvml, error.__name__), pynvml.NVMLError)


@pytest.mark.parametrize("uuid", [C, C.removeprefix("GPU-")])
def test_a_gpu_is_found_by_its_uuid(machine: Machine, uuid: str) -> None:
    machine(FakeGpu(A, busy=5), FakeGpu(B), FakeGpu(C, busy=12))
    sampler = NvmlSampler(uuid)
    assert (sampler.uuid, sampler()) == (C, 12.0)


@pytest.mark.parametrize(
    ("gpu", "words"),
    [(FakeGpu(B), f"open {A}"), (FakeGpu(A, reports=False), f"utilization of {A}")],
    ids=["unknown", "does not report"],
)
def test_a_gpu_that_nvml_cannot_watch_is_refused_at_once(
    machine: Machine, gpu: FakeGpu, words: str
) -> None:
    """A MIG instance has a UUID of its own, which torch writes like that of a GPU."""
    machine(gpu)
    with pytest.raises(ResourcesError, match=f"{words}.*MIG instance.*{CPU_INSTEAD}"):
        NvmlSampler(A)


def test_without_a_driver_the_message_is_clear(machine: Machine) -> None:
    machine(driver=False)
    with pytest.raises(ResourcesError, match=f"NVIDIA driver.*{CPU_INSTEAD}"):
        NvmlSampler(A)


def test_an_error_on_the_way_is_explained(machine: Machine) -> None:
    nvml = machine(FakeGpu(A))
    sampler = NvmlSampler(A)
    nvml.lost = True
    with pytest.raises(ResourcesError, match=f"utilization of {A}: GPU is lost"):
        sampler()


def test_all_usable_gpus_have_names(machine: Machine) -> None:
    machine(FakeGpu(A), FakeGpu(B), FakeGpu(C, allowed=False))
    assert gpu_names() == [H100, H100]
    machine(driver=False)
    assert gpu_names() == []


def test_a_lost_gpu_is_an_error_that_says_so(machine: Machine) -> None:
    nvml = machine(FakeGpu(A))
    nvml.lost = True
    with pytest.raises(ResourcesError, match="NVML cannot read the GPUs: GPU is lost"):
        gpu_names()
