"""`raytrain-opt submit`: a job of this folder on a cluster, as `ray job submit` would run it.

Thin over Ray's job client: it waits, shows what the run prints, takes its small files home and
returns its exit code. Nothing here needs the cluster's storage: the files come the same way as
the log does.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import shlex
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from raytrain_opt.clock import monotonic_s
from raytrain_opt.errors import ClusterError, JobError, Problem
from raytrain_opt.run_files import MARK
from raytrain_opt.telemetry.terminal import find_run_dir

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

HOME = "runs"  # below which the files of submitted runs are put, each in a folder of its own
DASHBOARD = "http://localhost:8265"
# Left at home, besides what .gitignore and .rayignore of the folder name.
_EXCLUDES = [".git/", ".venv/", "__pycache__/", f"/{HOME}/"]
# What `ray job stop` gives a run to finish its commit; Ray's own is 3 s, and then it kills.
_ENVIRONMENT = {"RAY_JOB_STOP_WAIT_TIME_S": "120"}
# Loggers of Ray that tell which files are packed, and the like.
_CHATTY = ("ray", "ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk")
_PAUSE_S, _LOST_S = 2.0, 120.0
_STOPPED_CODE = 143


def submit(job_file: str, overrides: Sequence[str], address: str | None) -> int:
    """Run the job on the cluster whose dashboard is at `address`; its exit code.

    Raises JobError when the file is wrong or the cluster lets nobody in, ClusterError when it is
    lost on the way.
    """
    from raytrain_opt.config.load import load_job

    load_job(job_file, overrides)
    client = connect(address)
    arguments = ["-m", "raytrain_opt", "run", _inside(job_file), *_options(overrides)]
    code, log = run_there(client, arguments)
    run_dir = find_run_dir(log)
    if run_dir is not None:
        _take_home(client, run_dir)
    return code


def examine_there(job_file: str | None, overrides: Sequence[str], address: str) -> int:
    """`raytrain-opt doctor` on the cluster; its exit code. Raises as `submit` does."""
    client = connect(address)
    named = [] if job_file is None else [_inside(job_file)]
    arguments = ["-m", "raytrain_opt", "doctor", *named, *_options(overrides)]
    return run_there(client, arguments)[0]


def connect(address: str | None) -> JobSubmissionClient:
    """Ray's job client. Raises JobError when nobody answers or the token is not the cluster's."""
    given = address or os.environ.get("RAY_API_SERVER_ADDRESS") or DASHBOARD
    if urlsplit(given).scheme not in ("http", "https"):
        rule = "must be the address of the head's dashboard, http://HOST:PORT"
        raise JobError([_problem(rule, given)], "arguments")
    # Ray prefers this variable, and RAY_ADDRESS, to what it is given.
    os.environ["RAY_API_SERVER_ADDRESS"] = given
    token = _token_place()
    if token is not None:
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # before Ray is imported

    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        return JobSubmissionClient(given)
    except AuthenticationError as error:
        raise JobError([_refused(given, token)], "arguments") from error
    except (ConnectionError, OSError) as error:
        rule = "no dashboard of a Ray cluster answers there"
        hint = f"open the way: ssh -fNL {_way(given)} USER@HEAD, or ray dashboard CLUSTER.yaml"
        raise JobError([_problem(rule, given, hint)], "arguments") from error
    except RuntimeError as error:
        rule = f"what answers there is no dashboard of this Ray: {error}"
        raise JobError([_problem(rule, given)], "arguments") from error


def run_there(client: JobSubmissionClient, arguments: Sequence[str]) -> tuple[int, str]:
    """`python ARGUMENTS` on the head, in a copy of this folder, shown while it runs.

    Returns its exit code and all it printed. Raises ClusterError when the connection is lost.
    """
    job_id = _start(client, arguments)
    print(f"submitted as {job_id}", flush=True)
    try:
        log = asyncio.run(_follow(client, job_id))
    except KeyboardInterrupt:
        where = f"--address {client.get_address()} {job_id}"
        print(f"\nit goes on there; ray job logs --follow {where} or ray job stop {where}")
        raise
    return _exit_code(client, job_id), log


def _start(client: JobSubmissionClient, arguments: Sequence[str]) -> str:
    return client.submit_job(
        entrypoint=shlex.join(["python", *arguments]),
        runtime_env={"working_dir": ".", "excludes": _EXCLUDES, "env_vars": _ENVIRONMENT},
    )


async def _follow(client: JobSubmissionClient, job_id: str, *, show: bool = True) -> str:
    """All that the job prints until it has ended. A connection that breaks is made again."""
    from aiohttp import ClientError

    log, lost_since = "", None
    while True:
        seen = 0
        try:
            async for text in client.tail_job_logs(job_id):
                new = text[max(0, len(log) - seen) :]  # after a break it starts from the beginning
                seen += len(text)
                log, lost_since = log + new, None
                if show:
                    print(new, end="", flush=True)
            if client.get_job_status(job_id).is_terminal():
                return log
        except (ClientError, OSError, RuntimeError) as error:  # of aiohttp, requests, and Ray
            lost_since = lost_since or monotonic_s()
            if monotonic_s() - lost_since > _LOST_S:
                raise ClusterError(_lost(client, job_id, error)) from error
        await asyncio.sleep(_PAUSE_S)


def _lost(client: JobSubmissionClient, job_id: str, error: Exception) -> str:
    return (
        f"the dashboard at {client.get_address()} has not answered for {_LOST_S:.0f} s ({error}); "
        f"the job may go on. Open the way to it again, then: ray job logs --follow {job_id}"
    )


def _exit_code(client: JobSubmissionClient, job_id: str) -> int:
    """Of the run; as a shell has it for one that was stopped, and 1 for one that never started."""
    from ray.job_submission import JobStatus

    info = client.get_job_info(job_id)
    if info.status == JobStatus.STOPPED:
        return _STOPPED_CODE
    if info.driver_exit_code is None:
        print(f"error: the cluster could not run it: {info.message}", flush=True)
        return 1
    return int(info.driver_exit_code)


def _take_home(client: JobSubmissionClient, run_dir: str) -> None:
    """The run's small files, to HOME/RUN_ID here: a second job prints them."""
    job_id = _start(client, ["-m", "raytrain_opt.run_files", run_dir])
    log = asyncio.run(_follow(client, job_id, show=False))
    found = [line for line in log.splitlines() if line.startswith(MARK)]
    if not found:
        raise ClusterError(f"{run_dir}: its files could not be read on the cluster:\n{log}")
    files = json.loads(found[-1].removeprefix(MARK))
    if not files:  # of a run that could not begin
        return
    folder = Path(HOME) / Path(run_dir).name
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / Path(name).name).write_bytes(zlib.decompress(base64.b64decode(content)))
    print(f"copied here: {', '.join(f'{folder}/{name}' for name in files)}", flush=True)


