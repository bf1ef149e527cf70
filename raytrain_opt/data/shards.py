"""Images in tar files of the WebDataset format, local or in an object storage.

A sample is two members of a shard with one name: KEY.jpg (or another image format) and KEY.cls,
its class number as text; classes.txt beside the shards may name the classes, one per line. The
index of a shard, an int64 array [samples, 3] of the position and size of each image and its class,
makes the shards one data set with sample numbers. It lies beside the shard (SHARD.index), or is
made when the shard is used first, and is kept in the cache. Its first line is the version of the
shard that it was made of: the index of another version is made again.

The process that trains requests images of an object storage: loader processes, which are forks,
could not use the client of the storage.
"""

from __future__ import annotations

import math
import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from io import FileIO
from stat import S_ISREG
from typing import Any

import numpy as np
import obstore
from obstore.exceptions import BaseError

from raytrain_opt import storage
from raytrain_opt.config.data import ShardsData
from raytrain_opt.config.error_messages import shown
from raytrain_opt.data.base import SourceSplit, digest, excerpt, spread
from raytrain_opt.data.image_folder import left_out_kind
from raytrain_opt.data.images import SUFFIXES
from raytrain_opt.data.sampling import Indices
from raytrain_opt.data.source import ImageSource
from raytrain_opt.errors import DataError, StorageError

CLASSES = "classes.txt"
# Images and indices at a time: enough to fill a network, few enough for any storage.
_REQUESTS = 32
# Far more than any data set has; a pattern of more would only fill the memory.
_MAX_SHARDS = 100_000
# Of a member that is read at once: somebody else may have made the shard.
_MAX_IMAGE_BYTES, _MAX_HEADER_BYTES, _MAX_LABEL_BYTES = 2**29, 2**20, 100
_CLASS_NUMBER = re.compile(rb"\s*([0-9]{1,18})\s*")


class ShardSource(ImageSource):
    """Images of two sets of shards. Raises DataError for shards that cannot be used."""

    field = "data.train"

    def __init__(self, section: ShardsData) -> None:
        super().__init__(section.image_size)
        self._sets: dict[SourceSplit, ShardSet] = {
            "train": ShardSet(section.train, "data.train", section.cache),
            "test": ShardSet(section.test, "data.test", section.cache),
        }
        train, test = ({shard.place for shard in part.shards} for part in self._sets.values())
        if common := train & test:
            name = storage.last_name(min(common))
            rule = f"{name} is in data.train too: it would be trained and tested on"
            raise DataError("data.test", rule)
        self.labels = self._sets["train"].index[:, 2]
        names, others = (part.class_names for part in self._sets.values())
        if names != others and names and others:
            raise DataError("data.test", f"{CLASSES} beside it differs from the one of data.train")
        self.num_classes, self.class_names = len(names) or int(self.labels.max()) + 1, names
        for part in self._sets.values():
            if (label := part.index[:, 2].max()) >= self.num_classes:
                rule = f"has class {label}, but {CLASSES} beside it, or the training set, has "
                rule += f"{self.num_classes} classes, which are numbered from 0"
                raise DataError(part.field, rule)

    def size(self, split: SourceSplit) -> int:
        """Return the number of samples."""
        return len(self._sets[split].index)

    def label(self, split: SourceSplit, index: int) -> int:
        return int(self._sets[split].index[index, 2])

    def content(self, split: SourceSplit, index: int) -> bytes:
        shards = self._sets[split]
        position, size, _ = shards.index[index].tolist()
        try:
            return shards.shard_of(index).read(position, size)
        except StorageError as error:
            raise DataError(shards.field, str(error)) from error

    def fetch(self, split: SourceSplit, indices: Sequence[int]) -> Sequence[Future[bytes]]:
        if not storage.is_remote(self._sets[split].shards[0].place):
            return ()
        return [_requests().submit(self.content, split, index) for index in indices]

    def digest(self) -> str:
        """Return a digest of the shards' names, and of each sample's position, size and label.

        Excerpts of samples evenly spread are in it where the shards are local.
        """
        sets = self._sets.values()
        names = (storage.last_name(shard.place).encode() for part in sets for shard in part.shards)
        return digest([*names, *(part.index.data for part in sets), *self._excerpts()])

    def _excerpts(self) -> Iterator[bytes]:
        for part in self._sets.values():
            for index in spread(len(part.index)):
                place, (position, size, _) = part.shard_of(index).place, part.index[index].tolist()
                if not storage.is_remote(place):
                    yield excerpt(place, position, size)

    def describe(self, split: SourceSplit, index: int) -> str:
        """Return the shard and the sample's number in it, from 0, for an error message."""
        shards = self._sets[split]
        shard = int(np.searchsorted(shards.ends, index, side="right"))
        number = index - (int(shards.ends[shard - 1]) if shard else 0)
        return f"sample {number} of {shards.shards[shard].place} cannot be read"


