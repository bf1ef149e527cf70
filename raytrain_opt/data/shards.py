"""Images in tar files of the WebDataset format, local or in an object storage.

A sample is two members of a shard with one name: KEY.jpg (or another image format) and KEY.cls,
its class number as text; classes.txt beside the shards may name the classes, one per line. Hidden
members, such as ._KEY.jpg, are left out. The index of a shard, an int64 array [samples, 3] of the
position and size of each image and its class, makes the shards one data set with sample numbers:
order, resume and elastic workers are those of any other data set. It lies beside the shard
(SHARD.index), or is made when the shard is used first, and is kept in the cache. Its first line is
the version of the shard that it was made of: the index of another version is made again.

Shards of an object storage are copied into a cache of bounded size on each node, by the process
that trains: its loader processes, forks, could not use the client of the storage. They read what
was prepared for them.
"""

from __future__ import annotations

import fcntl
import math
import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from stat import S_ISREG
from typing import Any

import numpy as np
import obstore

from raytrain_opt import storage
from raytrain_opt.config.data import ShardsData
from raytrain_opt.config.error_messages import shown
from raytrain_opt.data.base import digest, excerpt, spread
from raytrain_opt.data.image_folder import left_out_kind
from raytrain_opt.data.images import SUFFIXES
from raytrain_opt.data.sampling import Indices
from raytrain_opt.data.source import ImageSource, SourceSplit
from raytrain_opt.errors import DataError, StorageError

CLASSES = "classes.txt"
# Copies and indices at a time: enough to fill a network, few enough for any storage.
_DOWNLOADS = 8
# So often a copy is made again that others removed before it was used.
_ATTEMPTS = 10
# Far more than any data set has; a pattern of more would only fill the memory.
_MAX_SHARDS = 100_000
# Of a member or a header that is read at once: somebody else may have made the shard.
_MAX_IMAGE_BYTES, _MAX_HEADER_BYTES, _MAX_LABEL_BYTES = 2**29, 2**20, 100
_CLASS_NUMBER = re.compile(rb"\s*([0-9]{1,18})\s*")


