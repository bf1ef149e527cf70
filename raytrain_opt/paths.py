"""Every file a run writes, and how: whole or not at all.

A run directory is written on this machine; when the job's storage is elsewhere (a URI), it
is a copy that `publish` sends there after every commit.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from pyarrow import ArrowException, fs
from safetensors import SafetensorError

from raytrain_opt.errors import CommitError, JobError, Problem

# A full disk: torch.save raises RuntimeError, and safetensors an error of its own.
_WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)
_STORAGE_ERRORS = (OSError, ValueError, ArrowException)


class RunPaths:
    """The files of one run, below `local`; `shown` is where the user finds them."""

    def __init__(self, local: Path, remote: str | None = None) -> None:
        self.local = local
        self.remote = remote
        # What is at the remote place, as it was here when it was sent.
        self._published: dict[Path, tuple[int, int]] = {}

    @classmethod
    def create(cls, storage_path: str, name: str) -> RunPaths:
        """A new, unique run directory. Raises JobError when it cannot be made."""
        problems = check_storage(storage_path)
        if problems:
            raise JobError(problems)
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        run_id = f"{name}-{stamp}-{secrets.token_hex(2)}"
        if "://" in storage_path:
            local = Path(tempfile.mkdtemp(prefix="raytrain_opt-"))
            (local / "checkpoints").mkdir()
            return cls(local, f"{storage_path.rstrip('/')}/{run_id}")
        try:
            local = local_folder(storage_path) / run_id
            (local / "checkpoints").mkdir(parents=True)
        except (OSError, ValueError, RuntimeError) as error:  # of RuntimeError: an unknown ~user
            rule = f"no run directory can be made in it: {error}"
            hint = "give a folder or URI that can be written"
            raise JobError([Problem("storage_path", rule, repr(storage_path), hint)]) from error
        return cls(local)

    @classmethod
    def existing(cls, run_dir: str, argument: str = "--resume") -> RunPaths:
        """The directory of an earlier run; one under a URI is copied here first. `argument`: what
        it was given as.

        Raises JobError when there is no commit of a run.
        """
        problems = check_storage(run_dir, argument)
        if problems:
            raise JobError(problems, "arguments")
        remote: str | None = None
        try:
            local = local_folder(run_dir)
            if "://" in run_dir:
                local, remote = Path(tempfile.mkdtemp(prefix="raytrain_opt-")), run_dir.rstrip("/")
                _fetch(remote, local)
            there = (local / "checkpoints" / "index.json").is_file()
        except (*_STORAGE_ERRORS, RuntimeError) as error:  # of RuntimeError: an unknown ~user
            problem = Problem(argument, f"cannot be read: {error}", repr(run_dir))
            raise JobError([problem], "arguments") from error
        if not there:
            rule = "holds no commit of a run (checkpoints/index.json)"
            raise JobError([Problem(argument, rule, repr(run_dir))], "arguments")
        paths = cls(local, remote)
        if remote is not None:  # all that is here is there, and is removed there with it
            paths._published = paths._versions()
        return paths

    @property
    def shown(self) -> str:
        """Where the user finds the run."""
        return self.remote or str(self.local)

    @property
    def run_id(self) -> str:
        """The directory's name, unique."""
        return (self.remote or str(self.local)).rsplit("/", 1)[-1]

    @property
    def ray_storage(self) -> str:
        """Where Ray Train and Ray Tune keep what is theirs."""
        return f"{self.remote}/ray" if self.remote else str(self.local / "ray")

    @property
    def job(self) -> Path:
        """The job with all defaults filled in."""
        return self.local / "job.yaml"

    @property
    def rounds(self) -> Path:
        """One JSON line a round."""
        return self.local / "rounds.jsonl"

    @property
    def epochs(self) -> Path:
        """One JSON line an epoch."""
        return self.local / "epochs.jsonl"

    @property
    def timeline(self) -> Path:
        """One JSON line for each command that a worker or slot did, and each commit."""
        return self.local / "timeline.jsonl"

    @property
    def events(self) -> Path:
        """One JSON line for each failure, recovery, resume and early end."""
        return self.local / "events.jsonl"

    @property
    def batch_sizes(self) -> Path:
        """One JSON line a batch-size probe."""
        return self.local / "batch_size.jsonl"

    @property
    def batch_size(self) -> Path:
        """The chosen batch size, and what followed from it."""
        return self.local / "batch_size.json"

    @property
    def trace(self) -> Path:
        """Chrome trace of training steps at the chosen batch size."""
        return self.local / "trace.json"

    @property
    def schedule(self) -> Path:
        """The learning rate of every step."""
        return self.local / "schedule.json"

    @property
    def result(self) -> Path:
        """What came of the run."""
        return self.local / "result.json"

    @property
    def tensorboard(self) -> Path:
        """Folder of TensorBoard events."""
        return self.local / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        """Folder of commits; `index.json` in it names the whole ones."""
        return self.local / "checkpoints"

    def publish(self) -> None:
        """Send what is new to the remote storage, and remove there what was removed here.

        The index of commits goes last, so that it never names what is not there yet. Raises
        CommitError; nothing to do for a local run.
        """
        if self.remote is None:
            return
        files = self._versions()
        new = [path for path, changed in files.items() if self._published.get(path) != changed]
        gone = [path for path in self._published if path not in files]
        try:
            target, root = fs.FileSystem.from_uri(self.remote)
            for path in sorted(new, key=lambda path: (path.name == "index.json", path)):
                there = f"{root}/{path.relative_to(self.local)}"
                target.create_dir(there.rsplit("/", 1)[0])
                fs.copy_files(str(path), there, destination_filesystem=target)
            for path in gone:
                target.delete_file(f"{root}/{path.relative_to(self.local)}")
        except _STORAGE_ERRORS as error:
            raise CommitError(f"{self.remote} cannot be written: {error}") from error
        self._published = files

    def sync_records(self) -> None:
        """Until the lines of all records are on disk. Raises CommitError."""
        for path in (self.rounds, self.epochs, self.timeline, self.events):
            try:
                if path.exists():
                    with path.open("rb") as file:
                        os.fsync(file.fileno())
            except OSError as error:
                raise CommitError(f"{path} cannot be written: {error}") from error

    def _versions(self) -> dict[Path, tuple[int, int]]:
        """All files that are whole: one that is just being written begins with a point."""
        found = self.local.rglob("*")
        return {p: _version(p) for p in found if p.is_file() and not p.name.startswith(".")}


