"""The copy of a run under a URI: fetched to be resumed, and updated after every checkpoint.

Every object that is smaller than a part of a multi-part upload is put on condition that it still
has the version that this process wrote or fetched. If not, either another process has taken the
lease, or an earlier holder or a repeated request of our own was late, and is overwritten.

Who takes the lease changes the index first. From then on a former holder can neither name a
checkpoint nor remove one, which it does after it has written the index.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, PreconditionError
from obstore.store import ObjectStore

from raytrain_opt.remote.lease import Lease
from raytrain_opt.storage import (
    RECORD_PART,
    STORAGE_ERRORS,
    error_text,
    open_store,
    read_object,
    record_part,
    storage_errors,
)

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
