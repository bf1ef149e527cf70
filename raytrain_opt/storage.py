"""Reading and writing files: complete or not at all, in a folder or an object storage.

A storage path is a folder (also as file://) or the URI of an object storage (s3://, gs://, az://,
abfss://). `read`, `write` and `remove` work on files below one; the others write local files.
"""

from __future__ import annotations

import codecs
import errno
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit, urlunsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import ObjectStore, from_url
from safetensors import SafetensorError

from raytrain_opt.errors import Problem, StorageError

# On a full disk, torch.save raises RuntimeError, and safetensors its own error.
_WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)
# What obstore raises for a storage that cannot be used.
STORAGE_ERRORS = (OSError, ValueError, NotImplementedError, BaseError)

# Ray unpacks the directory that a job was submitted with below this one, and deletes it later.
_SUBMITTED_DIRECTORIES = "working_dir_files"

_SCHEMES = ("s3", "gs", "az", "azure", "abfs", "abfss")
# Options of a URI (of obstore) without secrets; any other may be one, as `sig` of Azure is.
_OPTIONS = {"endpoint", "region", "virtual_hosted_style_request"}
# A request is repeated after 5xx and lost connections. Short, because checkpoints are repeated as
# a whole (`CheckpointSchedule`), and because Ctrl-C waits for a request of the main thread.
_RETRIES: Any = {"max_retries": 5, "retry_timeout": timedelta(seconds=60)}
# A request sends or receives at most 8 MiB before an answer or more data has to follow; the other
# limit, for all of a request, ends downloads of large checkpoints, so it is generous.
_CLIENT = {"read_timeout": timedelta(seconds=30), "timeout": timedelta(hours=1)}
# Far more than a record, a job or an image has; a larger file would only fill the memory.
MAX_BYTES = 2**30


def check_uri(storage_path: str, field: str = "storage_path") -> list[Problem]:
    """Return a problem of `field` when it is a wrong URI, or one that may hold secrets."""
    if "://" not in storage_path:
        return []
    try:
        uri = urlsplit(storage_path)
    except ValueError:
        return [Problem(field, "is no valid URI; brackets belong around IPv6 addresses only")]
    if uri.scheme == "file" and uri.netloc not in ("", "localhost"):
        hint = "write three slashes before an absolute path, or a relative path without file://"
        return [Problem(field, "names a host, not a folder", hint=hint)]
    # A user without a password is not a secret: abfss://container@account names a container.
    user, separator, _ = uri.netloc.rpartition("@")
    has_password = bool(separator) and ":" in user
    options = dict(parse_qsl(uri.query, keep_blank_values=True))
    if not has_password and options.keys() <= _OPTIONS and "@" not in "".join(options.values()):
        return []
    rule = "holds credentials, or options that may be: a run would write them into its records"
    hint = (
        "use environment variables (AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, "
        "AZURE_STORAGE_ACCOUNT_KEY, ...) or the roles of your machines instead; options that may "
        f"stand here are {', '.join(sorted(_OPTIONS))}"
    )
    return [Problem(field, rule, None, hint)]


def is_remote(storage_path: str) -> bool:
    """Return whether a storage path is the URI of an object storage."""
    return "://" in storage_path and not storage_path.startswith("file://")


def join(storage_path: str, name: str) -> str:
    """Return the path or URI of what is called `name` below a storage path.

    Options of a URI stay at its end: s3://bucket/runs?region=x -> s3://bucket/runs/NAME?region=x.
    """
    if "://" not in storage_path:
        return f"{storage_path.rstrip('/')}/{name}"
    uri = urlsplit(storage_path)
    return urlunsplit(uri._replace(path=f"{uri.path.rstrip('/')}/{name}"))


def folder_and_name(uri: str) -> tuple[str, str]:
    """Return the folder of a file and its name; options of a URI stay with the folder."""
    path, question, options = uri.partition("?")
    folder, slash, name = path.rpartition("/")
    return f"{folder or slash or '.'}{question}{options}", name


def last_name(storage_path: str) -> str:
    """Return the last part of a path or a URI, without options."""
    path = urlsplit(storage_path).path if "://" in storage_path else storage_path
    return path.rstrip("/").rsplit("/", 1)[-1]


def local_path(path: str) -> Path:
    """Return the absolute path of a folder or file:// URI; in a submitted job, below the home."""
    if path.startswith("file://"):
        return Path(unquote(urlsplit(path).path))
    directory = Path.cwd()
    base = Path.home() if _SUBMITTED_DIRECTORIES in directory.parts else directory
    return base / Path(path).expanduser()


@lru_cache
def open_store(uri: str) -> ObjectStore:
    """Return a client for the objects below a URI. Raises ValueError and errors of obstore."""
    parts = urlsplit(uri)
    if parts.scheme not in _SCHEMES:
        schemes = ", ".join(f"{scheme}://" for scheme in (*_SCHEMES, "file"))
        raise ValueError(f"unknown kind of storage {parts.scheme}://; there are {schemes}")
    options: Any = dict(parse_qsl(parts.query))
    client: Any = dict(_CLIENT)
    if options.get("endpoint", "").startswith("http://"):
        client["allow_http"] = True
    return from_url(
        urlunsplit(parts._replace(query="")),
        config=options,
        client_options=client,
        retry_config=_RETRIES,
    )


