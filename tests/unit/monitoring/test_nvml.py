"""The right GPU, and clear words where NVML cannot watch it; against a fake of `pynvml`."""

# ruff: noqa: N802 - the fake has pynvml's names

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from raytrain_opt.errors import ResourcesError
from raytrain_opt.monitoring.nvml import NvmlSampler, gpu_states

CPU_INSTEAD = "batch_size_search.utilization.sampler: cpu"
H100, A100 = "NVIDIA H100", "NVIDIA A100"
A, B, C = (
    "GPU-aaaa1111-0000-0000-0000-000000000000",
    "GPU-aaaa2222-0000-0000-0000-000000000000",
    "GPU-cccc3333-0000-0000-0000-000000000000",
)
MIG = "MIG-dddd4444-0000-0000-0000-000000000000"


class NVMLError(Exception):
    """As in pynvml: every error of NVML is one of these."""


_KINDS = (
    "LibraryNotFound",
    "NotSupported",
    "NotFound",
    "InvalidArgument",
    "NoPermission",
    "GpuIsLost",
)
ERRORS = {kind: type(f"NVMLError_{kind}", (NVMLError,), {}) for kind in _KINDS}


@dataclass
class FakeGpu:
    uuid: str
    name: str = H100
    busy: int = 0
    energy_mj: int | None = 0
    allowed: bool = True
    reports: bool = True
    pids: tuple[int, ...] = ()


class FakeNvml(ModuleType):
    """NVML of one machine: GPUs in its own order, and how often it was started."""

    def __init__(self, *gpus: FakeGpu, driver: bool = True) -> None:
        super().__init__("pynvml")
        self.NVMLError = NVMLError
        self.__dict__.update({error.__name__: error for error in ERRORS.values()})
        self.gpus, self.driver, self.started, self.lost = gpus, driver, 0, False

    def nvmlInit(self) -> None:
        if not self.driver:
            raise ERRORS["LibraryNotFound"]
        self.started += 1

    def nvmlShutdown(self) -> None:
        self.started -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        if not self.gpus[index].allowed:
            raise ERRORS["NoPermission"]
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> object:
        if uuid != MIG:
            raise ERRORS["NotFound"]
        return object()

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:
        return gpu.uuid

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> str:
        return gpu.name

    def nvmlSystemGetDriverVersion(self) -> str:
        return "595.58.03"

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu) -> SimpleNamespace:
        return SimpleNamespace(total=80 * 1024**3, used=len(gpu.pids) * 1024**3)

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: FakeGpu) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid) for pid in gpu.pids]

    def nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu) -> SimpleNamespace:
        if self.lost:
            raise ERRORS["GpuIsLost"]("GPU is lost")
        if not gpu.reports:
            raise ERRORS["NotSupported"]
        return SimpleNamespace(gpu=gpu.busy, memory=0)

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: FakeGpu) -> int:
        if gpu.energy_mj is None:
            raise ERRORS["NotSupported"]
        return gpu.energy_mj


Machine = Callable[..., FakeNvml]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    def install(*gpus: FakeGpu, **values: Any) -> FakeNvml:
        nvml = FakeNvml(*gpus, **values)
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        return nvml

    return install


def test_the_fake_has_only_what_the_library_has() -> None:
    import pynvml

    ours = [name for name in vars(FakeNvml) if name.startswith("nvml")]
    assert len(ours) > 5
    assert [name for name in ours if not hasattr(pynvml, name)] == []
    for error in ERRORS.values():
        assert issubclass(getattr(pynvml, error.__name__), pynvml.NVMLError)


@pytest.mark.parametrize(
    ("visible", "ordinal", "expected"),
    [
        (None, 0, A),
        (None, 2, C),
        ("2,0", 0, C),
        ("2,0", 1, A),
        (" 1 , 2", 1, C),
        ("1,-1,2", 0, B),
        (f"{C},{A}", 0, C),
        (f"{C},{A}", 1, A),
        ("GPU-aaaa2", 0, B),
        ("GPU-cccc,GPU-aaaa1", 1, A),
        ("GPU-CCCC", 0, C),
    ],
)
def test_cudas_device_is_found_among_equal_gpus(
    machine: Machine, visible: str | None, ordinal: int, expected: str
) -> None:
    machine(FakeGpu(A), FakeGpu(B), FakeGpu(C))
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert NvmlSampler.open(ordinal, environ=environ).uuid == expected


