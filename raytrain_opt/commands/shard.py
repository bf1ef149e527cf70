"""`raytrain-opt shard`: pack the image folders of a data set into tar files."""

from __future__ import annotations

import re
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
import obstore

from raytrain_opt import storage
from raytrain_opt.data.image_folder import ImageFiles, class_folders, left_out_note, list_folder
from raytrain_opt.data.shards import CLASSES, index_bytes, make_index, shard_version
from raytrain_opt.errors import DataError


def write_shards(
    folder: Path, output: str, max_bytes: int, on_shard: Callable[[str], None]
) -> list[str]:
    """Pack every folder below `folder` into shards below `output`, a folder or a URI.

    The samples are shuffled once, so that each shard has all classes. Returns the pattern of each
    folder's shards. Raises DataError for folders without images or with different classes, and for
    an output with shards that would stay; StorageError.
    """
    patterns: list[str] = []
    sets: dict[str, ImageFiles] = {}
    classes: Sequence[str] = ()
    left_out, seen = Counter[str](), dict[str, str]()
    for split in class_folders(folder, left_out):
        try:
            files = list_folder(folder / split, left_out, seen)
        except OSError as error:
            raise DataError(f"{folder}/{split}", f"has no usable images: {error}") from error
        classes = classes or files.classes
        if odd := {*classes} ^ {*files.classes}:
            rule = f"and {next(iter(sets))} must have the same classes; only one of them has"
            raise DataError(f"{folder}/{split}", f"{rule}: {', '.join(sorted(odd)[:5])}")
        sets[split] = files
    for note in left_out_note(left_out):
        on_shard(note)
    shards = {name: _divide(files, max_bytes) for name, files in sets.items()}
    written = {f"{name}-{n:06}.tar" for name, parts in shards.items() for n in range(len(parts))}
    shard_name = re.compile(r".+-\d{6}\.tar")
    if others := sorted(filter(shard_name.fullmatch, _shards_in(output) - written)):
        rule = f"holds {len(others)} shards of another set, as {others[0]}"
        raise DataError(output, f"{rule}; remove them, or choose an empty folder")
    if sets:
        storage.write(output, CLASSES, "\n".join(classes).encode())
    for name, parts in shards.items():
        for number, samples in enumerate(parts):
            shard = f"{name}-{number:06}.tar"
            _write_shard(sets[name], samples, output, shard)
            on_shard(shard)
        patterns.append(storage.join(output, f"{name}-{{000000..{len(parts) - 1:06}}}.tar"))
    return patterns


def _shards_in(output: str) -> set[str]:
    if not storage.is_remote(output):
        return {path.name for path in storage.local_path(output).glob("*.tar")}
    with storage.storage_errors(f"{output} cannot be read"):
        objects = obstore.list_with_delimiter(storage.open_store(output))["objects"]
    return {found["path"] for found in objects if found["path"].endswith(".tar")}


def _divide(files: ImageFiles, max_bytes: int) -> list[list[int]]:
    """Return the samples of each shard, in the order in which they are written."""
    order = np.random.default_rng(0).permutation(len(files))
    sizes = np.cumsum([Path(files[i][0]).stat().st_size for i in order.tolist()])
    # Without empty ones, and numbered without gaps: a large image may fill several.
    _, starts = np.unique(sizes // max_bytes, return_index=True)
    return [part.tolist() for part in np.split(order, starts[1:])]


def _write_shard(files: ImageFiles, samples: list[int], output: str, name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        shard = Path(folder) / name
        with tarfile.open(shard, "w") as tar:
            for sample in samples:
                path, label = files[sample]
                image = Path(path)
                contents = {image.suffix.lower(): image.read_bytes(), ".cls": b"%d" % label}
                for suffix, content in contents.items():
                    member = tarfile.TarInfo(f"{sample:09}{suffix}")
                    member.size = len(content)
                    tar.addfile(member, BytesIO(content))
        # The index comes last: a shard that has one is complete.
        if storage.is_remote(output):
            with storage.storage_errors(f"{storage.join(output, name)} cannot be written"):
                obstore.put(storage.open_store(output), name, shard)
        else:
            storage.write(output, name, shard.read_bytes())
        _, version = shard_version(storage.join(output, name))
        with shard.open("rb") as file:
            index = make_index(file, name)
        storage.write(output, f"{name}.index", index_bytes(index, version))
