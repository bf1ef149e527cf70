"""`raytrain-opt submit`: run a job on a cluster; its files arrive in a job's log."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from raytrain_opt.clock import monotonic_s
from raytrain_opt.commands.download import MARKER, unpack_files
from raytrain_opt.config.load import load_job
from raytrain_opt.errors import ClusterError, JobError, Problem, printable
from raytrain_opt.remote.log_markers import ANNOUNCE_VARIABLE, find_marker, is_marker
from raytrain_opt.storage import last_name

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

# The folder of this directory into which submitted runs are downloaded, one folder per run.
LOCAL_RUNS = "runs"
DASHBOARD = "http://localhost:8265"
# Not uploaded, besides what .gitignore and .rayignore name.
_EXCLUDES = [".git/", ".venv/", "__pycache__/", f"/{LOCAL_RUNS}/"]
# `ray job stop` waits this long for a run to finish its checkpoint before it kills the run; Ray's
# default of 3 s is too short for a large model.
_ENVIRONMENT = {"RAY_JOB_STOP_WAIT_TIME_S": "120", ANNOUNCE_VARIABLE: "1"}
# Loggers of Ray that list the uploaded files and the like.
_CHATTY_LOGGERS = ("ray", "ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk")
_POLL_S = 2.0
# An ssh tunnel or a laptop's network is usually back within two minutes.
_RECONNECT_LIMIT_S = 120.0
_STOPPED_CODE = 143  # 128 + SIGTERM, as a shell reports a process that was stopped


def submit(job_file: str, overrides: Sequence[str], address: str | None) -> int:
    """Run the job on the cluster whose dashboard is at `address`; return its exit code.

    Raises JobError when the file is wrong or the cluster refuses the connection, ClusterError
    when the job cannot be sent or the connection is lost later.
    """
    load_job(job_file, overrides)
    client = connect(address)
    code, log = run_on_cluster(client, "run", job_file, overrides)
    run_dir = find_marker(log, "run_dir")
    if run_dir is not None:
        _download(client, run_dir)
    return code


def diagnose_on_cluster(job_file: str | None, overrides: Sequence[str], address: str) -> int:
    """Run `raytrain-opt doctor` on the cluster; return its exit code. Raises as `submit` does."""
    return run_on_cluster(connect(address), "doctor", job_file, overrides)[0]


def connect(address: str | None) -> JobSubmissionClient:
    """Return Ray's job client. Raises JobError: no dashboard answers, or it refuses the token."""
    url = address or os.environ.get("RAY_API_SERVER_ADDRESS") or DASHBOARD
    if urlsplit(url).scheme not in ("http", "https"):
        rule = "must be the address of the head's dashboard, http://HOST:PORT"
        raise _refused(rule, url)
    # Ray's client prefers this variable, and RAY_ADDRESS, to its own argument.
    os.environ["RAY_API_SERVER_ADDRESS"] = url
    token_source = _find_token()
    if token_source is not None:
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # before Ray is imported

    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    for name in _CHATTY_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        return JobSubmissionClient(url)
    except AuthenticationError as error:
        raise _refused_token(url, token_source) from error
    except (ConnectionError, OSError) as error:
        rule = "no dashboard of a Ray cluster answers at this address"
        ports = f"{urlsplit(url).port or 8265}:localhost:8265"
        hint = f"forward the port: ssh -fNL {ports} USER@HEAD, or ray dashboard CLUSTER.yaml"
        raise _refused(rule, url, hint) from error
    except RuntimeError as error:
        rule = f"the server there is not a dashboard of this Ray version: {error}"
        raise _refused(rule, url) from error


def run_on_cluster(
    client: JobSubmissionClient, command: str, job_file: str | None, overrides: Sequence[str]
) -> tuple[int, str]:
    """Run `raytrain-opt COMMAND` on the head, in a copy of this directory, and show its output.

    Returns its exit code and its log. Raises ClusterError when the job cannot be sent or the
    connection is lost.
    """
    job_files = [] if job_file is None else [_relative_path(job_file)]
    settings = [text for override in overrides for text in ("--set", override)]
    job_id = _start(client, ["-m", "raytrain_opt", command, *job_files, *settings])
    print(f"submitted as {job_id}", flush=True)
    try:
        log = asyncio.run(_follow(client, job_id))
    except KeyboardInterrupt:
        options = f"--address {client.get_address()} {job_id}"
        print(
            f"\nthe job keeps running; follow it with: ray job logs --follow {options}; "
            f"stop it with: ray job stop {options}"
        )
        raise
    return _exit_code(client, job_id), log


