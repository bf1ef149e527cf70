"""The shipped cluster files: what Ray and KubeRay accept, and what must not be missing in them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

ROOT = Path(__file__).parents[3]
CLUSTERS = ROOT / "clusters"
RAY_UP = ("onprem", "aws_8xh100", "aws_cpu_smoke", "gcp_8xh100")
KUBERAY = ("kuberay_raycluster", "kuberay_rayjob")
SPOT = ("aws_cpu_smoke",)  # say in their header that they use spot machines


def text(name: str) -> str:
    return (CLUSTERS / f"{name}.yaml").read_text(encoding="utf-8")


def load(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(text(name))
    return content


def header(name: str) -> str:
    return "".join(line for line in text(name).splitlines(True) if line.startswith("#"))


def commands(name: str, role: str) -> str:
    return "\n".join(load(name)[f"{role}_start_ray_commands"])


def cluster_spec(name: str) -> dict[str, Any]:
    spec: dict[str, Any] = load(name)["spec"]
    return spec.get("rayClusterSpec", spec)


def pods(name: str) -> Iterator[dict[str, Any]]:
    """Yield the pod specs of the head and of each group of workers."""
    spec = cluster_spec(name)
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        yield group["template"]["spec"]


def test_all_files_are_checked_here() -> None:
    assert sorted(path.stem for path in CLUSTERS.glob("*.yaml")) == sorted([*RAY_UP, *KUBERAY])


@pytest.mark.parametrize("name", RAY_UP)
def test_ray_accepts_the_file_and_keeps_its_commands(name: str) -> None:
    schema = Path(ray.__file__).parent / "autoscaler/ray-schema.json"
    jsonschema.validate(load(name), json.loads(schema.read_text()))
    prepared = prepare_config(load(name))
    validate_config(prepared)
    assert prepared["head_start_ray_commands"] == load(name)["head_start_ray_commands"]
    with pytest.raises(jsonschema.ValidationError):
        validate_config({**prepared, "worker": 2})


@pytest.mark.parametrize("name", [*RAY_UP, *KUBERAY])
def test_the_header_says_how_to_start_and_stop_it_and_what_it_costs(name: str) -> None:
    start, stop = ("ray up", "ray down") if name in RAY_UP else ("kubectl", "kubectl delete")
    assert start in header(name)
    assert re.search(rf"^# Stop: .*{stop} .*clusters/{name}\.yaml", header(name), re.MULTILINE)
    assert "# Needs: " in header(name)
    assert "# Costs: " in header(name)
    settings = yaml.safe_dump(load(name))
    uses_spot = re.search(r"MarketType: spot|provisioningModel: SPOT", settings) is not None
    assert uses_spot == (name in SPOT) == ("spot" in header(name))
    jobs = re.findall(r"jobs/[\w.]+", text(name))
    assert jobs
    assert all((ROOT / job).exists() for job in jobs)


@pytest.mark.parametrize("role", ["head", "worker"])
@pytest.mark.parametrize("name", RAY_UP)
def test_every_node_has_the_token_and_few_threads(name: str, role: str) -> None:
    """The variables reach Ray: one shell has the export and `ray start`."""
    (line,) = [c for c in load(name)[f"{role}_start_ray_commands"] if "ray start" in c]
    exports, _, _ = line.partition("ray start")
    assert "export " in exports
    for setting in ("RAY_AUTH_MODE=token", "OMP_NUM_THREADS=1"):
        assert setting in commands(name, role)
    if role == "worker" and name != "aws_cpu_smoke":
        assert "NCCL_SOCKET_IFNAME=^lo,docker" in exports
    if role == "head":
        assert "--dashboard-host=127.0.0.1" in line
        # Only this autoscaler can start Ray on machines of one's own.
        assert ("RAY_enable_autoscaler_v2=0" in exports) == (name == "onprem")


@pytest.mark.parametrize("name", RAY_UP)
def test_the_versions_are_pinned_and_what_is_installed_is_sent(name: str) -> None:
    config = load(name)
    assert "0.0.0.0" not in text(name)
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    installs = [line for line in config["setup_commands"] if "pip install" in line]
    assert any(
        line.endswith("-c ~/raytrain_opt/constraints.txt ~/raytrain_opt") for line in installs
    )
    assert all("constraints.txt" in line or "==" in line for line in installs)
    for place, source in config["file_mounts"].items():
        assert source.startswith("~") or (ROOT / source).exists(), place


@pytest.mark.parametrize("name", [name for name in RAY_UP if name != "onprem"])
def test_paid_machines_that_are_idle_are_stopped(name: str) -> None:
    config = load(name)
    assert config["idle_timeout_minutes"] <= 15
    assert config["provider"]["cache_stopped_nodes"] is False
    for node_type in config["available_node_types"].values():
        if node_type["resources"].get("GPU"):
            assert node_type["min_workers"] == 0


@pytest.mark.parametrize("name", KUBERAY)
def test_kuberay_pods_have_the_token_room_and_few_threads(name: str) -> None:
    """A pod is killed 30 s after its SIGTERM unless it says otherwise; Ray's user may use sudo."""
    spec = cluster_spec(name)
    assert spec["authOptions"] == {"mode": "token"}  # for all containers
    assert spec["autoscalerOptions"]["idleTimeoutSeconds"] <= 900
    assert all(group["minReplicas"] == 0 for group in spec["workerGroupSpecs"])
    for pod in pods(name):
        (container,) = pod["containers"]
        assert {"name": "OMP_NUM_THREADS", "value": "1"} in container["env"]
        assert "/dev/shm" in {mount["mountPath"] for mount in container["volumeMounts"]}
        assert {v["name"] for v in container["volumeMounts"]} == {
            v["name"] for v in pod["volumes"]
        }
        context = {"runAsUser": 1000, "runAsNonRoot": True, "allowPrivilegeEscalation": False}
        assert container["securityContext"] == context
    assert next(pods(name))["terminationGracePeriodSeconds"] == 120
    head = spec["headGroupSpec"]
    assert head["serviceType"] == "ClusterIP"  # not reached from outside
    if name == "kuberay_raycluster":  # waits for users
        assert head["rayStartParams"]["dashboard-host"] == "127.0.0.1"
    (version,) = re.findall(r"^ray==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert spec["rayVersion"] == version
    assert f"rayproject/ray:{version}-" in (CLUSTERS / "Dockerfile").read_text()
