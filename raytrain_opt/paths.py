"""The files of a run directory, and its copy in a remote storage.

A run directory is always written on this machine. When the job's storage is a URI, `publish`
copies new files there after every checkpoint.
"""

from __future__ import annotations

import atexit
import os
import re
import secrets
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from pyarrow import fs

from raytrain_opt.clock import utc_now
from raytrain_opt.errors import JobError, Problem, StorageError, TakenOverError, printable
from raytrain_opt.storage import (
    STORAGE_ERRORS,
    check_uri,
    join,
    last_name,
    local_path,
    open_filesystem,
    read,
    remove_tree,
    sync,
    write,
)

_INDEX = "checkpoints/index.json"
# A file of a checkpoint, and a record; other names of a storage could lead anywhere.
_CHECKPOINT_FILE = re.compile(
    r"checkpoints/(epoch-\d+(?:-round-\d+)?)/(weights\.safetensors|rest\.pt)"
)
_RECORD_FILE = re.compile(r"\w+\.(json|jsonl|yaml)")
# Who may write; see `RunPaths.claim`.
_OWNER = "owner.txt"
# After all other files.
_PUBLISHED_LAST = ("index.json", "result.json")


class RunPaths:
    """The files of one run below `local`; `remote` is the URI of its copy, if any.

    Files of JSON lines have a line per round, epoch, command or checkpoint (`timeline`), failure
    or recovery (`events`), probe (`batch_sizes`), and epoch with its learning rates (`schedule`).
    `job` has all defaults filled in; `index.json` of `checkpoints` names the complete ones.
    """

    def __init__(self, local: Path, remote: str | None = None) -> None:
        self.local = local
        self.remote = remote
        self.job, self.result = local / "job.yaml", local / "result.json"
        self.rounds, self.epochs = local / "rounds.jsonl", local / "epochs.jsonl"
        self.timeline, self.events = local / "timeline.jsonl", local / "events.jsonl"
        self.batch_sizes, self.batch_size = local / "batch_size.jsonl", local / "batch_size.json"
        self.schedule, self.trace = local / "schedule.jsonl", local / "trace.json"
        self.tensorboard, self.checkpoints = local / "tensorboard", local / "checkpoints"
        self._owner = b""
        # Version of each file in the remote copy.
        self._published: dict[Path, tuple[int, int]] = {}
        if remote is not None:
            atexit.register(self._remove_copy)

    @classmethod
    def create(cls, storage_path: str, name: str) -> RunPaths:
        """Create a run directory with a unique name. Raises JobError when that fails."""
        problems = check_uri(storage_path)
        if problems:
            raise JobError(problems)
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        run_id = f"{name}-{stamp}-{secrets.token_hex(8)}"
        if "://" in storage_path:
            local = Path(tempfile.mkdtemp(prefix="raytrain_opt-"))
            (local / "checkpoints").mkdir()
            return cls(local, join(storage_path, run_id))
        try:
            local = local_path(storage_path) / run_id
            (local / "checkpoints").mkdir(parents=True)
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: unknown ~user
            rule = f"the run directory cannot be created: {error}"
            hint = "use a directory or URI that can be written"
            raise JobError([Problem("storage_path", rule, repr(storage_path), hint)]) from error
        return cls(local)

    @classmethod
    def existing(cls, run_dir: str, argument: str = "--resume") -> RunPaths:
        """Return the directory of an earlier run; what a resume needs of a URI is copied here.

        `argument`: the option that names the run, for messages. Raises JobError when the
        directory has no checkpoint.
        """
        check_run(run_dir, argument)
        if "://" not in run_dir:
            return cls(local_path(run_dir))
        paths = cls(Path(tempfile.mkdtemp(prefix="raytrain_opt-")), run_dir)
        try:
            with _readable(run_dir, argument):
                paths._fetch(run_dir)
        except BaseException:
            remove_tree(paths.local)
            raise
        return paths

    def _fetch(self, uri: str) -> None:
        """Copy the records and the checkpoints that the index names; note others to be removed.

        A run that was killed between two writes leaves a checkpoint that no index names.
        """
        filesystem, root = open_filesystem(uri)
        named = set(
            re.findall(r"epoch-[-\w]+", (read(uri, _INDEX) or b"").decode(errors="replace"))
        )
        folders = [fs.FileSelector(root), fs.FileSelector(f"{root}/checkpoints", recursive=True)]
        for entry in [e for folder in folders for e in filesystem.get_file_info(folder)]:
            name = entry.path.removeprefix(f"{root}/")
            checkpoint, path = _CHECKPOINT_FILE.fullmatch(name), self.local / name
            if checkpoint and checkpoint[1] not in named:
                self._published[path] = (0, 0)
            elif checkpoint or name == _INDEX or _RECORD_FILE.fullmatch(name):
                path.parent.mkdir(parents=True, exist_ok=True)
                fs.copy_files(entry.path, str(path), source_filesystem=filesystem)
                self._published[path] = _version(path)

    @property
    def shown(self) -> str:
        """Where the user finds the run: the URI, or the local directory."""
        return self.remote or str(self.local)

    @property
    def run_id(self) -> str:
        """Name of the directory, which is unique."""
        return last_name(self.shown)

    @property
    def ray_storage(self) -> str:
        """Storage path of Ray Train and Ray Tune."""
        return join(self.shown, "ray")

    def claim(self) -> None:
        """Let no other process write to the remote copy from now on. Raises StorageError."""
        if self.remote is not None:
            holder = f"process {os.getpid()} on {socket.gethostname()} since {utc_now()}"
            self._owner = f"{holder} ({secrets.token_hex(8)})".encode()
            write(self.remote, _OWNER, self._owner)

    def _refuse_if_taken_over(self, uri: str) -> None:
        """Check before each copy: without conditional writes, one in progress is not stopped."""
        owner = (read(uri, _OWNER) if self._owner else None) or self._owner
        if owner != self._owner:
            raise TakenOverError(
                f"{uri} was resumed by another process, which writes to it now: "
                f"{printable(owner.decode(errors='replace'))}"
            )

    def publish(self) -> None:
        """Copy new and changed files to the remote storage, and remove deleted ones there.

        The index of checkpoints and the result are copied last, so that they never name or follow
        something missing. Does nothing for a local run. Raises StorageError.
        """
        if self.remote is None:
            return
        self._refuse_if_taken_over(self.remote)
        files = self._versions()
        changed = [path for path, version in files.items() if self._published.get(path) != version]
        deleted = [path for path in self._published if path not in files]
        try:
            filesystem, root = fs.FileSystem.from_uri(self.remote)
            for path in sorted(changed, key=lambda path: (path.name in _PUBLISHED_LAST, path)):
                copy = f"{root}/{path.relative_to(self.local)}"
                filesystem.create_dir(copy.rsplit("/", 1)[0])
                # Object stores show a file when it is complete, these while it is written.
                complete = filesystem.type_name not in ("local", "hdfs")
                target = copy if complete else f"{copy}.tmp"
                fs.copy_files(str(path), target, destination_filesystem=filesystem)
                if target != copy:
                    filesystem.move(target, copy)
                self._published[path] = files[path]
            for path in deleted:
                filesystem.delete_file(f"{root}/{path.relative_to(self.local)}")
                del self._published[path]
        except STORAGE_ERRORS as error:
            raise StorageError(
                f"{self.remote} cannot be written: {error}; all files are in {self.local}"
            ) from error

    def _remove_copy(self) -> None:
        if all(self._published.get(path) == now for path, now in self._versions().items()):
            remove_tree(self.local)

    def sync_records(self) -> None:
        """Wait until the lines of all records, and the run directory, are on disk.

        Raises StorageError.
        """
        records = (self.rounds, self.epochs, self.schedule, self.timeline, self.events)
        for path in (*filter(Path.exists, records), self.local, self.local.parent):
            try:
                sync(path)
            except OSError as error:
                raise StorageError(f"{path} cannot be written: {error}") from error

    def _versions(self) -> dict[Path, tuple[int, int]]:
        """Return the version of every complete file; names of temporary files begin with a dot."""
        paths = self.local.rglob("*")
        return {p: _version(p) for p in paths if p.is_file() and not p.name.startswith(".")}


