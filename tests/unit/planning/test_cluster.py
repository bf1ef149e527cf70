from __future__ import annotations

from pathlib import Path

import pytest

from raytrain_opt.errors import JobError
from raytrain_opt.planning.cluster import ClusterSection, read_cluster


def test_a_cluster_in_three_words() -> None:
    cluster = read_cluster("8x4xH100")
    assert (cluster.nodes, cluster.devices, cluster.kind, cluster.size) == (8, 4, "H100", 32)
    assert cluster.memory_bytes == 80 * 2**30


def test_a_file_gives_bandwidths_and_price(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("{nodes: 2, devices: 8, kind: V100, network_gb_s: 5, price_per_node_hour: 9}")
    cluster = read_cluster(str(path))
    assert (cluster.network_gb_s, cluster.price_per_node_hour) == (5, 9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8x8xB9000", r"kind: .*'H100'"),
        ("0x8xH100", "nodes: .*greater than 0"),
        ("8xH100", r"--cluster: must be NODESxDEVICESxKIND, .* a YAML file"),
    ],
)
def test_a_wrong_cluster_names_the_field(text: str, message: str) -> None:
    with pytest.raises(JobError, match=message):
        read_cluster(text)


def test_an_unknown_key_of_a_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("{nodes: 2, devices: 8, kind: V100, bandwidth: 5}")
    with pytest.raises(JobError, match="bandwidth: Extra inputs"):
        read_cluster(str(path))


def test_an_exchange_takes_the_time_of_a_ring_in_each_node_and_between_nodes() -> None:
    given = {"nodes": 4, "devices": 2, "kind": "H100", "link_gb_s": 10, "network_gb_s": 2}
    cluster = ClusterSection(**given, link_latency_us=3, network_latency_us=50)
    assert cluster.exchange_s(1e9, 1, 1) == 0
    # Two workers of one node: 2 x 1/2 x 1 GB / 10 GB/s, and 2 x log2(2) x 3 us.
    assert cluster.exchange_s(1e9, 1, 2) == pytest.approx(0.1 + 6e-6)
    # Four nodes of two: also 2 x 3/4 x 1 GB / 2 GB/s, and 2 x log2(4) x 50 us.
    assert cluster.exchange_s(1e9, 3, 8) == pytest.approx(0.1 + 0.75 + 3 * (6e-6 + 200e-6))
