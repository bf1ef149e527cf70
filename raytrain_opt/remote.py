"""The copy of a run under a URI: fetched to be resumed, and updated after every checkpoint.

Every object that is smaller than a part of a multi-part upload is put on condition that it still
has the version that this process wrote or fetched. If not, either another process has taken the
lease, or an earlier holder or a repeated request of our own was late, and is overwritten.

Who takes the lease changes the index first. From then on a former holder can neither name a
checkpoint nor remove one, which it does after it has written the index.

One writer at a time below a URI, as long as it shows that it is alive.

    lease/000001   of the process that began the run
    lease/000002   of the process that resumed it, and so on: its content names the process

The largest number holds the lease. It is taken by a put that fails if the object exists, renewed
by writing the same object again, and given back by emptying it. Whoever finds an object that was
neither renewed nor emptied for `LEASE_S` takes its process for dead. Ages are differences of the
storage's own clock.

The number is a fencing token (M. Kleppmann, "How to do distributed locking", 2016): `RunCopy`
writes it into the index of checkpoints, so that an earlier holder that wakes up cannot write it.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from threading import Event, Thread
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, PreconditionError
from obstore.store import ObjectStore

from raytrain_opt.clock import utc_now
from raytrain_opt.errors import JobError, Problem, TakenOverError, printable
from raytrain_opt.storage import (
    RECORD_PART,
    STORAGE_ERRORS,
    error_text,
    open_store,
    read_object,
    record_part,
    storage_errors,
)

# How long a process that was killed keeps others out, and how often a live one renews: three
# renewals may be lost.
LEASE_S, _RENEWAL_S = 60.0, 15.0
_FOLDER = "lease"


def is_leased(uri: str) -> bool:
    """Return whether a live process seems to write below the URI. Raises errors of the storage."""
    newest = Lease(uri).newest()
    if newest is None or not newest["size"]:
        return False
    age: timedelta = datetime.now(UTC) - newest["last_modified"]
    return age.total_seconds() < LEASE_S


class Lease:
    """The right to write below `uri`. `number`: the fencing token, 0 without the lease."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self.number = 0
        self._holder = b""
        self._ended = Event()
        self._renewal = Thread(target=self._renew, daemon=True)

    @cached_property
    def _store(self) -> ObjectStore:
        return open_store(self._uri)

    def take(self) -> None:
        """Take the lease, and renew it. Raises JobError if a live process holds it."""
        newest = self.newest()
        if newest is not None and newest["size"] and self._age_s(newest) < LEASE_S:
            raise self._held(newest["path"])
        number = int(newest["path"].rsplit("/", 1)[1]) + 1 if newest else 1
        holder = f"process {os.getpid()} on {socket.gethostname()} since {utc_now()}"
        # A token, because a process may try twice within a second.
        self._holder = f"{holder} ({secrets.token_hex(4)})".encode()
        try:
            obstore.put(self._store, _name(number), self._holder, mode="create")
        except STORAGE_ERRORS as error:
            # The put may be done and its answer lost; a repeated one then finds its own object.
            if read_object(self._store, _name(number)) != self._holder:
                if isinstance(error, AlreadyExistsError):
                    raise self._held(_name(number)) from None
                raise
        self.number = number
        self._renewal.start()

    def check(self) -> None:
        """Raise TakenOverError if another process has the lease, or an error of the storage."""
        newest = self.newest()
        if newest is not None and newest["path"] > _name(self.number):
            holder = self._read_holder(newest["path"])
            raise TakenOverError(
                f"{self._uri} was resumed by another process, which writes to it now: {holder}"
            )

    def release(self) -> None:
        """Give the lease back; the storage does so after `LEASE_S` if it cannot be reached."""
        if self._renewal.is_alive():
            self._ended.set()
            self._renewal.join(_RENEWAL_S)
            with suppress(*STORAGE_ERRORS):
                obstore.put(self._store, _name(self.number), b"")

    def _renew(self) -> None:
        while not self._ended.wait(_RENEWAL_S):
            # The next renewal may succeed; until then `check` finds whoever takes the lease.
            with suppress(*STORAGE_ERRORS):
                obstore.put(self._store, _name(self.number), self._holder)

    def newest(self) -> Any:
        """Return name, size and date of the object with the largest number; None without any."""
        objects = [o for batch in obstore.list(self._store, prefix=_FOLDER) for o in batch]
        numbered = [o for o in objects if o["path"].rsplit("/", 1)[1].isdigit()]
        return max(numbered, key=lambda o: o["path"], default=None)

    def _age_s(self, lease: Any) -> float:
        """Return the seconds since an object was written, by the storage's clock."""
        name = f"{_FOLDER}/clock-{secrets.token_hex(8)}"
        obstore.put(self._store, name, b"now")
        now: datetime = obstore.head(self._store, name)["last_modified"]
        with suppress(*STORAGE_ERRORS):  # it may stay
            obstore.delete(self._store, name)
        written: datetime = lease["last_modified"]
        return (now - written).total_seconds()

    def _held(self, name: str) -> JobError:
        rule = (
            f"another process is writing to this run: {self._read_holder(name)}; wait for it, or "
            f"stop it. If it was killed, the run can be resumed {LEASE_S:g} s after that"
        )
        return JobError([Problem("--resume", rule, repr(self._uri))], "arguments")

    def _read_holder(self, name: str) -> str:
        content = bytes(obstore.get(self._store, name).bytes())
        return printable(content.decode(errors="replace")) or "a process that has ended since"


