"""Hosts on one machine: each has its own network, processes, names, home, /tmp and sshd.

Made of Linux namespaces, as root. They reach each other over a bridge in a namespace of its own,
at 10.77.0.0/24, and nothing else. Of the machine's files they see what is there, as the same
paths; what they write to the home or to /tmp stays theirs. One folder is the same for all.
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
# Names of network namespaces are the whole machine's; two tests may run at a time.
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
    """What this machine lacks for making hosts; empty when all is there."""
    lacks = [f"the program {name}" for name in PROGRAMS if _program(name) is None]
    if sys.platform != "linux" or os.geteuid() != 0:
        lacks.append("root on Linux")
    if any(Path(p).resolve().is_relative_to("/tmp") for p in (__file__, sys.prefix)):
        lacks.append("a repository and environment outside /tmp, which each host has its own of")
    return lacks


@dataclass(frozen=True)
class Host:
    """One that is up. Commands run in it as root, in its home."""

    name: str
    address: str
    pid: int  # of its process 1, as seen from outside
    own: Path  # folder of what it wrote: home/, tmp/

    def command(self, *arguments: str, cwd: Path = Path("/")) -> list[str]:
        """To be started outside, for it to run inside."""
        enter = ["nsenter", f"--target={self.pid}", "--mount", "--uts", "--ipc", "--net", "--pid"]
        return [*enter, "--", "env", "-C", str(cwd), *arguments]

    def run(
        self,
        *arguments: str,
        cwd: Path = Path("/"),
        timeout_s: float = 60,
        **environment: str,
    ) -> subprocess.CompletedProcess[str]:
        """Standard output and error come together; the exit code is the caller's to judge."""
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
        """The same, without waiting."""
        return subprocess.Popen(
            self.command(*arguments, cwd=cwd),
            env=clean_environment() | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def die(self) -> None:
        """As when the power goes: nothing answers any more, not even with a refusal."""
        _inside(f"{_MARK}-{self.name}", "link", "set", "eth0", "down")
        os.kill(self.pid, 9)  # process 1, and with it all others


@contextmanager
def hosts(names: Sequence[str]) -> Iterator[tuple[dict[str, Host], Path]]:
    """Hosts by name, whose users can log into each other by key, and the folder that all share.

    Whatever happens inside, nothing of them is left afterwards; of a test that was killed, no
    process is, only three names and a folder in /var/tmp.
    """
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="raytrain_opt-hosts-", dir="/var/tmp"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        _ip("netns", "add", _BRIDGE)
        stack.callback(_ip, "netns", "del", _BRIDGE)
        _inside(_BRIDGE, "link", "add", "br0", "type", "bridge")
        _inside(_BRIDGE, "link", "set", "br0", "up")
        addresses = {name: f"{_SUBNET}.{10 + i}" for i, name in enumerate(names)}
        _write_files(folder, addresses)
        made = {
            name: stack.enter_context(_host(name, address, folder))
            for name, address in addresses.items()
        }
        (folder / "shared").mkdir()
        yield made, folder / "shared"


def clean_environment() -> dict[str, str]:
    """Ours, without what would lead a command to another Ray or another environment."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    return ours | {"RAY_USAGE_STATS_ENABLED": "0"}


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
    # Overlayfs takes such a device for "not there": this machine's token is not the hosts'.
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
    _inside(_BRIDGE, "link", "set", port, "master", "br0", "up")
    _inside(space, "addr", "add", f"{address}/24", "dev", "eth0")
    _inside(space, "link", "set", "eth0", "up")
    _inside(space, "link", "set", "lo", "up")
    # Ray asks for the way to 8.8.8.8 to learn its own address.
    _inside(space, "route", "add", "default", "via", f"{_SUBNET}.1", "dev", "eth0", "onlink")


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
            # Should this process be killed, the host goes with it.
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
        process.kill()  # and with it, by --kill-child, process 1 of the host and all others
        process.wait(_START_S)


def _wait_for_init(process: subprocess.Popen[bytes], own: Path) -> int:
    """Process 1 of the host, seen from outside, when its sshd is being started."""
    until = time.monotonic() + _START_S
    while not (own / "ready").exists():
        if process.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"a host did not start: {(own / 'init.log').read_text()}")
        time.sleep(0.05)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return int(children.split()[0])


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _inside(space: str, *arguments: str) -> None:
    _ip("-n", space, *arguments)
