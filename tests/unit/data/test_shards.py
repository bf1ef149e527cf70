"""Sets of shards: the samples of their folder, in an order that few shards serve."""

from __future__ import annotations

import gzip
import os
import pickle
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raytrain_opt import storage
from raytrain_opt.commands.shard import write_shards
from raytrain_opt.config.data import HoldOut, ImageFolderData, ShardsData
from raytrain_opt.data import load_shared_data
from raytrain_opt.data.base import Batch
from raytrain_opt.data.loader import DataLoaderData
from raytrain_opt.data.shards import ShardSource, expand_braces, make_index
from raytrain_opt.errors import DataError
from tests.support.s3_server import S3Server, s3, s3_server

__all__ = ["s3", "s3_server"]  # fixtures

# So small that a shard has one or two of the tree's 20 training images.
SHARD_BYTES = 2600


@contextmanager
def open_data(
    section: ShardsData | ImageFolderData, hold_out: float = 0.0, files: ShardSource | None = None
) -> Iterator[DataLoaderData]:
    source: Any = files or load_shared_data(section)
    data = DataLoaderData(source, section, HoldOut(hold_out), 0, torch.device("cpu"), False)
    try:
        yield data
    finally:
        data.close()


def section(output: str, cache: Path, shards: int, tests: int = 1, **fields: Any) -> ShardsData:
    values = {"image_size": 8, "loader_workers": 0, "cache": str(cache)}
    path, question, options = output.partition("?")
    return ShardsData(
        name="shards",
        train=f"{path}/train-{{000000..{shards - 1:06}}}.tar{question}{options}",
        test=f"{path}/val-{{000000..{tests - 1:06}}}.tar{question}{options}",
        **{**values, **fields},
    )


def pack(tree: Path, output: str) -> tuple[int, int]:
    """Pack the tree; return the number of shards of each split."""
    names: list[str] = []
    write_shards(tree, output, SHARD_BYTES, names.append)
    counts = [sum(name.startswith(split) for name in names) for split in ("train", "val")]
    assert counts[0] >= 6
    return counts[0], counts[1]


@pytest.fixture
def local(image_tree: Path, tmp_path: Path) -> ShardsData:
    output = f"{tmp_path}/shards"
    return section(output, tmp_path / "cache", *pack(image_tree, output))


def epoch(data: DataLoaderData, number: int = 1, first: int = 0) -> list[Batch]:
    steps = range(first, data.info.steps_per_epoch(4))
    return list(data.train_batches(number, product(steps, range(2)), 2, 4))


def pixels(batches: list[Batch]) -> list[bytes]:
    return sorted(x.numpy().tobytes() for batch in batches for x in batch.x)


def test_shards_hold_the_images_of_their_folder(image_tree: Path, local: ShardsData) -> None:
    folder = ImageFolderData(
        name="image_folder", root=str(image_tree), image_size=8, loader_workers=0
    )
    with open_data(local) as shards, open_data(folder) as files:
        assert shards.info.class_names == ("cat", "dog")
        assert (shards.info.train_size, shards.info.test_size) == (20, 6)
        one, other = (list(data.eval_batches("test", 0, 1, 4)) for data in (shards, files))
        shards.first_samples("test")
    assert pixels(one) == pixels(other)
    assert sorted(y for batch in one for y in batch.y.tolist()) == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("where", ["folder", "URI"])
def test_two_sets_are_never_mixed(
    image_tree: Path, tmp_path: Path, s3: S3Server, where: str
) -> None:
    """Packing again replaces a set, but not if shards of the earlier one would stay."""
    output = s3.new_uri() if where == "URI" else f"{tmp_path}-shards"
    shards, _ = pack(image_tree, output)
    before = storage.read(output, "train-000000.tar")
    with pytest.raises(DataError, match=r"holds \d+ shards of another set, as train-000001\.tar"):
        write_shards(image_tree, output, 2**30, lambda _: None)
    assert storage.read(output, "train-000000.tar") == before
    assert pack(image_tree, output)[0] == shards
    shutil.rmtree(image_tree / "val")
    with pytest.raises(DataError, match=r"holds .* shards of another set, as val-000000\.tar"):
        pack(image_tree, output)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resume_within_an_epoch_reads_the_same(local: ShardsData, workers: int) -> None:
    with (
        open_data(local) as one,
        open_data(local.model_copy(update={"loader_workers": workers})) as other,
    ):
        expected, resumed = epoch(one)[4:], epoch(other, first=2)
    assert len(expected) == len(resumed) == 6
    for a, b in zip(expected, resumed, strict=True):
        assert torch.equal(a.x, b.x)
        assert torch.equal(a.y, b.y)