def _name(number: int) -> str:
    return f"{_FOLDER}/{number:06d}"


INDEX = "checkpoints/index.json"
# Ray Train and Ray Tune write there; nothing of it is needed to resume.
RAY_FOLDER = "ray"
# A file of a checkpoint, and a record; other names of a storage could lead anywhere.
_CHECKPOINT_FILE = re.compile(
    r"checkpoints/(epoch-\d+(?:-(?:round|step)-\d+)?)/(weights\.safetensors|rest\.pt)"
)
_RECORD_FILE = re.compile(r"(\w+\.(?:json|jsonl|yaml))(\.\d+)?")
# After all other files, so that they never name or follow something missing.
_LAST = (INDEX, "result.json")
# Larger files, which only checkpoints have, are uploaded in parts of this size; a part is
# repeated alone.
_UPLOAD_PART = 8 * 2**20


_ObjectVersion = Any  # `obstore.UpdateVersion`, which exists for type checkers only


def _object_version(reply: Any) -> _ObjectVersion:
    """Return the version in a reply: S3 and Azure compare e_tag, GCS version."""
    return {key: reply[key] for key in ("e_tag", "version") if reply[key] is not None}


@dataclass(frozen=True)
class _Part:
    """What one object holds: `size` bytes of a file from `start`. `version` changes with them."""

    path: Path
    start: int
    size: int
    version: tuple[int, int]

    def read(self) -> bytes:
        with self.path.open("rb") as file:
            file.seek(self.start)
            return file.read(self.size)


