"""The cluster of a plan: nodes, devices, links and price.

Figures of devices and links are the makers' (data sheets of the SXM versions; networks of DGX-1,
DGX A100 and DGX H100), of which programs reach a part (`LINK_FRACTION`, and those of `terms`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import log2
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from raytrain_opt.config.section import PositiveFloat, PositiveInt, Section
from raytrain_opt.config.yaml_loader import read_yaml
from raytrain_opt.errors import JobError, Problem
from raytrain_opt.storage import read_file

# Part of a link's bandwidth that a large all-reduce of NCCL reaches.
LINK_FRACTION = 0.8


@dataclass(frozen=True)
class Device:
    """Public figures of a device."""

    memory_gib: float
    fp32: float  # TFLOP/s, with TF32
    half: float  # TFLOP/s, of 16 bits
    memory_gb_s: float
    link_gb_s: float  # to its node's other devices, in one direction
    network_gb_s: float  # of a node of eight
    has_bf16: bool = True


DEVICES = {
    "P100": Device(16, 10.6, 21.2, 732, 80, 50, has_bf16=False),
    "V100": Device(32, 15.7, 125, 900, 150, 50, has_bf16=False),
    "A100": Device(80, 156, 312, 2039, 300, 200),
    "H100": Device(80, 494, 989, 3350, 450, 400),
    "H200": Device(141, 494, 989, 4800, 450, 400),
}
# What gloo reaches between processes; a plan on CPU should give the figures of `doctor`.
_CPU_LINK_GB_S = 1.0


class ClusterSection(Section):
    """A cluster of equal nodes. Links are given as what an all-reduce reaches."""

    nodes: PositiveInt
    devices: PositiveInt = Field(description="GPUs of a node; with kind CPU its cores.")
    kind: Literal["P100", "V100", "A100", "H100", "H200", "CPU"]
    link_gb_s: PositiveFloat | None = Field(None, description="Of a device, within a node.")
    link_latency_us: PositiveFloat = Field(5.0, description="Of one message, within a node.")
    network_gb_s: PositiveFloat | None = Field(None, description="Of a node, to other nodes.")
    network_latency_us: PositiveFloat = Field(10.0, description="Of one message between nodes.")
    memory_gib: PositiveFloat | None = Field(None, description="Of a device.")
    loader_samples_per_s: PositiveFloat | None = Field(
        None, description="What the loaders of a node deliver; default: no limit."
    )
    price_per_node_hour: PositiveFloat | None = Field(None, description="In any currency.")

    @property
    def device(self) -> Device | None:
        """Public figures of the devices; None for CPUs, which differ too much."""
        return DEVICES.get(self.kind)

    @property
    def size(self) -> int:
        """Devices of all nodes."""
        return self.nodes * self.devices

    @property
    def memory_bytes(self) -> float:
        """Memory of a device; infinite when unknown."""
        default = self.device.memory_gib if self.device else float("inf")
        return (self.memory_gib or default) * 2**30

    @property
    def resources(self) -> list[dict[str, float]]:
        """What Ray would offer on each node."""
        if self.device is None:
            return [{"CPU": self.devices}] * self.nodes
        return [{"GPU": self.devices, "CPU": 8 * self.devices}] * self.nodes

    def nodes_of(self, workers: int) -> int:
        """Return how many nodes the workers use; beyond all devices, they share cores (CPU)."""
        return min(self.nodes, -(-workers // self.devices))

    def exchange_s(self, size_bytes: float, messages: int, workers: int) -> float:
        """Return the seconds of all-reduces of `size_bytes` in all.

        First within each node, then between nodes: 2 (n - 1) / n of the data over each link, and
        2 log2(n) latencies for each message.
        """
        nodes = self.nodes_of(workers)
        in_node = -(-workers // nodes)
        device = self.device
        link = self.link_gb_s or (device.link_gb_s * LINK_FRACTION if device else _CPU_LINK_GB_S)
        network = self.network_gb_s or (
            device.network_gb_s * LINK_FRACTION * self.devices / 8 if device else _CPU_LINK_GB_S
        )
        latency_s = 2e-6 * (
            self.link_latency_us * log2(in_node) + self.network_latency_us * log2(nodes)
        )
        transfer_s = (in_node - 1) / in_node / link + (nodes - 1) / nodes / network
        return messages * latency_s + 2e-9 * size_bytes * transfer_s


def read_cluster(text: str) -> ClusterSection:
    """Return the cluster of `NODESxDEVICESxKIND`, or of a YAML file. Raises JobError."""
    match = re.fullmatch(r"(\d+)x(\d+)x(\w+)", text)
    try:
        if match:
            values = dict(zip(("nodes", "devices", "kind"), match.groups(), strict=True))
        else:
            values = read_yaml(read_file(Path(text)).decode(), text)
        return ClusterSection.model_validate(values)
    except ValidationError as error:
        problems = [
            Problem(".".join(map(str, e["loc"])) or "the file", e["msg"], repr(e["input"]))
            for e in error.errors(include_url=False)
        ]
        raise JobError(problems, text) from error
    except (OSError, UnicodeDecodeError) as error:
        rule = "must be NODESxDEVICESxKIND, such as 8x8xH100, or a YAML file that can be read"
        raise JobError([Problem("--cluster", rule, repr(text))], text) from error
