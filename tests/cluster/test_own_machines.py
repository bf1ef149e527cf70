"""Own machines from `ray up` to `ray down`, in this order: `make test-cluster`, on namespaces."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.cluster.hosts import Host, hosts, missing

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
BIN = Path(sys.prefix) / "bin"
DASHBOARD = "http://localhost:8265"
JOB = "jobs/quickstart.yaml"
SENT = ("raytrain_opt", "jobs", "clusters", "pyproject.toml", "constraints.txt", "README.md")
WORKER = "ray::RayTrainWorker"
# A worker and a slot fill a host, which has one CPU here.
ONE_A_HOST = ("--set", "workers.resources={CPU: 0.6}", "--set", "slots.resources={CPU: 0.4}")


@dataclass
class Cluster:
    """A user's machine with a copy of the repository, and the two hosts that train."""

    client: Host
    head: Host
    worker: Host
    project: Path
    file: Path  # for `ray up`

    def user(self, *command: str, timeout_s: float = 300, **environment: str) -> Done:
        """Run a command of the user in the repository's root."""
        done = self.client.run(
            *command, cwd=self.project, timeout_s=timeout_s, RAY_AUTH_MODE="token", **environment
        )
        return Done(done.returncode, done.stdout)

    def raytrain(self, name: str, *arguments: str) -> subprocess.Popen[str]:
        """Start `raytrain-opt NAME ...` as a job."""
        command = ("python", "-m", "raytrain_opt", name, *arguments)
        return self.start_job("submit", "--working-dir", ".", "--", *command)

    def job(self, name: str, *arguments: str) -> Done:
        """Run `ray job NAME --address ... ...`."""
        return self.user(str(BIN / "ray"), "job", name, "--address", DASHBOARD, *arguments)

    def status(self) -> str:
        """Return the output of `ray status` on the head."""
        return self.head.run(str(BIN / "ray"), "status", RAY_AUTH_MODE="token").stdout

    def start_job(self, name: str, *arguments: str) -> subprocess.Popen[str]:
        """Start `ray job NAME --address ... ...` without waiting for it."""
        command = (str(BIN / "ray"), "job", name, "--address", DASHBOARD, *arguments)
        return self.client.start(*command, cwd=self.project, RAY_AUTH_MODE="token")


@dataclass(frozen=True)
class Done:
    code: int
    output: str


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Start a cluster with `ray up`, and forward its dashboard to the user's machine."""
    requirements = missing()
    assert not requirements, f"make test-cluster needs {', '.join(requirements)}"
    with hosts(["client", "head", "worker"]) as (by_name, shared):
        subprocess.run(["cp", "-r", *(ROOT / name for name in SENT), ROOT / "LICENSE", shared])
        subprocess.run(["cp", ROOT / ".rayignore", ROOT / ".gitignore", shared], check=True)
        cluster = Cluster(**by_name, project=shared, file=shared / "clusters/here.yaml")
        cluster.file.write_text(_cluster_file(by_name))
        assert cluster.user(str(BIN / "ray"), "get-auth-token", "--generate").code == 0
        up = cluster.user(str(BIN / "ray"), "up", "-y", str(cluster.file))
        assert up.code == 0, up.output
        with _forwarded_dashboard(by_name["client"]):
            yield cluster


def _cluster_file(hosts_by_name: dict[str, Host]) -> str:
    """Return clusters/onprem.yaml with a user's edits; the environment exists already.

    One CPU per host, so that two workers need both hosts.
    """
    config = yaml.safe_load((ROOT / "clusters/onprem.yaml").read_text())
    config["provider"] |= {
        "head_ip": hosts_by_name["head"].address,
        "worker_ips": [hosts_by_name["worker"].address],
    }
    config["auth"]["ssh_user"] = "root"
    paths = [line for line in config["setup_commands"] if ".bashrc" in line]
    config["setup_commands"] = [f"ln -sfn {sys.prefix} ~/raytrain-opt-env", *paths]
    for role in ("head", "worker"):
        lines = config[f"{role}_start_ray_commands"]
        config[f"{role}_start_ray_commands"] = [
            line.replace("ray start ", "ray start --num-cpus=1 ") for line in lines
        ]
    return yaml.safe_dump(config, width=1000)


@contextmanager
def _forwarded_dashboard(client: Host) -> Iterator[None]:
    """Forward the dashboard as documented, but in the foreground, so that it can be ended."""
    options = ["-o", "StrictHostKeyChecking=no", "-NL", "8265:localhost:8265"]
    with subprocess.Popen(client.command("ssh", *options, "head")) as tunnel:
        time.sleep(2)
        yield
        tunnel.kill()


def _wait_until(condition: Callable[[], bool], limit_s: float) -> float:
    """Return the seconds until the condition held; fail after the limit."""
    began_s = time.monotonic()
    while not condition():
        assert time.monotonic() - began_s < limit_s
        time.sleep(0.5)
    return time.monotonic() - began_s