class ShardSource(ImageSource):
    """Images of two sets of shards as uint8 [image_size, image_size, 3].

    Raises DataError: no shard, a damaged one, or one without labels.
    """

    field = "data.train"
    checked_samples = 1  # all shards of a storage would be copied

    def __init__(self, section: ShardsData) -> None:
        super().__init__(section.image_size)
        self._window = section.shuffle_shards
        self._cache = ShardCache(section)
        self._sets: dict[SourceSplit, ShardSet] = {
            "train": ShardSet(section.train, "train", self._cache),
            "test": ShardSet(section.test, "test", self._cache),
        }
        train, test = (part.shards for part in self._sets.values())
        if common := {shard.path.resolve() for shard in train} & {s.path.resolve() for s in test}:
            rule = f"{min(common).name} is in data.train too: it would be trained and tested on"
            raise DataError("data.test", rule)
        self._cache.check_room(self._window, [*train, *test])
        names, others = (part.class_names for part in self._sets.values())
        if names != others and names and others:
            raise DataError("data.test", f"{CLASSES} beside it differs from that of data.train")
        self.num_classes = section.num_classes or len(names) or int(self.labels.max()) + 1
        self.class_names = names if len(names) == self.num_classes else ()
        for split, part in self._sets.items():
            if (label := part.index[:, 2].max()) >= self.num_classes:
                rule = f"has class {label}, but data.num_classes or {CLASSES} has "
                rule += f"{self.num_classes} classes, which are numbered from 0"
                raise DataError(f"data.{split}", rule)

    @property
    def labels(self) -> Indices:
        return self._sets["train"].index[:, 2]

    def size(self, split: SourceSplit) -> int:
        """Return the number of samples."""
        return len(self._sets[split].index)

    def permutation(self, random: np.random.Generator, samples: Indices) -> Indices:
        """Shuffle the shards, then the training samples within windows of them."""
        ends = self._sets["train"].ends
        parts = np.split(samples, np.searchsorted(samples, ends[:-1]))
        parts = [parts[i] for i in random.permutation(len(parts))]
        windows = [parts[i : i + self._window] for i in range(0, len(parts), self._window)]
        return np.concatenate([random.permutation(np.concatenate(window)) for window in windows])

    def prepare(self, split: SourceSplit, order: Indices, start: int, stop: int) -> None:
        """Wait until the shards of order[start:stop] are on this node; copy later ones meanwhile.

        Raises DataError: the storage cannot be read.
        """
        shards = self._sets[split]
        ahead = start + self._window * len(shards.index) // len(shards.shards)
        later = shards.shards_of(order[ahead : ahead + stop - start])
        self._cache.prepare(shards.shards_of(order[start:stop]), later, f"data.{split}")

    def label(self, split: SourceSplit, index: int) -> int:
        return int(self._sets[split].index[index, 2])

    def content(self, split: SourceSplit, index: int) -> bytes:
        shards = self._sets[split]
        position, size, _ = shards.index[index].tolist()
        return self._cache.read(shards.shard_of(index), position, size)

    def digest(self) -> str:
        """Return a digest of the shards' names, and of each sample's position, size and label.

        Excerpts of samples evenly spread are in it where the shards need no download.
        """
        sets = self._sets.values()
        names = (storage.last_name(shard.uri).encode() for part in sets for shard in part.shards)
        return digest([*names, *(part.index.data for part in sets), *self._excerpts()])

    def _excerpts(self) -> Iterator[bytes]:
        for part in self._sets.values():
            for index in spread(len(part.index)):
                shard, (position, size, _) = part.shard_of(index), part.index[index].tolist()
                if not storage.is_remote(shard.uri):
                    yield excerpt(shard.path, position, size)

    def describe(self, split: SourceSplit, index: int) -> str:
        """Return the shard and the sample's number in it, from 0, for an error message."""
        shards = self._sets[split]
        shard = int(np.searchsorted(shards.ends, index, side="right"))
        number = index - (int(shards.ends[shard - 1]) if shard else 0)
        return f"sample {number} of {shards.shards[shard].uri} cannot be read"


@dataclass(frozen=True)
class Shard:
    """A tar file: where it is, where it lies on a node when it is needed, its size in bytes.

    `version`: what changes when it is written again.
    """

    uri: str
    location: Path
    size: int
    version: str

    @property
    def path(self) -> Path:
        """The file on this node: homes differ between nodes."""
        return self.location.expanduser()


class ShardSet:
    """The shards of one split, their indices one after the other, and where each shard ends.

    The driver reads the indices; the processes of a node share the array (1.28 million samples
    have 29 MiB).
    """

    def __init__(self, pattern: str, split: str, cache: ShardCache) -> None:
        try:
            with ThreadPoolExecutor(_DOWNLOADS) as pool:
                self.shards = list(pool.map(cache.find, expand_braces(pattern)))
                indices = list(pool.map(cache.read_index, self.shards))
            names = storage.read(storage.split(self.shards[0].uri)[0], CLASSES) or b""
            self.class_names = tuple(names.decode("utf-8-sig").rstrip("\r\n").splitlines())
        except UnicodeDecodeError as error:
            raise DataError(f"data.{split}", f"{CLASSES} beside it is not UTF-8 text") from error
        except (StorageError, OSError, ValueError) as error:
            raise DataError(f"data.{split}", str(error)) from error
        self.index = np.concatenate(indices)
        self.ends = np.cumsum([len(index) for index in indices])

    def shard_of(self, sample: int) -> Shard:
        """Return the shard that holds a sample."""
        return self.shards[int(np.searchsorted(self.ends, sample, side="right"))]

    def shards_of(self, samples: Indices) -> list[Shard]:
        """Return the shards that hold these samples, each once."""
        return [self.shards[i] for i in np.unique(np.searchsorted(self.ends, samples, "right"))]