def test_the_environment_is_that_of_the_process(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(FakeGpu(A), FakeGpu(B))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert NvmlSampler.open().uuid == B


@pytest.mark.parametrize("uuid", [C, C.removeprefix("GPU-")])
@pytest.mark.parametrize("visible", ["0,1", "", "GPU-aaaa1"])
def test_a_uuid_decides_whatever_the_numbers_say(
    machine: Machine, visible: str, uuid: str
) -> None:
    machine(FakeGpu(A, A100), FakeGpu(B, A100), FakeGpu(C, H100))
    environ = {"CUDA_VISIBLE_DEVICES": visible}
    assert NvmlSampler.open(0, uuid, environ).uuid == C


def test_the_sample_and_the_energy_are_of_that_gpu(machine: Machine) -> None:
    machine(FakeGpu(A, busy=5, energy_mj=1), FakeGpu(B, busy=83, energy_mj=12_500))
    sampler = NvmlSampler.open(uuid=B)
    assert sampler.sample() == 83.0
    assert sampler.energy_j() == 12.5


def test_the_number_of_unequal_gpus_counts_only_in_the_order_of_the_bus(machine: Machine) -> None:
    machine(FakeGpu(A, A100), FakeGpu(B, H100))
    with pytest.raises(ResourcesError, match=f"CUDA_DEVICE_ORDER=PCI_BUS_ID.*{CPU_INSTEAD}"):
        NvmlSampler.open(0, environ={"CUDA_VISIBLE_DEVICES": "1,0"})
    environ = {"CUDA_VISIBLE_DEVICES": "1,0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert NvmlSampler.open(0, environ=environ).uuid == B
    assert NvmlSampler.open(0, environ={"CUDA_VISIBLE_DEVICES": B}).uuid == B


def test_gpus_that_the_process_may_not_use_do_not_count(machine: Machine) -> None:
    machine(FakeGpu(A, A100, allowed=False), FakeGpu(B))
    assert NvmlSampler.open(environ={}).uuid == B


@pytest.mark.parametrize(
    ("visible", "ordinal", "words"),
    [
        ("", 0, "CUDA device 0 is not among"),
        ("-1", 0, "CUDA device 0 is not among CUDA_VISIBLE_DEVICES=-1"),
        ("1,-1,0", 1, "CUDA device 1 is not among"),
        ("0", 1, "CUDA device 1 is not among"),
        ("0x,0", 0, "CUDA device 0 is not among"),
        ("7", 0, "no GPU number 7, only .*aaaa1111.*aaaa2222"),
        (None, 2, "no GPU number 2"),
        ("GPU-aaaa", 0, "several GPUs of .* match GPU-aaaa;"),
        ("GPU-ffff", 0, "no GPU of .* match"),
    ],
)
def test_a_device_that_is_not_there_is_named(
    machine: Machine, visible: str | None, ordinal: int, words: str
) -> None:
    nvml = machine(FakeGpu(A), FakeGpu(B))
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    with pytest.raises(ResourcesError, match=f"{words}.*{CPU_INSTEAD}"):
        NvmlSampler.open(ordinal, environ=environ)
    assert nvml.started == 0


@pytest.mark.parametrize(
    ("visible", "uuid"),
    [
        (MIG, None),
        (f"MIG-{A}/1/0", None),
        (MIG, A),
        ("0", MIG),
        ("0", MIG.removeprefix("MIG-")),
    ],
)
def test_a_mig_instance_is_refused(machine: Machine, visible: str, uuid: str | None) -> None:
    machine(FakeGpu(A))
    with pytest.raises(ResourcesError, match=f"MIG instance.*{CPU_INSTEAD}.*GPU without MIG"):
        NvmlSampler.open(0, uuid, {"CUDA_VISIBLE_DEVICES": visible})


def test_a_gpu_that_does_not_report_is_refused_at_once(machine: Machine) -> None:
    nvml = machine(FakeGpu(A, reports=False))
    with pytest.raises(ResourcesError, match=f"does not support it.*MIG.*{CPU_INSTEAD}") as caught:
        NvmlSampler.open(environ={})
    assert H100 in str(caught.value)
    assert nvml.started == 0


def test_energy_is_none_where_the_gpu_does_not_count_it(machine: Machine) -> None:
    machine(FakeGpu(A, energy_mj=None))
    assert NvmlSampler.open(environ={}).energy_j() is None


def test_without_a_driver_the_message_is_clear(machine: Machine) -> None:
    machine(driver=False)
    with pytest.raises(ResourcesError, match=f"NVIDIA driver.*{CPU_INSTEAD}"):
        NvmlSampler.open(environ={})


def test_an_error_on_the_way_is_explained(machine: Machine) -> None:
    nvml = machine(FakeGpu(A))
    sampler = NvmlSampler.open(environ={})
    nvml.lost = True
    with pytest.raises(ResourcesError, match=f"utilization of {H100} .*GPU is lost"):
        sampler.sample()


def test_closing_leaves_nvml_once(machine: Machine) -> None:
    nvml = machine(FakeGpu(A))
    first, second = NvmlSampler.open(environ={}), NvmlSampler.open(environ={})
    assert nvml.started == 2
    first.close()
    first.close()
    assert nvml.started == 1
    second.close()
    assert nvml.started == 0


def test_the_states_of_all_gpus_name_their_processes(machine: Machine) -> None:
    nvml = machine(
        FakeGpu(A, pids=(os.getpid(), 2**22 + 1)), FakeGpu(B), FakeGpu(C, allowed=False)
    )
    driver, states = gpu_states()
    assert driver == "595.58.03"
    (name, memory_mib, used_mib, processes), idle = states
    assert (name, memory_mib, used_mib) == (H100, 80 * 1024, 2 * 1024)
    assert processes[0].endswith(f"(process {os.getpid()})")
    assert processes[1] == f"process {2**22 + 1}"  # of another container
    assert idle == (H100, 80 * 1024, 0, ())
    assert nvml.started == 0


def test_a_machine_without_a_driver_has_no_gpus(machine: Machine) -> None:
    machine(driver=False)
    assert gpu_states() == (None, [])
