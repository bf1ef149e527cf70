"""The files of a run directory, always on this machine; `publish` copies them to a URI."""

from __future__ import annotations

import atexit
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import obstore

from raytrain_opt.errors import JobError, Problem, StorageError
from raytrain_opt.run_copy import INDEX, RAY_FOLDER, RunCopy
from raytrain_opt.storage import (
    STORAGE_ERRORS,
    check_uri,
    error_text,
    is_remote,
    join,
    last_name,
    local_path,
    open_store,
    read,
    read_object,
    remove,
    remove_tree,
    storage_errors,
    sync,
)
from raytrain_opt.temporary import TemporaryFolder

# A file beside result.json until the command has ended: where it was killed before that, whoever
# repeats the command (`resume: auto`) finds this run again, and does not start a new one.
ENDING = "ending"
# Name of a run directory: job, date and time in UTC, random number.
_RUN_ID = re.compile(r"(?P<name>.+)-(?P<date>\d{8}-\d{6})-[0-9a-f]{16}")
_DATE = "%Y%m%d-%H%M%S"


class FoundRun(NamedTuple):
    """A run directory, and the job and the date of its name."""

    run_dir: str
    job: str
    started: datetime


class RunPaths:
    """The files of one run below `local`; `remote` is the URI of its copy, if any.

    `job` has all defaults filled in; `index.json` of `checkpoints` names the complete ones.
    """

    def __init__(
        self, local: Path, remote: str | None = None, folder: TemporaryFolder | None = None
    ) -> None:
        self.local, self.remote = local, remote
        self.job, self.result = local / "job.yaml", local / "result.json"
        self.ending = local / ENDING
        self.tensorboard, self.checkpoints = local / "tensorboard", local / "checkpoints"
        self._copy = None if remote is None else RunCopy(remote, local)
        self._folder = folder
        if folder is not None:
            atexit.register(self._remove_copy)

    @classmethod
    def create(cls, storage_path: str, name: str) -> RunPaths:
        """Create a run directory with a unique name. Raises JobError when that fails."""
        if problems := check_uri(storage_path):
            raise JobError(problems)
        run_id = f"{name}-{datetime.now(UTC).strftime(_DATE)}-{secrets.token_hex(8)}"
        if is_remote(storage_path):
            folder = TemporaryFolder()
            (folder.path / "checkpoints").mkdir()
            return cls(folder.path, join(storage_path, run_id), folder)
        try:
            local = local_path(storage_path) / run_id
            (local / "checkpoints").mkdir(parents=True)
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: unknown ~user
            rule = f"the run directory cannot be created: {error}"
            hint = "use a directory or URI that can be written"
            raise JobError([Problem("storage_path", rule, repr(storage_path), hint)]) from error
        return cls(local)

    @classmethod
    def existing(cls, run_dir: str, argument: str = "--resume", *, write: bool = True) -> RunPaths:
        """Return the directory of an earlier run; what a resume needs of a URI is copied here.

        `argument`: the option that names the run, for messages. `write`: whether the run is to be
        written. Raises JobError when the directory has no checkpoint, or belongs to another user.
        """
        check_run(run_dir, argument)
        if not is_remote(run_dir):
            if write and not _is_own(local_path(run_dir)):
                rule = "belongs to another user, whose run this process must not continue"
                hint = "resume it as that user, or resume a copy of it (cp -r)"
                raise JobError([Problem(argument, rule, repr(run_dir), hint)], "arguments")
            paths = cls(local_path(run_dir))
            if write:
                folders = (paths.checkpoints, paths.tensorboard, paths.local / RAY_FOLDER)
                refuse_links([*folders, *paths.checkpoints.glob("*")], argument)
            return paths
        folder = TemporaryFolder()
        paths = cls(folder.path, run_dir, folder)
        try:
            with readable(run_dir, argument):
                if paths._copy is not None:
                    paths._copy.fetch()
        except BaseException:
            remove_tree(paths.local)
            raise
        return paths

    @property
    def shown(self) -> str:
        """Where the user finds the run: the URI, or the local directory."""
        return self.remote or str(self.local)

    @property
    def run_id(self) -> str:
        """Name of the directory, which is unique."""
        return last_name(self.shown)

    def begin(self) -> None:
        """Show that the remote storage of a new run can be written. Raises StorageError."""
        if self._copy is not None:
            self._copy.begin()

    def publish(self) -> None:
        """Copy new and changed files to the remote storage, and remove deleted ones there.

        The index of checkpoints and the result are copied last. Does nothing for a local run.
        Raises StorageError, and TakenOverError if another process has resumed the run.
        """
        try:
            if self._copy is not None:
                self._copy.publish()
        except StorageError:
            if self._folder is not None:  # it has what the storage has not
                self._folder.keep()
            raise

    @property
    def is_published(self) -> bool:
        """Whether the remote storage, if there is one, has all files."""
        return self._copy is None or self._copy.is_complete()

    def _remove_copy(self) -> None:
        if self._folder is not None:
            (self._folder.remove if self.is_published else self._folder.keep)()

    def sync_records(self) -> None:
        """Wait until all records and the run directory are on disk. Raises StorageError."""
        for path in (*self.local.glob("*.jsonl"), self.local, self.local.parent):
            try:
                sync(path)
            except OSError as error:
                raise StorageError(f"{path} cannot be written: {error}") from error