def _processes(host: Host, name: str) -> list[str]:
    return host.run("pgrep", "-f", name).stdout.split()


@pytest.mark.parametrize("name", ["RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"])
def test_a_user_without_the_token_is_refused(cluster: Cluster, name: str) -> None:
    ray = (str(BIN / "ray"), "job", "list", "--address", DASHBOARD)
    assert cluster.user(*ray, **{name: "/wrong" * 8}).code != 0


def test_the_quickstart_waits_for_the_second_host_and_trains_on_both(cluster: Cluster) -> None:
    """Submit the job while only the head is up, or a little later."""
    lines, worker_hosts = [], set()
    with cluster.raytrain("run", JOB, *ONE_A_HOST) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if line.startswith("epoch "):
                both = (cluster.head, cluster.worker)
                worker_hosts |= {host.name for host in both if _processes(host, WORKER)}
    log = "".join(lines)
    assert process.returncode == 0, log
    assert worker_hosts == {"head", "worker"}, log
    epochs = [line for line in lines if line.startswith("epoch ")]
    assert "\x1b[" not in "".join(epochs), "no progress bar in a log"
    (run_dir,) = (cluster.head.own / "home/runs").iterdir()
    result = json.loads((run_dir / "result.json").read_text())
    assert result["final"]["test_metrics"]["accuracy"] >= 0.95
    assert len(result["hardware"]["nodes"]) == 2
    assert (run_dir / "schedule.jsonl").exists()


def test_the_doctor_reports_two_hosts_without_shared_storage(cluster: Cluster) -> None:
    with cluster.raytrain("doctor", JOB) as process:
        output = process.communicate()[0]
    assert process.returncode == 0, output
    print(output)
    for about in ("Ray", "job", "versions", "GPUs", "room"):
        assert re.search(rf"│ ok +│ {about} ", output), about
    assert re.search(r"│ warning │ storage .*worker: does not see", output)


def test_a_run_that_does_not_fit_fails_with_its_message(cluster: Cluster) -> None:
    with cluster.raytrain("run", JOB, "--set", "workers.resources={CPU: 7}") as process:
        output = process.communicate()[0]
    assert process.returncode == 1, output
    assert "workers of 7 CPU each do not fit" in output


def test_a_job_that_is_stopped_has_a_checkpoint(cluster: Cluster) -> None:
    """Submit, follow and stop a job by Ray's own commands."""
    run = ["python", "-m", "raytrain_opt", "run", JOB, "--set", "epochs=500"]
    options = ["--working-dir", ".", "--submission-id", "to-be-stopped"]
    command = ("submit", *options, "--", *run, "--set", "name=stopped")
    with cluster.start_job(*command) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("epoch 2/500"):
                stopped = cluster.job("stop", "to-be-stopped")
                assert stopped.code == 0, stopped.output
    log = "".join(lines)
    # Ray sends Ctrl-C and SIGTERM; either may arrive first.
    assert re.search(r"(interrupted|terminated); .* --resume /root/runs/stopped-", log), log
    assert "Traceback" not in log
    assert "was stopped" in log
    (index,) = (cluster.head.own / "home/runs").glob("stopped-*/checkpoints/index.json")
    assert json.loads(index.read_text())
    _wait_until(lambda: not _processes(cluster.head, WORKER), 60)


def test_a_run_continues_when_a_host_is_lost(cluster: Cluster) -> None:
    """It continues on the remaining workers, as a smallest `workers.count` promises."""
    _wait_until(lambda: "/2.0 CPU" in cluster.status(), 120)  # else it would start with one worker
    arguments = ["workers.count={min: 1, max: 2}", "slots.count=1", "epochs=6", "name=lost"]
    options = [text for argument in arguments for text in ("--set", argument)]
    lines = []
    with cluster.raytrain("run", JOB, *ONE_A_HOST, *options) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if line.startswith("epoch 2/"):
                assert _processes(cluster.worker, WORKER), "a worker was on the other host"
                cluster.worker.die()
    log = "".join(lines)
    assert process.returncode == 0, log
    assert re.search(r"epoch \d: running on 1 of 2 workers", log), log
    (run_dir,) = (cluster.head.own / "home/runs").glob("lost-*")
    result = json.loads((run_dir / "result.json").read_text())
    assert result["status"] == "finished"
    assert result["final"]["test_metrics"]["accuracy"] >= 0.9
    epochs = (run_dir / "epochs.jsonl").read_text().splitlines()
    workers = [json.loads(line)["workers"] for line in epochs]
    assert (workers[0], workers[-1]) == (2, 1)


def test_ray_down_leaves_nothing_on_the_head(cluster: Cluster) -> None:
    down = cluster.user(str(BIN / "ray"), "down", "-y", str(cluster.file))
    assert down.code == 0, down.output
    assert "Exception occurred" not in down.output, down.output
    _wait_until(lambda: not _processes(cluster.head, "/raylet/raylet|gcs_server|dashboard.py"), 30)
