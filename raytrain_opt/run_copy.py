"""The copy of a run under a URI: fetched to be resumed, and updated after every checkpoint.

One process writes at a time: the one that the index of checkpoints names. Whoever resumes a run
writes itself into the index, if nobody has changed the index since it was fetched; a process that
has lost the run then finds another name there and ends.

Every object that is smaller than a part of a multi-part upload is put on condition that it still
has the version that this process wrote or fetched. If not, either another process writes the run,
or an earlier request was late, and is overwritten.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import time
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, GenericError, PreconditionError
from obstore.store import ObjectStore

from raytrain_opt.clock import utc_now
from raytrain_opt.errors import TakenOverError, printable
from raytrain_opt.storage import STORAGE_ERRORS, open_store, storage_errors

INDEX = "checkpoints/index.json"
# Names the process that began the run.
_FIRST_WRITER = "lease/000001"
# Ray Train and Ray Tune write there; nothing of it is needed to resume.
RAY_FOLDER = "ray"
# A file of a checkpoint, and a record; other names of a storage could lead anywhere.
_CHECKPOINT_FILE = re.compile(r"checkpoints/(epoch-[-\w]+)/(weights\.safetensors|rest\.pt)")
_RECORD_FILE = re.compile(r"\w+\.(?:json|jsonl|yaml)")
# After all other files, so that they never name or follow something missing.
_LAST = (INDEX, "result.json")
# Larger files, as checkpoints have, are uploaded in parts of this size, each repeated alone.
_UPLOAD_PART = 8 * 2**20
_LONGEST_PAUSE_S = 10.0

_ObjectVersion = Any  # `obstore.UpdateVersion`, which exists for type checkers only


def _object_version(reply: Any) -> _ObjectVersion:
    """Return the version in a reply: S3 and Azure compare e_tag, GCS version."""
    return {key: reply[key] for key in ("e_tag", "version") if reply[key] is not None}


class RunCopy:
    """The objects of one run below `uri`, and what of them the folder `local` has."""

    def __init__(self, uri: str, local: Path) -> None:
        self.uri, self._local = uri, local
        # Version of the file that each object holds (None: not in the folder), and the object's.
        self._published: dict[str, tuple[tuple[int, int] | None, _ObjectVersion]] = {}
        process = f"process {os.getpid()} on {socket.gethostname()} since {utc_now()}"
        self._writer = f"{process} ({secrets.token_hex(4)})"  # it may resume twice in a second

    @cached_property
    def _store(self) -> ObjectStore:
        return open_store(self.uri)

    def _put_if(self, name: str, data: bytes, mode: Any, pause_s: float = 0.1) -> _ObjectVersion:
        """Put an object on a condition, and return its version.

        obstore does not repeat such a request after a reset connection: the first one may have met
        the condition. The callers recognize an object of their own.
        """
        options = {"use_multipart": False, "mode": mode}
        try:
            return _object_version(obstore.put(self._store, name, data, **options))
        except GenericError as error:
            if pause_s > _LONGEST_PAUSE_S or "kind: Interrupted" not in str(error):
                raise
        time.sleep(pause_s)
        return self._put_if(name, data, mode, 4 * pause_s)

    def begin(self) -> None:
        """Show before a new run that its storage takes conditional writes. Raises StorageError."""
        with (
            storage_errors(f"{self.uri} cannot be written"),
            suppress(AlreadyExistsError),  # the answer to our own request was lost
        ):
            self._put_if(_FIRST_WRITER, self._writer.encode(), "create")

    def _read_index(self) -> tuple[bytes, _ObjectVersion]:
        """Return content and version of the index; none of them without it."""
        try:
            index = obstore.get(self._store, INDEX)
        except FileNotFoundError:
            return b"", None
        return bytes(index.bytes()), _object_version(index.meta)

    def _signed(self, index: bytes) -> bytes:
        return json.dumps(json.loads(index) | {"writer": self._writer}).encode()

    def _claim(self) -> None:
        """Write this process into the index. Raises TakenOverError if another one has done so."""
        while True:
            content, version = self._read_index()
            if not content:
                return
            file, known = self._published.get(INDEX, (None, None))
            writer = str(json.loads(content).get("writer", "one without a name"))
            if writer == self._writer:
                self._published[INDEX] = file, version  # the answer to a put may have been lost
                return
            if version != known:
                raise TakenOverError(
                    f"another process writes to {self.uri} now: {printable(writer)}"
                )
            with suppress(PreconditionError):  # somebody has written it just now
                version = self._put_if(INDEX, self._signed(content), version)
                self._published[INDEX] = file, version
                return

    def fetch(self) -> None:
        """Copy the records and the checkpoints that the index names into the folder.

        The next `publish` removes other checkpoints. Raises errors of the storage.
        """
        index, index_version = self._read_index()
        named = set(re.findall(r"epoch-[-\w]+", index.decode(errors="replace")))
        (self._local / INDEX).parent.mkdir(exist_ok=True)
        (self._local / INDEX).write_bytes(index)
        versions: dict[str, _ObjectVersion] = {INDEX: index_version}
        listed = [
            *obstore.list_with_delimiter(self._store)["objects"],
            *(o for batch in obstore.list(self._store, prefix="checkpoints") for o in batch),
        ]
        for name, version in ((o["path"], _object_version(o)) for o in listed):
            if (checkpoint := _CHECKPOINT_FILE.fullmatch(name)) or _RECORD_FILE.fullmatch(name):
                versions[name] = version
                if not checkpoint or checkpoint[1] in named:
                    self._fetch_file(name)
        files = self._files()
        self._published = {name: (files.get(name), version) for name, version in versions.items()}

    def _fetch_file(self, name: str) -> None:
        path = self._local / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            for chunk in obstore.get(self._store, name).stream(min_chunk_size=_UPLOAD_PART):
                file.write(chunk)

    def publish(self) -> None:
        """Copy what is new, remove what was deleted. Raises StorageError, TakenOverError."""
        with storage_errors(f"{self.uri} cannot be written; all files are in {self._local}"):
            self._claim()
            files = self._files()
            for name in sorted(files, key=lambda name: (name in _LAST, name)):
                file, version = self._published.get(name, (None, None))
                if file != files[name]:
                    version = self._put(name, version)
                    self._published[name] = files[name], version
        for name in self._published.keys() - files.keys():
            # Only tidying: what cannot be removed stays.
            with suppress(*STORAGE_ERRORS):
                obstore.delete(self._store, name)
                del self._published[name]

    def _put(self, name: str, version: _ObjectVersion | None) -> _ObjectVersion:
        """Write an object that has this version, or that does not exist (None)."""
        path, options = self._local / name, dict[str, Any]()
        if path.stat().st_size > _UPLOAD_PART:  # parts cannot be put on a condition
            self._claim()
            options = {"use_multipart": True, "chunk_size": _UPLOAD_PART, "max_concurrency": 4}
            return _object_version(obstore.put(self._store, name, path, **options))
        content = path.read_bytes()
        if name == INDEX:
            content = self._signed(content)
        while True:
            try:
                return self._put_if(name, content, version or "create")
            except (AlreadyExistsError, PreconditionError):
                version = _object_version(obstore.head(self._store, name))
                self._claim()

    def is_complete(self) -> bool:
        """Return whether the objects hold everything that the folder has."""
        files = self._files().items()
        return all(self._published.get(name, (None,))[0] == version for name, version in files)

    def _files(self) -> dict[str, tuple[int, int]]:
        """Return the version of each file: date and size. Temporary files begin with a dot."""
        files = {}
        for path in self._local.rglob("*"):
            name = path.relative_to(self._local).as_posix()
            if path.name.startswith(".") or name.startswith(f"{RAY_FOLDER}/") or path.is_dir():
                continue
            status = path.stat()
            files[name] = (status.st_mtime_ns, status.st_size)
        return files