def refuse_links(folders: Iterable[Path], argument: str) -> None:
    """Raise JobError if a folder that is written to is a link to another one."""
    for path in folders:
        if path.is_symlink():
            rule = f"{path} is a link, through which nothing is written or removed"
            hint = f"move {path.resolve()} to its place, or copy the run (cp -rL)"
            raise JobError([Problem(argument, rule, hint=hint)], "arguments")


def check_run(run_dir: str, argument: str = "--resume") -> None:
    """Raise JobError unless the directory holds a run with checkpoints; copies nothing."""
    if problems := check_uri(run_dir, argument):
        raise JobError(problems, "arguments")
    with readable(run_dir, argument):
        if is_remote(run_dir):
            found = read_object(open_store(run_dir), INDEX) is not None
        else:
            found = (local_path(run_dir) / INDEX).exists()  # anything else than a file is damage
    if not found:
        rule = f"holds no checkpoint of a run ({INDEX})"
        raise JobError([Problem(argument, rule, repr(run_dir))], "arguments")


@contextmanager
def readable(run_dir: str, argument: str) -> Iterator[None]:
    """Raise JobError that names the argument for an error of the storage."""
    try:
        yield
    except (*STORAGE_ERRORS, StorageError, RuntimeError) as error:  # RuntimeError: unknown ~user
        problem = Problem(argument, f"cannot be read: {error_text(error)}", repr(run_dir))
        raise JobError([problem], "arguments") from None


def newest_unfinished(storage_path: str, name: str) -> str | None:
    """Return the newest run of this name with checkpoints that has not ended, if any."""
    for run_dir, job, _ in find_runs(storage_path):
        is_own = job == name and (is_remote(run_dir) or _is_own(Path(run_dir)))
        if is_own and _is_unfinished(run_dir):
            return run_dir
    return None


def find_runs(storage_path: str) -> list[FoundRun]:
    """Return all runs below a storage path, newest first. Raises StorageError."""
    with storage_errors(f"{storage_path} cannot be read"):
        if is_remote(storage_path):
            parent = storage_path
            names = obstore.list_with_delimiter(open_store(storage_path))["common_prefixes"]
        else:
            folder = local_path(storage_path)
            parent = str(folder)
            paths = folder.iterdir() if folder.exists() else ()
            names = [path.name for path in paths if path.is_dir()]
    runs = []
    for run_id in filter(None, map(_RUN_ID.fullmatch, names)):
        with suppress(ValueError):  # a date that does not exist: another folder
            started = datetime.strptime(run_id["date"], _DATE).replace(tzinfo=UTC)
            runs.append(FoundRun(join(parent, run_id[0]), run_id["name"], started))
    return sorted(runs, key=lambda run: run.started, reverse=True)


def _is_own(path: Path) -> bool:
    return path.exists() and path.stat().st_uid == os.geteuid()


def _is_unfinished(run_dir: str) -> bool:
    is_ended = read(run_dir, "result.json") is not None and read(run_dir, ENDING) is None
    return not is_ended and read(run_dir, INDEX) is not None


def mark_ended(run_dir: str) -> None:
    """Let `resume: auto` take a run with a result as finished."""
    with suppress(StorageError):  # then it is only ended once more
        remove(run_dir, ENDING)