class RunCopy:
    """The objects of one run below `uri`, and what of them the folder `local` has."""

    def __init__(self, uri: str, local: Path) -> None:
        self.uri, self._local, self._lease = uri, local, Lease(uri)
        # Version of what each object holds (None: not in the folder), and the object's own.
        self._published: dict[str, tuple[tuple[int, int] | None, _ObjectVersion]] = {}
        self._has_noted = False

    @cached_property
    def _store(self) -> ObjectStore:
        return open_store(self.uri)

    def take_lease(self) -> None:
        """Let no other process write. Raises JobError if a live one does, and StorageError."""
        with storage_errors(f"{self.uri} cannot be written"):
            self._lease.take()
            try:
                self._fence()
            except BaseException:
                self._lease.release()
                raise

    def release_lease(self) -> None:
        """Let other processes write from now on."""
        self._lease.release()

    def _fence(self) -> None:
        """Change the index, so that a former holder's conditional puts fail."""
        while True:
            try:
                index = obstore.get(self._store, INDEX)
            except FileNotFoundError:
                return
            content = self._numbered(bytes(index.bytes()))
            with suppress(PreconditionError):  # the former holder has written it just now
                obstore.put(self._store, INDEX, content, mode=_object_version(index.meta))
                return

    def _numbered(self, index: bytes) -> bytes:
        """Return the index with the number of the lease, which a damaged one does not get."""
        with suppress(TypeError, ValueError):
            return json.dumps(json.loads(index) | {"lease": self._lease.number}).encode()
        return index

    def fetch(self) -> None:
        """Copy the records and the checkpoints that the index names into the folder.

        A run that was killed between two writes leaves checkpoints that no index names: they are
        removed by the next `publish`. Raises errors of the storage.
        """
        index = read_object(self._store, INDEX) or b""
        named = set(re.findall(r"epoch-[-\w]+", index.decode(errors="replace")))
        listed = [
            *obstore.list_with_delimiter(self._store)["objects"],
            *(o for batch in obstore.list(self._store, prefix="checkpoints") for o in batch),
        ]
        versions: dict[str, _ObjectVersion] = {}
        for name, version in ((o["path"], _object_version(o)) for o in listed):
            checkpoint, record = _CHECKPOINT_FILE.fullmatch(name), _RECORD_FILE.fullmatch(name)
            if not (checkpoint or record or name == INDEX):
                continue
            versions[name] = version
            if checkpoint[1] in named if checkpoint else not (record and record[2]):
                self._fetch_file(name)
        files = self._parts()
        self._published = {
            name: (files[name].version if name in files else None, version)
            for name, version in versions.items()
        }

    def _fetch_file(self, name: str) -> None:
        path = self._local / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".jsonl"):
            path.write_bytes(read_object(self._store, name) or b"")
            return
        with path.open("wb") as file:
            for chunk in obstore.get(self._store, name).stream(min_chunk_size=_UPLOAD_PART):
                file.write(chunk)

    def publish(self) -> str | None:
        """Copy what is new, remove what was deleted. Raises StorageError, TakenOverError.

        Returns once why objects that are not needed any more cannot be removed: they stay.
        """
        with storage_errors(f"{self.uri} cannot be written; all files are in {self._local}"):
            self._lease.check()
            before = dict(self._published)
            files = self._parts()
            for name in sorted(files, key=lambda name: (name in _LAST, name)):
                version, object_version = self._published.get(name, (None, None))
                if version != files[name].version:
                    object_version = self._put(name, files[name], object_version)
                    self._published[name] = files[name].version, object_version
            if self._published != before:
                self._check_stored(files)
        for name in self._published.keys() - files.keys():
            try:
                with suppress(FileNotFoundError):
                    obstore.delete(self._store, name)
            except STORAGE_ERRORS as error:  # only tidying: the next time may succeed
                first, self._has_noted = not self._has_noted, True
                text = f"{self.uri}: old files, as {name}, cannot be removed: {error_text(error)}"
                return text if first else None
            del self._published[name]
        return None

    def _check_stored(self, names: Iterable[str]) -> None:
        """Compare with what the storage said that it stored. Raises ValueError."""
        stored = {o["path"]: o["e_tag"] for batch in obstore.list(self._store) for o in batch}
        e_tags = {name: self._published[name][1].get("e_tag") for name in names}
        lost = [n for n, e in e_tags.items() if n not in stored or e not in (stored[n], None)]
        for name in lost:
            del self._published[name]  # the next attempt writes it again
        if lost:
            self._lease.check()
            raise ValueError(f"the storage does not have {lost[0]}, which it said it stored")

    def _put(self, name: str, part: _Part, version: _ObjectVersion | None) -> _ObjectVersion:
        """Write an object that has this version, or that does not exist (None)."""
        options: dict[str, Any]
        if part.size > _UPLOAD_PART:  # parts cannot be put on a condition
            self._lease.check()
            options = {"use_multipart": True, "chunk_size": _UPLOAD_PART, "max_concurrency": 4}
            return _object_version(obstore.put(self._store, name, part.path, **options))
        content = self._numbered(part.read()) if name == INDEX else part.read()
        while True:
            options = {"use_multipart": False, "mode": version or "create"}
            try:
                return _object_version(obstore.put(self._store, name, content, **options))
            except (AlreadyExistsError, PreconditionError):
                version = _object_version(obstore.head(self._store, name))
                self._lease.check()

    def is_complete(self) -> bool:
        """Return whether the objects hold everything that the folder has."""
        files = self._parts().items()
        return all(self._published.get(name, (None,))[0] == file.version for name, file in files)

    def _parts(self) -> dict[str, _Part]:
        """Return what the objects should hold, by their names.

        Names of temporary files begin with a dot. A record is appended to as long as its inode
        stays the same, so that its full parts are not written again.
        """
        parts = {}
        for path in self._local.rglob("*"):
            name = path.relative_to(self._local).as_posix()
            if path.name.startswith(".") or name.startswith(f"{RAY_FOLDER}/") or path.is_dir():
                continue
            status = path.stat()
            size = status.st_size
            if path.suffix != ".jsonl":
                parts[name] = _Part(path, 0, size, (status.st_mtime_ns, size))
                continue
            for number, start in enumerate(range(0, size, RECORD_PART)):
                length = min(RECORD_PART, size - start)
                part = _Part(path, start, length, (status.st_ino, length))
                parts[record_part(name, number)] = part
        return parts