@cache
def _requests() -> ThreadPoolExecutor:
    """Return the threads of this process that wait for images of an object storage."""
    return ThreadPoolExecutor(_REQUESTS)


@dataclass(frozen=True)
class Shard:
    """A tar file: path or URI, size in bytes, and what changes when it is written again."""

    place: str
    size: int
    version: str

    @classmethod
    def find(cls, uri: str) -> Shard:
        """Return a shard. Raises StorageError, OSError."""
        place = uri if storage.is_remote(uri) else os.path.realpath(storage.local_path(uri))
        return cls(place, *shard_version(uri))

    def read(self, position: int, size: int) -> bytes:
        """Return a part of the shard. Raises StorageError, also if it is another version now."""
        if storage.is_remote(self.place):
            folder, name = storage.folder_and_name(self.place)
            options: Any = {"range": (position, position + max(1, size))}
            with storage.storage_errors(f"{self.place} cannot be read"):
                found = obstore.get(storage.open_store(folder), name, options=options)
                if _object_version(found.meta) != self.version:
                    raise ValueError("it was written again since the run started")
                return bytes(found.bytes())[:size]
        # Opened for each sample: a set may have more shards than a process may open.
        rule = "cannot be read on this node; local shards must be on every node"
        with storage.storage_errors(f"{self.place} {rule}"), open(self.place, "rb") as file:
            if os.fstat(file.fileno()).st_size != self.size:
                raise ValueError("it is another file, or was written again since the run started")
            return os.pread(file.fileno(), size, position)

    def read_index(self, cache: str) -> Indices:
        """Read the shard's index, or make it. Raises StorageError, OSError, ValueError."""
        folder, name = storage.folder_and_name(self.place)
        cached = os.path.expanduser(cache), f"{digest([self.place.encode()])}.index"
        for place in ((folder, f"{name}.index"), cached):
            if (index := parse_index(storage.read(*place) or b"", self)) is not None:
                return index
        with storage.storage_errors(f"{self.place} cannot be read"):
            file: Any = (
                FileIO(self.place)
                if not storage.is_remote(self.place)
                else obstore.open_reader(storage.open_store(folder), name)
            )
            with closing(file):
                index = make_index(file, self.place)
        storage.write(*cached, index_bytes(index, self.version))
        return index


class ShardSet:
    """The shards of one split, their indices one after the other, and where each shard ends."""

    def __init__(self, pattern: str, field: str, cache: str) -> None:
        self.field = field
        try:
            with ThreadPoolExecutor(_REQUESTS) as pool:
                self.shards = list(pool.map(Shard.find, expand_braces(pattern)))
                indices = list(pool.map(lambda shard: shard.read_index(cache), self.shards))
            names = storage.read(storage.folder_and_name(self.shards[0].place)[0], CLASSES) or b""
            self.class_names = tuple(names.decode("utf-8-sig").rstrip("\r\n").splitlines())
        except UnicodeDecodeError as error:
            raise DataError(field, f"{CLASSES} beside it is not UTF-8 text") from error
        except (StorageError, OSError, ValueError) as error:
            raise DataError(field, str(error)) from error
        self.index = np.concatenate(indices)
        self.ends = np.cumsum([len(index) for index in indices])

    def shard_of(self, sample: int) -> Shard:
        """Return the shard that holds a sample."""
        return self.shards[int(np.searchsorted(self.ends, sample, side="right"))]


def shard_version(uri: str) -> tuple[int, str]:
    """Return a shard's size and version. Raises StorageError, OSError."""
    if not storage.is_remote(uri):
        status = storage.local_path(uri).stat()
        if not S_ISREG(status.st_mode):
            raise OSError(f"{uri} is not a file")
        # Programs can set the other time back, as copies and archives do.
        return status.st_size, f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
    folder, name = storage.folder_and_name(uri)
    with storage.storage_errors(f"{uri} cannot be read"):
        found = obstore.head(storage.open_store(folder), name)
    return found["size"], _object_version(found)


def _object_version(found: Any) -> str:
    return f"{found['size']} {found['e_tag'] or found['last_modified']}"