@pytest.mark.parametrize("workers", [0, 2])
def test_shards_of_an_object_storage_are_those_of_a_folder(
    image_tree: Path, tmp_path: Path, s3: S3Server, workers: int
) -> None:
    """Also in a process that gets the indices from the driver."""
    uri, cache = s3.new_uri(), tmp_path / "cache"
    counts = pack(image_tree, uri)
    pack(image_tree, f"{tmp_path}/shards")
    remote = section(uri, cache, *counts, loader_workers=workers)
    shared = pickle.loads(pickle.dumps(load_shared_data(remote)))
    s3.requests.clear()
    with open_data(remote, files=shared) as data:
        data.first_samples("train")
        batches = [*epoch(data), *epoch(data, 2), *data.eval_batches("test", 0, 1, 4)]
    assert not any(request.path.endswith(".index") for request in s3.requests)
    with open_data(section(f"{tmp_path}/shards", cache, *counts)) as data:
        expected = [*epoch(data), *epoch(data, 2), *data.eval_batches("test", 0, 1, 4)]
    for batch, other in zip(batches, expected, strict=True):
        assert torch.equal(batch.x, other.x)
        assert torch.equal(batch.y, other.y)
    assert not cache.exists()


def test_an_object_that_is_written_again_is_not_mixed_with_the_old_one(
    image_tree: Path, tmp_path: Path, s3: S3Server
) -> None:
    uri = s3.new_uri()
    with open_data(section(uri, tmp_path / "cache", *pack(image_tree, uri))) as data:
        content = storage.read(uri, "train-000003.tar")
        assert content is not None
        storage.write(uri, "train-000003.tar", content[:-1] + b"x")
        with pytest.raises(DataError, match=r"000003\.tar.* was written again since the run"):
            epoch(data)


def test_shards_of_others_get_their_index_when_they_are_used(
    local: ShardsData, tmp_path: Path
) -> None:
    with open_data(local) as data:
        expected = pixels(epoch(data))
    for index in (tmp_path / "shards").glob("*.index"):
        index.unlink()
    for _ in range(2):  # made, and read from the cache
        with open_data(local) as data:
            assert pixels(epoch(data)) == expected
    assert len(list((tmp_path / "cache").glob("*.index"))) == len(
        list((tmp_path / "shards").glob("*.tar"))
    )


def test_a_local_shard_that_another_node_lacks_is_named(local: ShardsData, tmp_path: Path) -> None:
    with open_data(local) as data:
        (tmp_path / "shards").rename(tmp_path / "elsewhere")
        with pytest.raises(
            DataError, match=r"data\.train: .*\.tar cannot be read on this node; .*No such"
        ):
            epoch(data)