def _version(path: Path) -> tuple[int, int]:
    """Return modification time (ns) and size (bytes), which change with the content."""
    status = path.stat()
    return status.st_mtime_ns, status.st_size


def check_run(run_dir: str, argument: str = "--resume") -> None:
    """Raise JobError unless the directory holds a run with checkpoints; copies nothing."""
    problems = check_uri(run_dir, argument)
    if problems:
        raise JobError(problems, "arguments")
    with _readable(run_dir, argument):
        if "://" in run_dir:
            filesystem, root = open_filesystem(run_dir)
            found = filesystem.get_file_info(f"{root}/{_INDEX}").type == fs.FileType.File
        else:
            found = (local_path(run_dir) / _INDEX).is_file()
    if not found:
        rule = f"holds no checkpoint of a run ({_INDEX})"
        raise JobError([Problem(argument, rule, repr(run_dir))], "arguments")


@contextmanager
def _readable(run_dir: str, argument: str) -> Iterator[None]:
    try:
        yield
    except (*STORAGE_ERRORS, RuntimeError) as error:  # RuntimeError: unknown ~user
        problem = Problem(argument, f"cannot be read: {error}", repr(run_dir))
        raise JobError([problem], "arguments") from error


def newest_unfinished(storage_path: str, name: str) -> str | None:
    """Return the newest run directory of this name with checkpoints and without a result.

    None when there is none. Raises StorageError when the storage cannot be read.
    """
    run_id = re.compile(rf"{re.escape(name)}-\d{{8}}-\d{{6}}-[0-9a-f]{{16}}")
    try:
        filesystem, root = open_filesystem(storage_path)
        entries = filesystem.get_file_info(fs.FileSelector(root, allow_not_found=True))
        # A run id begins with its date, so the newest is the last one in order.
        run_ids = sorted(e.base_name for e in entries if run_id.fullmatch(e.base_name))
        unfinished = (r for r in reversed(run_ids) if _is_unfinished(filesystem, f"{root}/{r}"))
        newest = next(unfinished, None)
    except (OSError, ValueError) as error:
        raise StorageError(f"{storage_path} cannot be read: {error}") from error
    parent = storage_path if "://" in storage_path else root
    return None if newest is None else join(parent, newest)


def _is_unfinished(filesystem: fs.FileSystem, run_dir: str) -> bool:
    files = [f"{run_dir}/{_INDEX}", f"{run_dir}/result.json"]
    index, result = filesystem.get_file_info(files)
    return bool(index.type == fs.FileType.File and result.type == fs.FileType.NotFound)