def _version(path: Path) -> tuple[int, int]:
    """Changes when the file does: time of the last change (ns) and size (bytes)."""
    at = path.stat()
    return at.st_mtime_ns, at.st_size


def _fetch(uri: str, local: Path) -> None:
    source, root = fs.FileSystem.from_uri(uri)
    fs.copy_files(root, str(local), source_filesystem=source)


# Parts of the names of options that hold one.
_SECRETS = ("secret", "token", "key", "password")


def check_storage(storage: str, field: str = "storage_path") -> list[Problem]:
    """Credentials in a URI would stand in every record and message of the run."""
    if "://" not in storage:
        return []
    uri = urlsplit(storage)
    options = " ".join(name for name, _ in parse_qsl(uri.query)).lower()
    # A user alone is no secret: Azure names containers so (abfss://container@account…).
    user, at, _ = uri.netloc.rpartition("@")
    if not (at and ":" in user) and not any(word in options for word in _SECRETS):
        return []
    rule = "holds credentials, which a run would write into its records"
    hint = "give them by the environment or the files of your cloud's tools instead"
    return [Problem(field, rule, None, hint)]


def newest_unfinished(storage_path: str, name: str) -> str | None:
    """The newest run directory of this name that has commits and no result, local or a URI.

    Raises CommitError when the storage cannot be read.
    """
    made_by_us = re.compile(rf"{re.escape(name)}-\d{{8}}-\d{{6}}-[0-9a-f]{{4}}")
    try:
        storage, root = _storage(storage_path)
        found = storage.get_file_info(fs.FileSelector(root, allow_not_found=True))
        runs = sorted(at.base_name for at in found if made_by_us.fullmatch(at.base_name))
        unfinished = (run for run in reversed(runs) if _is_unfinished(storage, f"{root}/{run}"))
        run_id = next(unfinished, None)
    except (OSError, ValueError) as error:
        raise CommitError(f"{storage_path} cannot be read: {error}") from error
    place = storage_path if "://" in storage_path else root
    return None if run_id is None else f"{place.rstrip('/')}/{run_id}"


