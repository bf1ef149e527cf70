"""No wait of the driver is without a limit, whatever hangs: a node, the storage, a data set."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]

# Code of other processes, which wait for the driver, for their peers or for their own threads.
# The driver's wait for them has a limit (`RayPool`), and ends them with all that they started.
OTHER_PROCESSES = (
    "async_training/actors.py",
    "async_training/worker.py",
    "async_training/worker_loop.py",
    "cluster/fork_server.py",
    "data/shards.py",
    "pools/launch_pools.py",
    "pools/mailbox.py",
    "pools/programs.py",
    "pools/candidates.py",
    "pools/worker.py",
)
# The same in files that the driver uses, too.
OTHER_CALLS = (
    "self._actor.join.remote",
    "self._actor.exchange.remote",
    "self._actor.receive.remote",
    "actor.lose.remote",
    "ray.get(ref)",  # the shared data, in the memory of a node
    "config.shared[0]",  # the same
    "digest.result()",  # a hash
)
# Their limits are inside.
LIMITED = (".checkpoints.wait()", "self.wait()")
METHODS = ("accept", "acquire", "communicate", "get", "join", "recv", "result", "select", "wait")
PROCESSES = ("subprocess.run", "subprocess.check_call", "subprocess.check_output")


def unlimited_waits(source: str) -> Iterator[str]:
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        name, limits = ast.unparse(call.func), {keyword.arg for keyword in call.keywords}
        if name in ("ray.get", "ray.wait", *PROCESSES):
            has_limit = "timeout" in limits
        else:
            has_limit = call.func.attr not in METHODS or bool(call.args or limits)
        if not has_limit:
            yield ast.unparse(call)


def test_every_kind_of_wait_is_found() -> None:
    found = unlimited_waits("ray.get(ref); a.b.wait(); thread.join(1); queue.get(); x.get(key)")
    assert list(found) == ["ray.get(ref)", "a.b.wait()", "queue.get()"]
    assert list(unlimited_waits("ray.get(ref, timeout=1); subprocess.run(['a'], timeout=1)")) == []


def test_no_wait_of_the_driver_is_without_a_limit() -> None:
    files = {
        path.relative_to(ROOT / "raytrain_opt").as_posix(): path.read_text(encoding="utf-8")
        for path in (ROOT / "raytrain_opt").rglob("*.py")
    }
    waits = {
        f"{file}: {wait}"
        for file, source in files.items()
        if file not in OTHER_PROCESSES
        for wait in unlimited_waits(source)
        if not wait.endswith(LIMITED) and not any(call in wait for call in OTHER_CALLS)
    }
    assert waits == set()
    assert [file for file in OTHER_PROCESSES if not any(unlimited_waits(files[file]))] == []
