"""Hosts simulated on one machine: each has its own network, processes, name, home, /tmp and sshd.

They are Linux namespaces and need root. They reach each other, and nothing else, over a bridge in
a namespace of its own, at 10.77.0.0/24. What they write to the home or to /tmp stays theirs.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("sshd", "ssh", "ssh-keygen", "rsync", "ip", "unshare", "nsenter", "setpriv")
# Names of network namespaces are global on a machine, and two test runs may overlap.
_MARK = f"rtopt-{os.getpid()}"
_BRIDGE = f"{_MARK}-bridge"
_SUBNET = "10.77.0"
_START_S = 20.0

# Runs as process 1 of a host, which keeps its /proc, mounts and name to itself.
_INIT = """
set -e
mount -t tmpfs -o size=8g tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir -p /run/sshd
mount --bind "$HOSTS_FILE" /etc/hosts
mount -t overlay overlay -o "lowerdir=$HOME,upperdir=$OWN/home,workdir=$OWN/work" "$HOME"
mount --bind "$OWN/tmp" /tmp
hostname "$NAME"
cd "$HOME"
"$SSHD" -D -e -f /dev/null -h "$OWN/host_key" -o PidFile=none -o StrictModes=no \
  -o UsePAM=no -o PermitRootLogin=prohibit-password -o PasswordAuthentication=no \
  -o "AuthorizedKeysFile=$AUTHORIZED" >"$OWN/sshd.log" 2>&1 &
touch "$OWN/ready"
while true; do wait || true; sleep 1; done
"""


def missing() -> list[str]:
    """Return what this machine lacks to simulate hosts; empty if nothing."""
    requirements = [f"the program {name}" for name in PROGRAMS if _program(name) is None]
    if sys.platform != "linux" or os.geteuid() != 0:
        requirements.append("root on Linux")
    if any(Path(p).resolve().is_relative_to("/tmp") for p in (__file__, sys.prefix)):
        requirements.append(
            "a repository and environment outside /tmp, because each host has its own /tmp"
        )
    return requirements


@dataclass(frozen=True)
class Host:
    """A host that is up. Commands run in it as root."""

    name: str
    address: str
    pid: int  # of its process 1, as seen from outside
    own: Path  # folder of what it wrote: home/, tmp/

    def command(self, *arguments: str, cwd: Path = Path("/")) -> list[str]:
        """Return the command that runs `arguments` inside when it is started outside."""
        enter = ["nsenter", f"--target={self.pid}", "--mount", "--uts", "--ipc", "--net", "--pid"]
        return [*enter, "--", "env", "-C", str(cwd), *arguments]

    def run(
        self, *arguments: str, cwd: Path = Path("/"), timeout_s: float = 60, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command and return its exit code and its output with errors in one text."""
        process = self.start(*arguments, cwd=cwd, **environment)
        with process:
            try:
                output, _ = process.communicate(timeout=timeout_s)
            finally:
                process.kill()
        return subprocess.CompletedProcess(arguments, process.returncode, output)

    def start(
        self, *arguments: str, cwd: Path = Path("/"), **environment: str
    ) -> subprocess.Popen[str]:
        """Start a command without waiting for it."""
        return subprocess.Popen(
            self.command(*arguments, cwd=cwd),
            env=clean_environment() | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def die(self) -> None:
        """End the host as a power failure does: nothing answers, not even with a refusal."""
        _ip_inside(f"{_MARK}-{self.name}", "link", "set", "eth0", "down")
        os.kill(self.pid, 9)  # process 1, and with it all others


@contextmanager
def hosts(names: Sequence[str]) -> Iterator[tuple[dict[str, Host], Path]]:
    """Yield hosts by name, whose users can log into each other by key, and their shared folder.

    They are removed afterwards, whatever happens inside. A test that is killed leaves no process,
    only three names and a folder in /var/tmp.
    """
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="raytrain_opt-hosts-", dir="/var/tmp"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        _ip("netns", "add", _BRIDGE)
        stack.callback(_ip, "netns", "del", _BRIDGE)
        _ip_inside(_BRIDGE, "link", "add", "br0", "type", "bridge")
        _ip_inside(_BRIDGE, "link", "set", "br0", "up")
        addresses = {name: f"{_SUBNET}.{10 + i}" for i, name in enumerate(names)}
        _write_files(folder, addresses)
        hosts_by_name = {
            name: stack.enter_context(_host(name, address, folder))
            for name, address in addresses.items()
        }
        (folder / "shared").mkdir()
        yield hosts_by_name, folder / "shared"


def clean_environment() -> dict[str, str]:
    """Return this environment without the variables that would lead to another Ray."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    return variables | {"RAY_USAGE_STATS_ENABLED": "0"}


def _write_files(folder: Path, addresses: dict[str, str]) -> None:
    lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
    (folder / "hosts").write_text("\n".join(lines) + "\n")
    _keygen(folder / "user_key")


def _keygen(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)


@contextmanager
def _host(name: str, address: str, folder: Path) -> Iterator[Host]:
    own, space = folder / name, f"{_MARK}-{name}"
    for part in ("home/.ssh", "work", "tmp"):
        (own / part).mkdir(parents=True)
    (own / "tmp").chmod(0o1777)
    # Overlayfs treats such a device as a deleted file: hosts must not see this machine's token.
    os.mknod(own / "home/.ray", stat.S_IFCHR, os.makedev(0, 0))
    _keygen(own / "host_key")
    shutil.copy(folder / "user_key", own / "home/.ssh/id_ed25519")
    with ExitStack() as stack:
        _ip("netns", "add", space)
        stack.callback(_ip, "netns", "del", space)
        _connect(space, name, address)
        process = stack.enter_context(_started(name, space, own, folder))
        yield Host(name, address, _wait_for_init(process, own), own)


def _connect(space: str, name: str, address: str) -> None:
    port = f"p-{name}"[:15]
    _ip("link", "add", port, "netns", _BRIDGE, "type", "veth", "peer", "eth0", "netns", space)
    _ip_inside(_BRIDGE, "link", "set", port, "master", "br0", "up")
    _ip_inside(space, "addr", "add", f"{address}/24", "dev", "eth0")
    _ip_inside(space, "link", "set", "eth0", "up")
    _ip_inside(space, "link", "set", "lo", "up")
    # Ray looks up the route to 8.8.8.8 to learn its own address.
    _ip_inside(space, "route", "add", "default", "via", f"{_SUBNET}.1", "dev", "eth0", "onlink")


@contextmanager
def _started(name: str, space: str, own: Path, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    environment = clean_environment() | {
        "NAME": name,
        "OWN": str(own),
        "HOME": str(Path.home()),
        "HOSTS_FILE": str(folder / "hosts"),
        "AUTHORIZED": str(folder / "user_key.pub"),
        "SSHD": str(_program("sshd")),
    }
    separate = ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child"]
    with (own / "init.log").open("wb") as log:
        process = subprocess.Popen(
            # If this process is killed, so is the host.
            ["setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", space]
            + [*separate, "--mount-proc", "bash", "-c", _INIT],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        process.kill()  # and by --kill-child process 1 of the host with all others
        process.wait(_START_S)


def _wait_for_init(process: subprocess.Popen[bytes], own: Path) -> int:
    """Wait until the host's sshd is being started; return its process 1 as seen from outside."""
    deadline_s = time.monotonic() + _START_S
    while not (own / "ready").exists():
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"a host did not start: {(own / 'init.log').read_text()}")
        time.sleep(0.05)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return int(children.split()[0])


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _ip_inside(space: str, *arguments: str) -> None:
    _ip("-n", space, *arguments)
