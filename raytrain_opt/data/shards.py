"""Images in tar files of the WebDataset format, local or in an object storage.

A sample is two members of a shard with one name: KEY.jpg (or another image format) and KEY.cls,
its class number as text; classes.txt beside the shards may name the classes, one per line. The
index of a shard, an int64 array [samples, 3] of the position and size of each image and its class,
makes the shards one data set with sample numbers: order, resume and elastic workers are those of
any other data set. It lies beside the shard (SHARD.npy), or is made when the shard is used first,
and is kept in the cache.

Shards of an object storage are copied into a cache of bounded size on each node, by the process
that trains: its loader processes, forks, could not use the client of the storage. They read what
was prepared for them.
"""

from __future__ import annotations

import fcntl
import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from io import BytesIO
from pathlib import Path

import numpy as np
import obstore

from raytrain_opt import storage
from raytrain_opt.config.data import ShardsData
from raytrain_opt.data.batch_reader import Sample, SourceSplit
from raytrain_opt.data.images import center_crop, random_crop
from raytrain_opt.data.sampling import Indices
from raytrain_opt.data.transforms import IMAGENET_MEAN_STD, MeanStd
from raytrain_opt.errors import DataError, StorageError

CLASSES = "classes.txt"
# Copies and indices at a time: enough to fill a network, few enough for any storage.
_DOWNLOADS = 8
# So often a copy is made again that others removed before it was used.
_ATTEMPTS = 10


class ShardSource:
    """Images of two sets of shards as uint8 [image_size, image_size, 3].

    Raises DataError: no shard, a damaged one, or one without labels.
    """

    field = "data.train"
    is_image = True
    mean_std: MeanStd | None = IMAGENET_MEAN_STD

    def __init__(self, section: ShardsData) -> None:
        self._size = section.image_size
        self._window = section.shuffle_shards
        self._cache = ShardCache(section)
        self._sets: dict[SourceSplit, ShardSet] = {
            "train": ShardSet(section.train, "train", self._cache),
            "test": ShardSet(section.test, "test", self._cache),
        }
        shards = [*self._sets["train"].shards, *self._sets["test"].shards]
        self._cache.check_room(self._window, shards)
        names = self._sets["train"].class_names
        self.num_classes = section.num_classes or len(names) or int(self.labels.max()) + 1
        self.class_names = names if len(names) == self.num_classes else ()
        self.sample_shape = (3, section.image_size, section.image_size)
        for split, part in self._sets.items():
            for label in (part.index[:, 2].min(), part.index[:, 2].max()):
                if not 0 <= label < self.num_classes:
                    valid = f"there are 0 to {self.num_classes - 1} (data.num_classes)"
                    raise DataError(f"data.{split}", f"has class {label}, but {valid}")

    @property
    def labels(self) -> Indices:
        """The classes of the training samples."""
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

    def read(self, split: SourceSplit, index: int, augment: bool) -> Sample:
        """Return a random crop, perhaps mirrored, when `augment`; else the center crop."""
        label = int(self._sets[split].index[index, 2])
        crop = random_crop if augment else center_crop
        return crop(self.content(split, index), self._size), label

    def content(self, split: SourceSplit, index: int) -> bytes:
        """Return the image file. Raises DataError, OSError, ValueError."""
        shards = self._sets[split]
        position, size, _ = shards.index[index].tolist()
        return self._cache.read(shards.shard_of(index), position, size)

    def describe(self, split: SourceSplit, index: int) -> str:
        """Return the shard and the sample's number in it, from 0, for an error message."""
        shards = self._sets[split]
        shard = int(np.searchsorted(shards.ends, index, side="right"))
        number = index - (int(shards.ends[shard - 1]) if shard else 0)
        return f"sample {number} of {shards.shards[shard].uri} cannot be read"