class ShardCache:
    """Copies of shards and their indices, in a folder that all processes of a node share."""

    def __init__(self, section: ShardsData) -> None:
        self._section = section
        self._folder = Path(section.cache).expanduser()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._max_bytes = int(section.cache_gib * 2**30)
        self._pool = ThreadPoolExecutor(_DOWNLOADS)
        self._copies: dict[Path, Future[None]] = {}

    def __reduce__(self) -> tuple[type[ShardCache], tuple[ShardsData]]:
        """Let the process that receives it use the cache of its own node."""
        return ShardCache, (self._section,)

    def find(self, uri: str) -> Shard:
        """Return a shard, without copying it. Raises StorageError, OSError."""
        size, version = shard_version(uri)
        if not storage.is_remote(uri):
            return Shard(uri, storage.local_path(uri), size, version)
        # A shard that is written again has another name in the cache.
        name = f"{digest([f'{uri} {version}'.encode()])}-{storage.split(uri)[1]}"
        return Shard(uri, Path(self._section.cache, name), size, version)

    def check_room(self, window: int, shards: Sequence[Shard]) -> None:
        """Raise DataError if the cache cannot hold two windows of the remote shards."""
        sizes = [shard.size for shard in shards if storage.is_remote(shard.uri)]
        needed = min(2 * window * max(sizes, default=0), sum(sizes))
        if needed > self._max_bytes:
            rule = f"two times data.shuffle_shards ({window}) shards need {needed / 2**30:.2f}"
            raise DataError("data.cache_gib", f"{rule}; raise it, or shuffle fewer together")

    def read_index(self, shard: Shard) -> Indices:
        """Read a shard's index, or make it. Raises StorageError, OSError, ValueError."""
        folder, name = storage.split(shard.uri)
        cached = str(self._folder), f"{digest([bytes(shard.path)])}.index"
        for place in ((folder, f"{name}.index"), cached):
            index = parse_index(storage.read(*place) or b"", shard)
            if index is not None:
                return index
        self._copy(shard)
        index = make_index(shard.path, shard.uri)
        storage.write(*cached, index_bytes(index, shard.version))
        return index

    def prepare(self, now: Sequence[Shard], later: Sequence[Shard], field: str) -> None:
        """Wait for copies of the shards needed `now`; begin those of `later`. Raises DataError."""
        missing = [shard for shard in (*now, *later) if not shard.path.exists()]
        for shard in missing:
            if shard.path not in self._copies:
                self._copies[shard.path] = self._pool.submit(self._copy, shard)
        for shard in now:
            copy = self._copies.pop(shard.path, None)
            if copy is not None:
                # Its error may be of long ago: the copy is tried again.
                with suppress(StorageError, OSError):
                    copy.result()
            try:
                self._keep(shard)
            except (StorageError, OSError) as error:
                raise DataError(field, str(error)) from error

    def _keep(self, shard: Shard) -> None:
        """Mark a copy as used last; copy it again if copies of others took its place meanwhile."""
        if not storage.is_remote(shard.uri):
            rule = ""
            if not shard.path.exists():
                rule = "no such file on this node; local shards must be on every node"
            elif shard.path.stat().st_size != shard.size:
                rule = "is another file on this node, or was written again since the run started"
            if rule:
                raise StorageError(f"{shard.uri}: {rule}")
            return
        for _ in range(_ATTEMPTS):
            with self._lock("lock"), suppress(FileNotFoundError):
                os.utime(shard.path)  # the cache removes what was used longest ago
                return
            self._copy(shard)
        rule = f"{shard.uri} was removed {_ATTEMPTS} times before it was read; raise it"
        raise DataError("data.cache_gib", rule)

    def read(self, shard: Shard, position: int, size: int) -> bytes:
        """Return a part of a shard on this node. Raises DataError, OSError, ValueError."""
        # Opened for each sample: an open file would keep the space of a removed copy.
        try:
            with shard.path.open("rb") as file:
                file.seek(position)
                content = file.read(size)
        except FileNotFoundError as error:
            rule = f"the copy of {shard.uri} was removed before it was read; raise it"
            raise DataError("data.cache_gib", rule) from error
        if len(content) < size:
            raise ValueError(f"{shard.uri} ends before byte {position + size}: it is damaged")
        return content

    def _copy(self, shard: Shard) -> None:
        """Copy a remote shard into the cache, unless another process has."""
        if not storage.is_remote(shard.uri):
            return
        folder, name = storage.split(shard.uri)
        with self._lock(f"{shard.path.name}.lock"):
            if shard.path.exists():
                return
            temporary = shard.path.with_suffix(".tmp")
            with self._lock("lock"):
                self._make_room(shard.size)
                temporary.touch()
                os.truncate(temporary, shard.size)  # others count it from now on
            with storage.storage_errors(f"{shard.uri} cannot be copied to {self._folder}"):
                found = obstore.get(storage.open_store(folder), name)
                if _object_version(found.meta) != shard.version:
                    raise ValueError("it was written again since the run started")
                with temporary.open("r+b") as file:
                    file.writelines(found.stream())
            with self._lock("lock"):
                temporary.replace(shard.path)

    def _make_room(self, size: int) -> None:
        """Remove the copies that were used longest ago, under the lock; none in progress."""
        files = {path: path.stat() for path in self._folder.glob("*.t??")}
        used = size + sum(stat.st_size for stat in files.values())
        for path in sorted(files, key=lambda path: files[path].st_mtime_ns):
            if used <= self._max_bytes:
                return
            if path.suffix != ".tmp":
                path.unlink()
                used -= files[path].st_size

    @contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        with (self._folder / name).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def shard_version(uri: str) -> tuple[int, str]:
    """Return a shard's size, and what changes when it is written again.

    Raises StorageError, OSError.
    """
    if not storage.is_remote(uri):
        status = storage.local_path(uri).stat()
        if not S_ISREG(status.st_mode):
            raise OSError(f"{uri} is not a file")
        # Programs can set the other time back, as copies and archives do.
        return status.st_size, f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
    folder, name = storage.split(uri)
    with storage.storage_errors(f"{uri} cannot be read"):
        found = obstore.head(storage.open_store(folder), name)
    return found["size"], _object_version(found)