class _ByteFile:
    """A file that reads bytes, as `tarfile` needs them; obstore's reads a type of its own."""

    def __init__(self, file: Any) -> None:
        self._file, self.seek, self.tell = file, file.seek, file.tell

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _MAX_HEADER_BYTES:  # of a header, however long it says that it is
            raise tarfile.ReadError(f"a header of {size} bytes")
        return bytes(self._file.read(size))


def make_index(file: Any, name: str) -> Indices:
    """Read the members of a shard. Raises ValueError naming it, the member and the reason."""
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, int] = {}
    for member, content in _read_members(_ByteFile(file), name):
        key, _, suffix = member.name.rpartition(".")
        is_image, rule = f".{suffix.lower()}" in SUFFIXES, ""
        if not is_image and suffix.lower() != "cls":
            continue
        if not member.isreg() or member.issparse() or member.size > _MAX_IMAGE_BYTES:
            rule = f"must be a plain file of at most {_MAX_IMAGE_BYTES >> 20} MiB"
        elif key in (images if is_image else labels):
            rule = f"is another one of sample {key}; pack the shard again, with each sample once"
        elif is_image:
            images[key] = member.offset_data, member.size
        elif number := _CLASS_NUMBER.fullmatch(content):
            labels[key] = int(number[1])
        else:
            rule = (
                "must hold the number of a class, counted from 0, but holds "
                f"{shown(content.decode(errors='replace'))}; the names of the classes belong "
                f"into {CLASSES} beside the shards, one per line"
            )
        if rule:
            raise ValueError(f"{name}: {member.name} {rule}")
    if images.keys() != labels.keys() or not images:
        odd = ", ".join(sorted(images.keys() ^ labels.keys())[:3]) or "it has no sample"
        raise ValueError(f"{name}: each sample needs an image and a .cls file; see {odd}")
    return np.array([(*images[key], labels[key]) for key in images], dtype=np.int64)


def _read_members(stream: Any, name: str) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    """Yield the members that are not hidden, each with its first bytes. Raises ValueError."""
    try:
        # Compressed, positions would mean nothing.
        with tarfile.open(fileobj=stream, mode="r:") as file:
            for member in file:
                if member.size < 0:  # the next header would be one before it
                    raise tarfile.ReadError(f"a member of {member.size} bytes")
                if left_out_kind(member.name) != "hidden":
                    stream.seek(member.offset_data)
                    yield member, stream.read(min(member.size, _MAX_LABEL_BYTES))
            stream.seek(file.offset)
            end = stream.read(_MAX_HEADER_BYTES)
            if not end or any(end):
                raise tarfile.ReadError("it was cut off" if not end else "another tar follows it")
    except BaseError:  # of the storage
        raise
    except Exception as error:  # a damaged header can make tarfile raise anything
        raise ValueError(f"{name} is damaged or compressed: {error}") from error


def index_bytes(index: Indices, version: str) -> bytes:
    """Return the content of an index file of this version of a shard."""
    return f"{version}\n".encode() + index.astype("<i8").tobytes()


def parse_index(content: bytes, shard: Shard) -> Indices | None:
    """Return the index in a file; None if it is damaged, or of another version of the shard."""
    version, _, rows = content.partition(b"\n")
    if version != shard.version.encode() or not rows or len(rows) % 24:
        return None
    index = np.frombuffer(rows, "<i8").reshape(-1, 3)
    positions, sizes = index[:, 0], index[:, 1]
    is_inside = (index >= 0).all() and (sizes <= _MAX_IMAGE_BYTES).all()
    return index if is_inside and (positions <= shard.size - sizes).all() else None


def expand_braces(pattern: str) -> list[str]:
    """Return the names that a pattern with ranges stands for: a-{00..11}.tar -> 12 names."""
    ranges = re.findall(r"\{([0-9]+)\.\.([0-9]+)\}", pattern)
    counts = [int(last) - int(first) + 1 for first, last in ranges]
    if min(counts, default=1) < 1:
        raise ValueError(f"{pattern}: a range counts down; write the smaller number first")
    if (count := math.prod(counts)) > _MAX_SHARDS:
        raise ValueError(f"{pattern}: stands for {count:,} shards; {_MAX_SHARDS:,} are the limit")
    names = [pattern]
    for first, last in ranges:
        numbers = [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
        names = [name.replace(f"{{{first}..{last}}}", n, 1) for name in names for n in numbers]
    return names