@dataclass(frozen=True)
class Shard:
    """A tar file: where it is, where it lies on a node when it is needed, its size in bytes."""

    uri: str
    location: Path
    size: int

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
                contents = zip(self.shards, pool.map(cache.read_index, self.shards), strict=True)
                # In one thread: numpy parses headers with `ast`, which in CPython 3.11 can raise
                # SystemError when two threads parse and the garbage collector runs meanwhile.
                indices = [parse_index(content, shard.uri) for shard, content in contents]
            names = storage.read(storage.split(self.shards[0].uri)[0], CLASSES) or b""
        except (StorageError, OSError, ValueError, tarfile.TarError) as error:
            raise DataError(f"data.{split}", str(error)) from error
        self.class_names = tuple(names.decode().splitlines())
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
        if not storage.is_remote(uri):
            path = storage.local_path(uri)
            return Shard(uri, path, path.stat().st_size)
        folder, name = storage.split(uri)
        with storage.storage_errors(f"{uri} cannot be read"):
            found = obstore.head(storage.open_store(folder), name)
        # A shard that is written again has another name in the cache.
        version = f"{uri} {found['e_tag']} {found['size']}"
        return Shard(uri, Path(self._section.cache, f"{_digest(version)}-{name}"), found["size"])

    def check_room(self, window: int, shards: Sequence[Shard]) -> None:
        """Raise DataError if the cache cannot hold two windows of the remote shards."""
        sizes = [shard.size for shard in shards if storage.is_remote(shard.uri)]
        needed = min(2 * window * max(sizes, default=0), sum(sizes))
        if needed > self._max_bytes:
            rule = f"two times data.shuffle_shards ({window}) shards need {needed / 2**30:.2f}"
            raise DataError("data.cache_gib", f"{rule}; raise it, or shuffle fewer together")

    def read_index(self, shard: Shard) -> bytes:
        """Read the file of a shard's index, or make it. Raises StorageError, OSError."""
        folder, name = storage.split(shard.uri)
        content = storage.read(folder, f"{name}.npy")
        if content is not None:
            return content
        changed_ns = 0 if storage.is_remote(shard.uri) else shard.path.stat().st_mtime_ns
        cache, cached = str(self._folder), _digest(f"{shard.path} {shard.size} {changed_ns}")
        content = storage.read(cache, f"{cached}.npy")
        if content is None:
            self._copy(shard)
            content = index_bytes(make_index(shard.path, shard.uri))
            storage.write(cache, f"{cached}.npy", content)
        return content

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
            if not shard.path.exists():
                rule = "no such file on this node; local shards must be on every node"
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
                chunks = obstore.get(storage.open_store(folder), name).stream()
                with temporary.open("r+b") as file:
                    file.writelines(chunks)
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


def make_index(path: Path, name: str) -> Indices:
    """Read the members of a shard. Raises ValueError naming it when it is damaged."""
    from torchvision.datasets.folder import IMG_EXTENSIONS  # takes seconds to import

    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, int] = {}
    try:
        with tarfile.open(path, "r:") as file:  # compressed, positions would mean nothing
            for member in file:
                key, _, suffix = member.name.rpartition(".")
                if f".{suffix.lower()}" in IMG_EXTENSIONS:
                    images[key] = member.offset_data, member.size
                elif suffix == "cls":
                    stream = file.extractfile(member)
                    labels[key] = int(stream.read() if stream is not None else b"")
    except (tarfile.TarError, ValueError, EOFError) as error:
        raise ValueError(f"{name} is damaged or compressed: {error}") from error
    if images.keys() != labels.keys() or not images:
        odd = ", ".join(sorted(images.keys() ^ labels.keys())[:3]) or "it has no sample"
        raise ValueError(f"{name}: each sample needs an image and a .cls file; see {odd}")
    return np.array([(*images[key], labels[key]) for key in images], dtype=np.int64)


def index_bytes(index: Indices) -> bytes:
    """Return the content of an index file."""
    stream = BytesIO()
    np.save(stream, index)
    return stream.getvalue()


def parse_index(content: bytes, uri: str) -> Indices:
    """Return the index of the shard `uri` from its file's content. Raises ValueError."""
    index: Indices = np.load(BytesIO(content), allow_pickle=False)
    if index.dtype != np.int64 or index.ndim != 2 or index.shape[1] != 3 or not len(index):
        raise ValueError(f"{uri}.npy is not the index of a shard; remove it")
    return index


def expand_braces(pattern: str) -> list[str]:
    """Return the names that a pattern with ranges stands for: a-{00..11}.tar -> 12 names."""
    match = re.search(r"\{(\d+)\.\.(\d+)\}", pattern)
    if match is None:
        return [pattern]
    first, last = match.groups()
    numbers = (f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1))
    before, after = pattern[: match.start()], pattern[match.end() :]
    return [name for number in numbers for name in expand_braces(f"{before}{number}{after}")]


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=12).hexdigest()