def _start(client: JobSubmissionClient, arguments: Sequence[str]) -> str:
    try:
        return client.submit_job(
            entrypoint=shlex.join(["python", *arguments]),
            runtime_env={"working_dir": ".", "excludes": _EXCLUDES, "env_vars": _ENVIRONMENT},
        )
    except (OSError, RuntimeError, ValueError) as error:  # of requests, the dashboard, and Ray
        text = f"the job could not be sent to {client.get_address()}: {error}"
        if "status code 413" in text or "maximum size" in text:
            text += "\nname in .rayignore what it does not need: the limit is 100 MiB as zip"
        raise ClusterError(text) from error


async def _follow(client: JobSubmissionClient, job_id: str, *, show: bool = True) -> str:
    """Return the log of a job once it has ended; reconnect while the connection is down."""
    from aiohttp import ClientError

    log, shown_chars, lost_since_s = "", 0, None
    while True:
        received = 0
        try:
            async for text in client.tail_job_logs(job_id):
                # After a reconnect the log starts from its beginning again.
                new = text[max(0, len(log) - received) :]
                received += len(text)
                log, lost_since_s = log + new, None
                if show:
                    shown_chars = _show_lines(log, shown_chars)
            if client.get_job_status(job_id).is_terminal():
                if show:
                    _show_lines(log + "\n" if log[shown_chars:] else log, shown_chars)
                return log
        except (ClientError, OSError, RuntimeError) as error:  # of aiohttp, requests, and Ray
            lost_since_s = lost_since_s or monotonic_s()
            if monotonic_s() - lost_since_s > _RECONNECT_LIMIT_S:
                raise ClusterError(
                    f"the dashboard at {client.get_address()} has not answered for "
                    f"{_RECONNECT_LIMIT_S:.0f} s ({error}); the job may still be running. Restore "
                    f"the connection, then: ray job logs --follow {job_id}"
                ) from error
        await asyncio.sleep(_POLL_S)


def _show_lines(log: str, start: int) -> int:
    """Print the complete lines after `start`, without markers; return the position after them."""
    end = log.rfind("\n", start) + 1
    if end <= start:
        return start
    lines = [line for line in log[start:end].splitlines(True) if not is_marker(line)]
    print(printable("".join(lines)), end="", flush=True)
    return end


def _exit_code(client: JobSubmissionClient, job_id: str) -> int:
    """Return the run's own exit code, 143 if it was stopped, 1 if it never started."""
    from ray.job_submission import JobStatus

    info = client.get_job_info(job_id)
    if info.status == JobStatus.STOPPED:
        return _STOPPED_CODE
    if info.driver_exit_code is None:
        message = printable(info.message or "")
        print(f"error: the cluster could not start the job: {message}", flush=True)
        return 1
    return int(info.driver_exit_code)


def _download(client: JobSubmissionClient, run_dir: str) -> None:
    """Write the run's small files, which a second job prints, to LOCAL_RUNS/RUN_ID."""
    run_id = last_name(str(run_dir))
    if not isinstance(run_dir, str) or run_id in ("", ".", ".."):
        raise ClusterError(f"{run_dir} in the job's log is no run directory")
    job_id = _start(client, ["-m", "raytrain_opt.commands.download", run_dir])
    log = asyncio.run(_follow(client, job_id, show=False))
    files = find_marker(log, MARKER)
    if files is None:
        raise ClusterError(f"{run_dir}: its files could not be read on the cluster:\n{log}")
    if not files:  # the run ended before it wrote anything
        return
    paths = unpack_files(files, Path(LOCAL_RUNS) / run_id)
    print(f"downloaded: {', '.join(map(str, paths))}", flush=True)


def _relative_path(job_file: str) -> str:
    """Return the path below this directory, which is uploaded. Raises JobError elsewhere."""
    try:
        return str(Path(job_file).resolve().relative_to(Path.cwd()))
    except ValueError as error:
        rule = "must be in this directory or below: only this directory is sent to the cluster"
        raise JobError([Problem("JOB.yaml", rule, repr(job_file))], "arguments") from error


def _find_token() -> str | None:
    """Return where Ray will find its token, in Ray's order: a variable's name or a file."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return "RAY_AUTH_TOKEN"
    path = os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token"
    return str(path) if Path(path).is_file() else None


def _refused_token(url: str, token_source: str | None) -> JobError:
    mode = os.environ.get("RAY_AUTH_MODE")
    if token_source is None:
        rule = "the cluster requires a token, and none was found on this machine"
        hint = "copy the head's ~/.ray/auth_token here, or put its content into RAY_AUTH_TOKEN"
    elif mode != "token":
        rule = f"the cluster requires a token, and RAY_AUTH_MODE={mode} sends none"
        hint = "set RAY_AUTH_MODE=token"
    else:
        rule = f"the cluster refuses the token in {token_source}"
        hint = "use the head's ~/.ray/auth_token, with which the cluster was started"
    return _refused(rule, url, hint)


def _refused(rule: str, address: str, hint: str | None = None) -> JobError:
    return JobError([Problem("--address", rule, repr(address), hint)], "arguments")