def _options(overrides: Sequence[str]) -> list[str]:
    return [text for override in overrides for text in ("--set", override)]


def _inside(job_file: str) -> str:
    """As seen from this folder, which is what the cluster gets."""
    try:
        return str(Path(job_file).resolve().relative_to(Path.cwd()))
    except ValueError as error:
        rule = "must be in this folder or below: that is what is sent to the cluster"
        raise JobError([Problem("JOB.yaml", rule, repr(job_file))], "arguments") from error


def _token_place() -> str | None:
    """Where Ray will find a token, in its order."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return "RAY_AUTH_TOKEN"
    path = os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token"
    return str(path) if Path(path).is_file() else None


def _refused(given: str, token: str | None) -> Problem:
    mode = os.environ.get("RAY_AUTH_MODE")
    if token is None:
        rule = "the cluster asks for a token, and there is none here"
        hint = "copy the head's ~/.ray/auth_token here, or put its content into RAY_AUTH_TOKEN"
    elif mode != "token":
        rule = f"the cluster asks for a token, and RAY_AUTH_MODE={mode} sends none"
        hint = "set RAY_AUTH_MODE=token"
    else:
        rule = f"the cluster refuses the token of {token}"
        hint = "it must be that of the head's ~/.ray/auth_token, with which it was started"
    return _problem(rule, given, hint)


def _problem(rule: str, given: str, hint: str | None = None) -> Problem:
    return Problem("--address", rule, repr(given), hint)


def _way(given: str) -> str:
    port = urlsplit(given).port or 8265
    return f"{port}:localhost:8265"