def _is_unfinished(storage: fs.FileSystem, run_dir: str) -> bool:
    files = [f"{run_dir}/checkpoints/index.json", f"{run_dir}/result.json"]
    index, result = storage.get_file_info(files)
    return bool(index.type == fs.FileType.File and result.type == fs.FileType.NotFound)


def read_stored(storage_path: str, name: str) -> bytes | None:
    """A file directly under a storage path, local or a URI; None when it is not there.

    Raises CommitError when the storage cannot be read.
    """
    try:
        storage, root = _storage(storage_path)
        if storage.get_file_info(f"{root}/{name}").type != fs.FileType.File:
            return None
        with storage.open_input_file(f"{root}/{name}") as file:
            return bytes(file.read())
    except _STORAGE_ERRORS as error:
        raise CommitError(f"{storage_path}/{name} cannot be read: {error}") from error


def write_stored(storage_path: str, name: str, content: bytes) -> None:
    """The inverse of `read_stored`; raises CommitError."""
    try:
        storage, root = _storage(storage_path)
        storage.create_dir(f"{root}/{name}".rsplit("/", 1)[0])
        with storage.open_output_stream(f"{root}/{name}") as file:
            file.write(content)
    except _STORAGE_ERRORS as error:
        raise CommitError(f"{storage_path}/{name} cannot be written: {error}") from error


def remove_stored(storage_path: str, name: str) -> None:
    """Remove what `write_stored` wrote; raises CommitError."""
    try:
        storage, root = _storage(storage_path)
        storage.delete_file(f"{root}/{name}")
    except _STORAGE_ERRORS as error:
        raise CommitError(f"{storage_path}/{name} cannot be removed: {error}") from error


# Where Ray unpacks the folder that a job was submitted with. It is deleted after the job.
_COPIES = "working_dir_files"


def local_folder(path: str) -> Path:
    """A path of results, made absolute. A relative one is below the working directory, or below
    the home when that is the copy of a submitted folder: results must outlive it.
    """
    here = Path.cwd()
    base = Path.home() if _COPIES in here.parts else here
    return base / Path(path).expanduser()


def _storage(path: str) -> tuple[fs.FileSystem, str]:
    local = path if "://" in path else str(local_folder(path))
    storage, root = fs.FileSystem.from_uri(local)
    return storage, root.rstrip("/")


def write_atomic(path: Path, write: Callable[[Path], None]) -> None:
    """Have `write` fill a file beside `path` that then takes its place.

    Raises CommitError naming the path; what stood there before stays. Makes no folder: one that
    vanished while a run was writing to it would be back without what was in it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except _WRITE_ERRORS as error:
        temporary.unlink(missing_ok=True)
        raise CommitError(f"{path} cannot be written: {error}") from error


def write_json(path: Path, value: Any) -> None:
    """Readable JSON, atomically."""
    text = json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    write_text(path, text)


def write_text(path: Path, text: str) -> None:
    """UTF-8 text, atomically."""

    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8")

    write_atomic(path, write)


def append_json_line(path: Path, value: Any) -> None:
    """One more line of a record. Raises CommitError naming the path."""
    append_json_lines(path, [value])


def append_json_lines(path: Path, values: Sequence[Any]) -> None:
    """More lines of a record. Raises CommitError naming the path."""
    lines = [json.dumps(value, allow_nan=False, ensure_ascii=False) + "\n" for value in values]
    try:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(lines)
    except OSError as error:
        raise CommitError(f"{path} cannot be written: {error}") from error


def remove_tree(path: Path) -> None:
    """Remove a folder that is ours."""
    shutil.rmtree(path, ignore_errors=True)
