"""Start the processes of a local Ray as forks of one process that has imported torch already.

Imports are most of what a worker or slot does before it computes. A fork has them within
milliseconds, and shares their memory.

Ray runs `fork_client`, which sends the arguments, environment and output files of a new process to
the server (`python -m raytrain_opt.cluster.fork_server`); the server forks. It does not import
Ray, which reads settings of its process then, and draws random identities: all forks would go on
with the same ones.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from raytrain_opt.cluster.fork_client import SOCKET_VARIABLE
from raytrain_opt.temporary import TemporaryFolder

# What workers and slots need, and what Ray Train and Ray Tune import of other packages.
PRELOADED = (
    "raytrain_opt.pools.worker",
    "torch._dynamo",  # imported by the first optimizer of a process, 1.3 s of CPU time
    "fsspec",
    "numpy",
    "pandas",
    "pyarrow.fs",
    "pydantic",
    "requests",
)
# Ray's own start comes first: it gives up after 30 s. Forks get the niceness of Ray's workers, 15
# unless the user sets it; without privileges that cannot be less than the server's.
_NICENESS = 10
_LONGEST_SOCKET_PATH = 107  # in bytes, on Linux


@contextmanager
def fork_server() -> Iterator[dict[str, str]]:
    """Keep a server for the time of the block; yield what clients need in their environment.

    The server ends with this process, also when it is killed. None is started where forks of a
    process with threads are not safe (macOS), and when the user set the variable to 0.
    """
    if sys.platform != "linux" or os.environ.get(SOCKET_VARIABLE) == "0":
        yield {}
        return
    with TemporaryFolder(_LONGEST_SOCKET_PATH - len("/socket")) as folder:
        path = os.path.join(folder, "socket")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(128)
            server = subprocess.Popen(
                [sys.executable, "-m", __spec__.name, str(listener.fileno())],
                stdin=subprocess.PIPE,  # closed when this process ends
                pass_fds=[listener.fileno()],
                process_group=0,  # Ctrl-C is for the driver
            )
        with server:
            try:
                yield {SOCKET_VARIABLE: path}
            finally:
                server.kill()


def main(listener: socket.socket) -> None:
    """Import, then fork for each request until standard input is closed."""
    limit = os.environ.get("RAY_worker_niceness", _NICENESS)  # noqa: SIM112 - so Ray writes it
    niceness = min(_NICENESS, int(limit))
    os.setpriority(os.PRIO_PROCESS, 0, max(niceness, os.getpriority(os.PRIO_PROCESS, 0)))
    gc.disable()  # collections take a fifth of the time of imports, and free nothing
    for module in PRELOADED:
        importlib.import_module(module)
    gc.freeze()  # a collection in a fork does not write to shared pages
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks that ended leave no zombies
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin, selectors.EVENT_READ)
        selector.register(listener, selectors.EVENT_READ)
        while all(key.fileobj is listener for key, _ in selector.select()):
            connection, _ = listener.accept()
            with warnings.catch_warnings():
                # Of threads, by Python 3.12: those of the imports wait and hold no lock.
                warnings.simplefilter("ignore", DeprecationWarning)
                is_fork = os.fork() == 0
            if is_fork:
                break
            connection.close()
        else:
            return
    listener.close()
    try:
        program = _become(connection)
    except (OSError, ValueError):  # the client has ended, and nobody waits for this process
        os._exit(1)
    runpy.run_path(program, run_name="__main__")


def _become(connection: socket.socket) -> str:
    """Turn this fork into the process that the client asks for; return the program to run."""
    import numpy as np

    with connection:
        _, files, *_ = socket.recv_fds(connection, 1, 3)
        with connection.makefile() as reader:
            request = json.load(reader)
        os.setpriority(os.PRIO_PROCESS, 0, request["niceness"])
        # The client's group, which Ray ends with the process. It exists while the client waits.
        os.setpgid(0, request["group"])
        connection.sendall(b"f")
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    tempfile.tempdir = None  # chosen anew from this environment
    np.random.seed()  # else every fork draws the same numbers; Python's own generator is seeded
    sys.argv = request["arguments"]
    sys.path[0] = os.path.dirname(sys.argv[0])
    return sys.argv[0]


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