def test_a_damaged_sample_and_a_cut_off_shard_are_named(local: ShardsData, tmp_path: Path) -> None:
    shard = tmp_path / "shards" / "train-000003.tar"
    content = shard.read_bytes()
    position, size, _ = make_index(BytesIO(content), "").tolist()[0]
    shard.write_bytes(content[:position] + b"x" * size + content[position + size :])
    with open_data(local) as data, pytest.raises(DataError, match=r"sample 0 of .*train-000003"):
        epoch(data)
    with open_data(local) as data:
        shard.write_bytes(content[: position + size // 2])
        with pytest.raises(DataError, match=r"000003\.tar .*written again since the run started"):
            epoch(data)
    with pytest.raises(DataError, match=r"000003\.tar is damaged"), open_data(local):
        pass


def members(content: dict[str, bytes], *, end: bytes = bytes(1024)) -> bytes:
    """Return a tar file; a name may come twice, with blanks behind it."""
    parts = []
    for name, data in content.items():
        member = tarfile.TarInfo(name.rstrip())
        member.size = len(data)
        parts += [member.tobuf(), data, bytes(-len(data) % 512)]
    return b"".join(parts) + end


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """Return a header that claims another size than its member has."""
    member = tarfile.TarInfo(name)
    member.type, member.size = kind, size
    return member.tobuf(tarfile.GNU_FORMAT)


SAMPLE = {"a.jpg": b"", "a.cls": b"1"}
LINK = header("b.cls", 0, tarfile.SYMTYPE)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (members({**SAMPLE, "b.jpg": b""}), "each sample needs .* see b"),
        (members({"._a.jpg": b"", "__MACOSX/a.cls": b"1"}), "it has no sample"),
        (gzip.compress(members(SAMPLE), mtime=0), "is damaged or compressed"),
        (members({**SAMPLE, "a.cls ": b"0"}), "a.cls is another one of sample a"),
        (members({**SAMPLE, "a.png": b""}), "a.png is another one of sample a"),
        (members({"a.jpg": b"", "a.cls": b"cat"}), "a.cls must hold .*'cat'.*classes.txt"),
        (members({"a.jpg": b"", "a.cls": b"-1"}), "a.cls must hold .*from 0, but holds '-1'"),
        (members({"a.jpg": b"", "a.cls": b"9" * 24}), "a.cls must hold .*'9999"),
        (members({"a.jpg": b""}, end=header("a.cls", 20 * 2**30)), "a.cls must be a plain file"),
        (members(SAMPLE, end=LINK), "b.cls must be a plain file"),
        (members(SAMPLE, end=header("b.jpg", -2048)), "a member of -2048 bytes"),
        (header("x", 20 * 2**30, tarfile.XHDTYPE) + members(SAMPLE), "a header of 214"),
        (header("x", 2**40, tarfile.GNUTYPE_LONGNAME) + members(SAMPLE), "a header of 109"),
        (header("x", 512, tarfile.XHDTYPE) * 5000, "is damaged or compressed"),
        # A copy that ended early often ends between two members, where a tar looks complete.
        (members(SAMPLE, end=b""), "it was cut off"),
        (members(SAMPLE) + members({"b.jpg": b"", "b.cls": b"0"}), "another tar follows it"),
    ],
)
def test_a_shard_that_cannot_be_used_is_refused_with_the_reason(
    local: ShardsData, tmp_path: Path, content: bytes, message: str
) -> None:
    """As fast as its beginning is read: a header may claim any size, and so may a sparse file."""
    shard = tmp_path / "shards" / "train-000001.tar"
    shard.write_bytes(content)
    if not message.endswith(("cut off", "follows it")):
        os.truncate(shard, len(content) + 2**36)
    with (
        pytest.raises(DataError, match=rf"data\.train: .*train-000001\.tar.*{message}"),
        open_data(local),
    ):
        pass


def test_hidden_members_are_left_out() -> None:
    hidden = {"./._a.jpg": b"", "._a.cls": b"\0", "__MACOSX/b.jpg": b"", "./.x/c.cls": b"no"}
    content = members({**hidden, "./a.jpg": b"", "./a.cls": b" 007\n", "../b.txt": b""})
    assert make_index(BytesIO(content), "")[:, 2].tolist() == [7]