@contextmanager
def storage_errors(action: str) -> Iterator[None]:
    """Raise StorageError with what failed (`action`) for an error of the storage."""
    try:
        yield
    except STORAGE_ERRORS as error:
        # Without its cause: URLs in it may be signed.
        raise StorageError(f"{action}: {error_text(error)}") from None


def error_text(error: BaseException) -> str:
    """Return the message of a storage's error in a line, without the queries of its URLs."""
    message, _, debug = str(error).partition("\n\nDebug source")
    text = re.sub(r"(://[^\s?]*)\?\S*", r"\1", " ".join(message.split()))
    return f"{text} (timed out)" if "TimedOut" in debug else text


def read(storage_path: str, name: str) -> bytes | None:
    """Return the content of a file; None when there is no such file. Raises StorageError."""
    with storage_errors(f"{join(storage_path, name)} cannot be read"):
        if is_remote(storage_path):
            return read_object(open_store(storage_path), name)
        try:
            return read_file(local_path(storage_path) / name)
        except (FileNotFoundError, NotADirectoryError):
            return None


def read_file(path: Path, max_bytes: int | None = None) -> bytes:
    """Return the content of a local file. Raises OSError, also if it is no file or too large."""
    with open(path, "rb", opener=open_plain) as file:
        limit = MAX_BYTES if max_bytes is None else max_bytes
        if os.fstat(file.fileno()).st_size > limit:
            raise OSError(errno.EFBIG, f"has more than {limit:,} bytes", str(path))
        return file.read()


def open_plain(path: str, flags: int) -> int:
    """Open a file for `open`, without waiting. Raises OSError if it is a FIFO, a device, ….

    A link is not written through: somebody else may have made the run.
    """
    flags |= os.O_NONBLOCK | (os.O_NOFOLLOW if flags & (os.O_WRONLY | os.O_RDWR) else 0)
    descriptor = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is not a plain file", path)
    return descriptor


def read_object(store: ObjectStore, name: str) -> bytes | None:
    """Return the content of an object; None if it is missing."""
    try:
        return bytes(obstore.get(store, name).bytes())
    except FileNotFoundError:
        return None


def write(storage_path: str, name: str, content: bytes) -> None:
    """Write a file, atomically, and the folders above it. Raises StorageError."""
    with storage_errors(f"{join(storage_path, name)} cannot be written"):
        if is_remote(storage_path):
            obstore.put(open_store(storage_path), name, content)
            return
        path = local_path(storage_path) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, content)


def remove(storage_path: str, name: str) -> None:
    """Remove a file. Raises StorageError."""
    with storage_errors(f"{join(storage_path, name)} cannot be removed"):
        if is_remote(storage_path):
            obstore.delete(open_store(storage_path), name)
        else:
            (local_path(storage_path) / name).unlink()


def write_atomic(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file next to `path`, then move it to `path`.

    The file is then on the disk, also its name; its mode follows the umask. Raises StorageError
    naming the path; an earlier file stays. Creates no directory: if a run directory vanished
    during the run, an empty one must not take its place.
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
        with suppress(OSError):
            temporary.unlink()
        reason = error.strerror if isinstance(error, OSError) else None
        raise StorageError(f"{path} cannot be written: {reason or error}") from error


def sync(path: Path) -> None:
    """Wait until a file's content, or a directory's list of names, is on the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
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
    write_atomic(path, lambda temporary: temporary.write_bytes(content))


def append_lines(path: Path, lines: Sequence[str]) -> None:
    """Append lines of JSON, after cutting a torn last one off. Raises StorageError."""
    try:
        with open(path, "ab+", opener=open_plain) as file:
            file.seek(max(file.tell() - 1, 0))
            if file.read() not in (b"", b"\n"):
                file.seek(0)
                content = file.read()
                last = content.rpartition(b"\n")[2]
                if _is_json(last):
                    lines = ["", *lines]
                else:
                    file.truncate(len(content) - len(last))
            file.write("".join(f"{line}\n" for line in lines).encode())
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error}") from error


def complete_lines(content: bytes) -> list[bytes]:
    """Return the lines of JSON, without a last one that was cut off or is being written.

    An editor may have removed the newline of the last one, added empty lines, or put a byte order
    mark before all.
    """
    *lines, last = content.removeprefix(codecs.BOM_UTF8).split(b"\n")
    return [line for line in lines if line.strip()] + ([last] if _is_json(last) else [])


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def remove_tree(path: Path) -> None:
    """Remove a directory that this package created; what cannot be removed stays."""
    shutil.rmtree(path, ignore_errors=True)