def _object_version(found: Any) -> str:
    return f"{found['size']} {found['e_tag'] or found['last_modified']}"


class _BoundedFile(FileIO):
    """A shard whose headers cannot make `tarfile` read any number of bytes at once."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= _MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return super().read(size)


def make_index(path: Path, name: str) -> Indices:
    """Read the members of a shard. Raises ValueError naming it, the member and the reason."""
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, int] = {}
    for member, content in _read_members(path, name):
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


def _read_members(path: Path, name: str) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    """Yield the members that are not hidden, each with its first bytes.

    Raises ValueError: the shard is damaged or compressed.
    """
    try:
        # Compressed, positions would mean nothing.
        with _BoundedFile(path) as stream, tarfile.open(fileobj=stream, mode="r:") as file:
            for member in file:
                if member.size < 0:  # the next header would be one before it
                    raise tarfile.ReadError(f"a member of {member.size} bytes")
                if left_out_kind(member.name) != "hidden":
                    size = min(member.size, _MAX_LABEL_BYTES)
                    yield member, os.pread(stream.fileno(), size, member.offset_data)
            end = os.pread(stream.fileno(), _MAX_HEADER_BYTES, file.offset)
            if not end or any(end):
                raise tarfile.ReadError("it was cut off" if not end else "another tar follows it")
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
    """Return the names that a pattern with ranges stands for: a-{00..11}.tar -> 12 names.

    Raises ValueError for a range that counts down, and for too many names.
    """
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
