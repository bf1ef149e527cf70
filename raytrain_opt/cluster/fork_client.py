"""Start a Ray process as a fork of `fork_server`, else by Ray's own `setup_worker.py`."""

import json
import os
import socket
import sys

# Holds the path of the server's socket.
SOCKET_VARIABLE = "RAYTRAIN_OPT_FORK_SERVER"


def start_worker(arguments: list[str]) -> None:
    """Let the server fork the process of these arguments, or start it as Ray does."""
    worker = split_arguments(arguments)
    if worker is None or not _request_fork(*worker):
        program = next(argument for argument in arguments if argument.endswith(".py"))
        setup_worker = os.path.join(os.path.dirname(program), "setup_worker.py")
        os.execv(sys.executable, [sys.executable, setup_worker, *arguments])


def split_arguments(arguments: list[str]) -> tuple[list[str], dict[str, str]] | None:
    """Return the arguments of the process and the variables of its runtime environment.

    None when a fork cannot have that runtime environment: another interpreter or language, or
    other values of variables that may be read when a process starts, such as LD_PRELOAD.
    """
    own: list[str] = []
    setup = {"--language": "", "--serialized-runtime-env-context": ""}
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name in setup:
            setup[name] = value
        else:
            own.append(argument)
    context = json.loads(setup["--serialized-runtime-env-context"] or "{}")
    variables: dict[str, str] = context.pop("env_vars", {})
    others = {name for name in variables if not name.startswith("RAY_")}
    fits = (
        setup["--language"] == "PYTHON"
        and all(not value or value == sys.executable for value in context.values())
        and all(os.environ.get(name) == variables[name] for name in others)
    )
    return (own, variables) if fits else None


def _request_fork(arguments: list[str], variables: dict[str, str]) -> bool:
    """Ask the server for a fork; return whether it has become the process that was asked for."""
    request = {
        "arguments": arguments,
        "environment": {**os.environ, **variables},
        "directory": os.getcwd(),
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "group": os.getpgrp(),
    }
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(os.environ[SOCKET_VARIABLE])
            socket.send_fds(connection, [b"f"], [0, 1, 2])
            connection.sendall(json.dumps(request).encode())
            connection.shutdown(socket.SHUT_WR)
            return connection.recv(1) == b"f"
        except OSError:
            return False


if __name__ == "__main__":
    start_worker(sys.argv[1:])