@pytest.mark.parametrize("where", ["folder", "URI"])
def test_the_index_of_a_shard_that_was_written_again_is_not_believed(
    image_tree: Path, tmp_path: Path, s3: S3Server, where: str
) -> None:
    """Its size, its positions and its date may be what they were."""
    output = s3.new_uri() if where == "URI" else f"{tmp_path}/shards"
    shards = section(output, tmp_path / "cache", *pack(image_tree, output))
    folder, name = storage.folder_and_name(expand_braces(shards.train)[0])
    with open_data(shards) as data:
        counts = np.array(data.info.class_counts)
    content = storage.read(folder, name)
    assert content is not None
    label = int(make_index(BytesIO(content), "")[0, 2])
    old, new = (b"%d".ljust(512, b"\0") % i for i in (label, 1 - label))
    assert len(old.rstrip(b"\0")) == 1
    status = (tmp_path / "shards" / name).stat() if where == "folder" else None
    storage.write(folder, name, content.replace(old[:512], new[:512], 1))
    if status is not None:
        os.utime(tmp_path / "shards" / name, ns=(status.st_atime_ns, status.st_mtime_ns))
    for _ in range(2):  # made anew, then read from the cache
        with open_data(shards) as data:
            changed = np.array(data.info.class_counts) - counts
            assert changed[label] == -1
            assert changed[1 - label] == 1


@pytest.mark.parametrize("content", [b"x", b"%s\n" + bytes(23), "outside", "below"])
def test_an_index_that_is_damaged_is_not_believed(
    local: ShardsData, tmp_path: Path, content: bytes | str
) -> None:
    with open_data(local) as data:
        expected = pixels(epoch(data))
    path = tmp_path / "shards" / "train-000001.tar.index"
    version, _, rows = path.read_bytes().partition(b"\n")
    index = np.frombuffer(rows, "<i8").copy()
    index[0] = -1 if content == "below" else 10**12
    if isinstance(content, bytes):
        path.write_bytes(content.replace(b"%s", version))
    else:
        path.write_bytes(version + b"\n" + index.tobytes())
    with open_data(local) as data:
        assert pixels(epoch(data)) == expected


@pytest.mark.parametrize("split", ["train", "val"])
def test_folders_with_other_classes_are_not_packed(
    image_tree: Path, tmp_path: Path, split: str
) -> None:
    (image_tree / split / "dog").rename(image_tree / split / "ant")
    with pytest.raises(DataError, match="val: and train must have .* one of them has: ant, dog"):
        pack(image_tree, f"{tmp_path}/shards")
    assert not (tmp_path / "shards").exists()


def test_a_storage_that_fails_is_an_error_even_when_samples_are_skipped(
    image_tree: Path, tmp_path: Path, s3: S3Server
) -> None:
    uri = s3.new_uri()
    counts = pack(image_tree, uri)
    remote = section(uri, tmp_path / "cache", *counts, on_unreadable="skip")
    with open_data(remote) as data:
        s3.applies_to = lambda request: request.path.endswith(".tar")
        s3.faults.extend([lambda _: ("403 Forbidden", b"")] * 100)
        with pytest.raises(DataError, match=r"data\.train: s3://.* cannot be read"):
            epoch(data)


def test_braces() -> None:
    assert expand_braces("a.tar") == ["a.tar"]
    assert expand_braces("a-{008..010}.tar") == ["a-008.tar", "a-009.tar", "a-010.tar"]
    assert expand_braces("{0..1}/{0..1}") == ["0/0", "0/1", "1/0", "1/1"]


@pytest.mark.parametrize(
    ("field", "values", "message"),
    [
        ("train", {"train": "absent-{000000..000005}.tar"}, "absent-000000.tar"),
        ("test", {"test": "train-000005.tar"}, r"train-000005\.tar is in data\.train too"),
        ("train", {"train": "a-{000003..000000}.tar"}, "a range counts down"),
        ("train", {"train": "a-{0..99999999999}.tar"}, "stands for 100,000,000,000 shards"),
    ],
)
def test_sets_that_cannot_be_opened_are_named(
    local: ShardsData, field: str, values: dict[str, Any], message: str
) -> None:
    folder = local.train.rpartition("/")[0]
    values = {k: f"{folder}/{v}" if isinstance(v, str) else v for k, v in values.items()}
    with (
        pytest.raises(DataError, match=rf"data\.{field}: .*{message}"),
        open_data(local.model_copy(update=values)),
    ):
        pass
