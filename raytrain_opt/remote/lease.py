"""One writer at a time below a URI, as long as it shows that it is alive.

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

import os
import secrets
import socket
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import cached_property
from threading import Event, Thread
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError
from obstore.store import ObjectStore

from raytrain_opt.clock import utc_now
from raytrain_opt.errors import JobError, Problem, TakenOverError, printable
from raytrain_opt.storage import STORAGE_ERRORS, open_store, read_object

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
