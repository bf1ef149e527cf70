"""Reading and writing files: complete or not at all, locally or under a URI.

A storage path is a local path or a URI (s3://, gs://, abfss://, file://). `read`, `write` and
`remove` work on files directly under one; the other functions write local files.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from pyarrow import ArrowException, fs
from safetensors import SafetensorError

from raytrain_opt.errors import Problem, StorageError

# On a full disk, torch.save raises RuntimeError, and safetensors its own error.
_WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)
# What pyarrow raises for a storage that cannot be used.
STORAGE_ERRORS = (OSError, ValueError, ArrowException)

# Ray unpacks the directory that a job was submitted with below this one, and deletes it later.
_SUBMITTED_DIRECTORIES = "working_dir_files"

# Options of a URI (of pyarrow) without secrets; any other may be one, as `sig` of Azure is.
_OPTIONS = {"endpoint_override", "force_virtual_addressing", "project_id", "region", "scheme"}


def check_uri(storage_path: str, field: str = "storage_path") -> list[Problem]:
    """Return a problem of `field` when the URI may hold secrets: every record would show them."""
    if "://" not in storage_path:
        return []
    uri = urlsplit(storage_path)
    # A user without a password is not a secret: abfss://container@account names a container.
    user, separator, _ = uri.netloc.rpartition("@")
    has_password = bool(separator) and ":" in user
    options = {name for name, _ in parse_qsl(uri.query, keep_blank_values=True)}
    if not has_password and options <= _OPTIONS:
        return []
    rule = "holds credentials, or options that may be: a run would write them into its records"
    hint = (
        "use the environment or the configuration files of your cloud's tools instead; options "
        f"that may stand here are {', '.join(sorted(_OPTIONS))}"
    )
    return [Problem(field, rule, None, hint)]


def join(storage_path: str, name: str) -> str:
    """Return the path or URI of what is called `name` below a storage path.

    Options of a URI stay at its end: s3://bucket/runs?region=x -> s3://bucket/runs/NAME?region=x.
    """
    if "://" not in storage_path:
        return f"{storage_path.rstrip('/')}/{name}"
    uri = urlsplit(storage_path)
    return urlunsplit(uri._replace(path=f"{uri.path.rstrip('/')}/{name}"))


def last_name(storage_path: str) -> str:
    """Return the last part of a path or a URI, without options."""
    path = urlsplit(storage_path).path if "://" in storage_path else storage_path
    return path.rstrip("/").rsplit("/", 1)[-1]


def local_path(path: str) -> Path:
    """Return the absolute path for results.

    A relative path is below the working directory. In a submitted job, whose working directory Ray
    deletes afterwards, it is below the home directory.
    """
    directory = Path.cwd()
    base = Path.home() if _SUBMITTED_DIRECTORIES in directory.parts else directory
    return base / Path(path).expanduser()


def open_filesystem(storage_path: str) -> tuple[fs.FileSystem, str]:
    """Return the file system of a storage path, and the path in it without a final slash."""
    uri = storage_path if "://" in storage_path else str(local_path(storage_path))
    filesystem, root = fs.FileSystem.from_uri(uri)
    return filesystem, root.rstrip("/")


def read(storage_path: str, name: str) -> bytes | None:
    """Return the content of a file; None when there is no such file.

    Raises StorageError when the storage cannot be read.
    """
    try:
        filesystem, root = open_filesystem(storage_path)
        if filesystem.get_file_info(f"{root}/{name}").type != fs.FileType.File:
            return None
        with filesystem.open_input_file(f"{root}/{name}") as file:
            return bytes(file.read())
    except STORAGE_ERRORS as error:
        raise StorageError(f"{join(storage_path, name)} cannot be read: {error}") from error


def write(storage_path: str, name: str, content: bytes) -> None:
    """Write a file, atomically on this machine, and the directories above it.

    Raises StorageError.
    """
    try:
        if "://" not in storage_path:
            path = local_path(storage_path) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(path, content)
            return
        filesystem, root = open_filesystem(storage_path)
        filesystem.create_dir(f"{root}/{name}".rsplit("/", 1)[0])
        with filesystem.open_output_stream(f"{root}/{name}") as file:
            file.write(content)
    except STORAGE_ERRORS as error:
        raise StorageError(f"{join(storage_path, name)} cannot be written: {error}") from error


def remove(storage_path: str, name: str) -> None:
    """Remove a file. Raises StorageError."""
    try:
        filesystem, root = open_filesystem(storage_path)
        filesystem.delete_file(f"{root}/{name}")
    except STORAGE_ERRORS as error:
        raise StorageError(f"{join(storage_path, name)} cannot be removed: {error}") from error


def write_atomic(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file next to `path`, then move it to `path`.

    The file is then on the disk, also its name. Its mode follows the umask, whatever `write` does
    (safetensors makes files that only their owner can read).

    Raises StorageError naming the path; an earlier file stays. Creates no directory: if a run
    directory vanished during the run, an empty one must not take its place.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        temporary.touch(exist_ok=False)
        mode = temporary.stat().st_mode
        write(temporary)
        temporary.chmod(mode)
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    except _WRITE_ERRORS as error:
        temporary.unlink(missing_ok=True)
        raise StorageError(f"{path} cannot be written: {error}") from error


def sync(path: Path) -> None:
    """Wait until a file's content, or a directory's list of names, is on the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Write readable JSON, atomically. Raises StorageError naming the path."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text, atomically. Raises StorageError naming the path."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write bytes, atomically. Raises StorageError naming the path."""

    def write(temporary: Path) -> None:
        temporary.write_bytes(content)

    write_atomic(path, write)


def append_lines(path: Path, lines: Sequence[str]) -> None:
    """Append lines of UTF-8 text, given without their ends. Raises StorageError.

    A last line without an end, which a full disk or a crash has left, is cut off first.
    """
    try:
        with open(path, "ab+", opener=refuse_links) as file:
            _cut_torn_line(file)
            file.write("".join(f"{line}\n" for line in lines).encode())
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error}") from error


def refuse_links(path: str, flags: int) -> int:
    """Open a file for `open`. Raises OSError for a link, which could lead out of the run.

    Somebody else may have made the run directory.
    """
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _cut_torn_line(file: BinaryIO) -> None:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - 1, 0))
    if file.read() not in (b"", b"\n"):
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)


def remove_tree(path: Path) -> None:
    """Remove a directory that this package created; what cannot be removed stays."""
    shutil.rmtree(path, ignore_errors=True)
