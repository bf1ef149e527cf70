"""The shipped cluster files: what Ray and KubeRay accept, and what must not be missing in them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
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


def _fields(names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split())


# Fields of KubeRay's types, ray.io/v1 (1.7.0), and of the Kubernetes objects in them as
# far as these files need them. A name maps to what is inside, or to None where anything may be.
_CONTAINER = _fields("name image env resources securityContext volumeMounts")
_POD = {
    **_fields("metadata"),
    "spec": {
        "containers": [_CONTAINER],
        **_fields(
            "nodeSelector serviceAccountName terminationGracePeriodSeconds tolerations volumes"
        ),
    },
}
_CLUSTER_SPEC = {
    "authOptions": _fields("mode secretName enableK8sTokenAuth"),
    "autoscalerOptions": _fields(
        "env envFrom idleTimeoutSeconds image imagePullPolicy resources securityContext "
        "upscalingMode version volumeMounts"
    ),
    "headGroupSpec": {
        "template": _POD,
        **_fields("enableIngress headService labels rayStartParams resources serviceType"),
    },
    "workerGroupSpecs": [
        {
            "template": _POD,
            **_fields(
                "groupName idleTimeoutSeconds labels maxReplicas minReplicas numOfHosts "
                "rayStartParams replicas resources scaleStrategy suspend"
            ),
        }
    ],
    **_fields(
        "enableInTreeAutoscaling gcsFaultToleranceOptions headServiceAnnotations managedBy "
        "rayVersion suspend upgradeStrategy"
    ),
}
_JOB_SPEC = {
    "rayClusterSpec": _CLUSTER_SPEC,
    **_fields(
        "activeDeadlineSeconds backoffLimit clusterSelector deletionStrategy entrypoint "
        "entrypointNumCpus entrypointNumGpus entrypointResources jobId managedBy metadata "
        "preRunningDeadlineSeconds runtimeEnvYAML shutdownAfterJobFinishes submissionMode "
        "submitterConfig submitterPodTemplate suspend ttlSecondsAfterFinished"
    ),
}
KINDS = {"RayCluster": _CLUSTER_SPEC, "RayJob": _JOB_SPEC}


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


def unknown_fields(value: Any, allowed: Any, path: str = "spec") -> list[str]:
    """Return the paths of fields that the type does not have."""
    if isinstance(allowed, list):
        nested = [unknown_fields(x, allowed[0], f"{path}.{i}") for i, x in enumerate(value)]
        return [name for names in nested for name in names]
    if not isinstance(allowed, Mapping):
        return []
    unknown = [f"{path}.{name}" for name in value if name not in allowed]
    nested = [unknown_fields(value[k], allowed[k], f"{path}.{k}") for k in value if k in allowed]
    return unknown + [name for names in nested for name in names]


def test_all_files_are_checked_here() -> None:
    assert sorted(path.stem for path in CLUSTERS.glob("*.yaml")) == sorted([*RAY_UP, *KUBERAY])


@pytest.mark.parametrize("name", RAY_UP)
def test_the_file_fits_rays_schema(name: str) -> None:
    schema = Path(ray.__file__).parent / "autoscaler/ray-schema.json"
    jsonschema.validate(load(name), json.loads(schema.read_text()))


@pytest.mark.parametrize("name", RAY_UP)
def test_ray_accepts_it_with_its_defaults(name: str) -> None:
    prepared = prepare_config(load(name))
    validate_config(prepared)
    assert prepared["head_start_ray_commands"] == load(name)["head_start_ray_commands"]


def test_rays_schema_finds_a_wrong_field() -> None:
    with pytest.raises(jsonschema.ValidationError):
        validate_config({**prepare_config(load("onprem")), "worker": 2})


@pytest.mark.parametrize("name", [*RAY_UP, *KUBERAY])
def test_the_header_says_how_to_start_and_stop_it_and_what_it_costs(name: str) -> None:
    start, stop = ("ray up", "ray down") if name in RAY_UP else ("kubectl", "kubectl delete")
    assert start in header(name)
    assert re.search(rf"^# Stop: .*{stop} .*clusters/{name}\.yaml", header(name), re.MULTILINE)
    assert "# Needs: " in header(name)
    assert "# Costs: " in header(name)


@pytest.mark.parametrize("role", ["head", "worker"])
@pytest.mark.parametrize("name", RAY_UP)
def test_every_node_has_the_token_and_few_threads(name: str, role: str) -> None:
    assert "RAY_AUTH_MODE=token" in commands(name, role)
    assert load(name)["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    assert "OMP_NUM_THREADS=1" in commands(name, role)


@pytest.mark.parametrize("name", RAY_UP)
def test_the_dashboard_listens_on_loopback(name: str) -> None:
    assert "--dashboard-host=127.0.0.1" in commands(name, "head")
    assert "0.0.0.0" not in text(name)


@pytest.mark.parametrize("name", RAY_UP)
def test_the_versions_are_pinned_and_what_is_installed_is_sent(name: str) -> None:
    config = load(name)
    installs = [line for line in config["setup_commands"] if "pip install" in line]
    assert any(
        line.endswith("-c ~/raytrain_opt/constraints.txt ~/raytrain_opt") for line in installs
    )
    assert all("constraints.txt" in line or "==" in line for line in installs)
    for place, source in config["file_mounts"].items():
        assert source.startswith("~") or (ROOT / source).exists(), place


@pytest.mark.parametrize("name", RAY_UP)
def test_exported_variables_reach_ray(name: str) -> None:
    """One shell for the export and for `ray start`."""
    for role in ("head", "worker"):
        (line,) = [c for c in load(name)[f"{role}_start_ray_commands"] if "ray start" in c]
        assert line.index("export ") < line.index("ray start")


def test_own_machines_are_joined_by_the_autoscaler_that_can() -> None:
    assert "RAY_enable_autoscaler_v2=0" in commands("onprem", "head")


@pytest.mark.parametrize("name", [name for name in RAY_UP if name != "onprem"])
def test_paid_machines_that_are_idle_are_stopped(name: str) -> None:
    config = load(name)
    assert config["idle_timeout_minutes"] <= 15
    assert config["provider"]["cache_stopped_nodes"] is False
    for node_type in config["available_node_types"].values():
        if node_type["resources"].get("GPU"):
            assert node_type["min_workers"] == 0


@pytest.mark.parametrize("name", [*RAY_UP, *KUBERAY])
def test_spot_machines_are_announced_in_the_header(name: str) -> None:
    uses = re.search(r"MarketType: spot|provisioningModel: SPOT", _without_comments(name))
    assert (uses is not None) == (name in SPOT)
    if name in SPOT:
        assert "spot" in header(name)


def _without_comments(name: str) -> str:
    return yaml.safe_dump(load(name))


@pytest.mark.parametrize("name", ["aws_8xh100", "gcp_8xh100", "onprem"])
def test_nccl_leaves_loopback_alone(name: str) -> None:
    assert "NCCL_SOCKET_IFNAME=^lo,docker" in commands(name, "worker")


@pytest.mark.parametrize("name", KUBERAY)
def test_kuberay_knows_every_field(name: str) -> None:
    content = load(name)
    assert content["apiVersion"] == "ray.io/v1"
    assert set(content) == {"apiVersion", "kind", "metadata", "spec"}
    assert unknown_fields(content["spec"], KINDS[content["kind"]]) == []


def test_a_field_that_kuberay_has_not_is_found() -> None:
    spec = cluster_spec("kuberay_raycluster")
    spec["workerGroupSpecs"][0]["minWorkers"] = 1
    assert unknown_fields(spec, _CLUSTER_SPEC) == ["spec.workerGroupSpecs.0.minWorkers"]


@pytest.mark.parametrize("name", KUBERAY)
def test_kuberay_pods_have_the_token_room_and_few_threads(name: str) -> None:
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


@pytest.mark.parametrize("name", KUBERAY)
def test_kuberays_head_may_finish_a_checkpoint_and_no_pod_gains_privileges(name: str) -> None:
    """A pod is killed 30 s after its SIGTERM unless it says otherwise; Ray's user may use sudo."""
    head, worker = pods(name)
    assert head["terminationGracePeriodSeconds"] == 120
    context = {"runAsUser": 1000, "runAsNonRoot": True, "allowPrivilegeEscalation": False}
    assert [pod["containers"][0]["securityContext"] for pod in (head, worker)] == [context] * 2


@pytest.mark.parametrize("name", KUBERAY)
def test_kuberays_head_is_not_reached_from_outside(name: str) -> None:
    assert cluster_spec(name)["headGroupSpec"]["serviceType"] == "ClusterIP"


def test_the_cluster_that_waits_for_users_has_its_dashboard_on_loopback() -> None:
    head = cluster_spec("kuberay_raycluster")["headGroupSpec"]
    assert head["rayStartParams"]["dashboard-host"] == "127.0.0.1"


@pytest.mark.parametrize("name", KUBERAY)
def test_the_image_has_the_ray_of_the_constraints(name: str) -> None:
    (version,) = re.findall(r"^ray==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert cluster_spec(name)["rayVersion"] == version
    assert f"rayproject/ray:{version}-" in (CLUSTERS / "Dockerfile").read_text()


@pytest.mark.parametrize("name", [*RAY_UP, *KUBERAY])
def test_the_jobs_it_names_are_there(name: str) -> None:
    named = re.findall(r"jobs/[\w.]+", text(name))
    assert named
    assert all((ROOT / job).exists() for job in named)
