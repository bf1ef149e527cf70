"""What a checkpoint knows of the data, so that a resume notices that they are others."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from raytrain_opt.config.data import DataSection
from raytrain_opt.data.base import DataInfo
from raytrain_opt.errors import DataError

_FIELDS = {"image_folder": "root", "arrays": "train", "shards": "train"}
# Samples whose contents are compared: a second where a file system takes a millisecond for each.
_SAMPLED = 1000
_EXCERPT = 1024  # bytes
# Differences that a message names.
_SHOWN = 5


@dataclass(frozen=True)
class DataFingerprint:
    """Classes, sizes, and a digest of what else the source of the samples tells cheaply."""

    classes: tuple[str, ...]
    class_counts: tuple[int, ...]
    train_size: int
    test_size: int
    digest: str

    @classmethod
    def of(cls, info: DataInfo) -> DataFingerprint:
        """Return the fingerprint of data that were read."""
        sizes = (info.train_size, info.test_size)
        return cls(info.class_labels, info.class_counts, *sizes, info.digest)

    def require_same(self, data: DataSection, info: DataInfo) -> None:
        """Raise DataError that says what changed in the data since the checkpoint."""
        now = DataFingerprint.of(info)
        if now != self:
            rule = f"changed since the checkpoint: {self._changes(now)}; put the data back as "
            rule += "they were, or start a new run from the weights (model.weights: RUN_DIR)"
            raise DataError(f"data.{_FIELDS.get(str(data.name), 'name')}", rule)

    def _changes(self, now: DataFingerprint) -> str:
        before, after = set(self.classes), set(now.classes)
        changes = [f"class {name} is gone" for name in sorted(before - after)[:_SHOWN]]
        changes += [f"class {name} is new" for name in sorted(after - before)[:_SHOWN]]
        if self.classes != now.classes:
            return ", ".join(changes) or "the classes have another order"
        names = [*(f"class {name}" for name in self.classes), "the training set", "the test set"]
        then, later = ((*f.class_counts, f.train_size, f.test_size) for f in (self, now))
        changes = [
            f"{name} has {count} samples, and had {old}"
            for name, old, count in zip(names[-len(then) :], then, later, strict=False)
            if old != count
        ]
        return ", ".join(changes[:_SHOWN]) or "samples, their labels, their names or their order"


def spread(count: int, of: int = _SAMPLED) -> range:
    """Return at most about `of` of the numbers below `count`, evenly spread."""
    return range(0, count, 1 + count // of)


def excerpt(path: str | Path, start: int = 0, size: int | None = None) -> bytes:
    """Return the middle and the end of a file or of a part of it; nothing if it cannot be read.

    They differ between compressed images, whose beginnings do not.
    """
    with suppress(OSError), open(path, "rb") as file:
        length = os.fstat(file.fileno()).st_size if size is None else size
        parts = (start + length // 2, start + max(0, length - _EXCERPT))
        return b"".join(os.pread(file.fileno(), _EXCERPT, part) for part in parts)
    return b""


def digest(parts: Iterable[bytes | memoryview]) -> str:
    """Return a digest of these parts."""
    result = blake2b(digest_size=16)
    for part in parts:
        result.update(part)
    return result.hexdigest()
