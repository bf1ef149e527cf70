"""Files are written completely or not at all, and read locally or under a URI."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raytrain_opt import storage
from raytrain_opt.errors import StorageError
from raytrain_opt.storage import append_lines, check_uri, write_atomic, write_json, write_text


@pytest.mark.parametrize(
    ("uri", "secret"),
    [
        ("s3://KEY:SECRET@bucket/runs", True),
        ("s3://bucket/runs?access_key=KEY&secret_key=SECRET", True),
        ("abfss://container@account/runs?sas_token=SECRET", True),
        ("abfss://container@account/runs?se=2030-01-01&sig=SECRET", True),
        ("s3://bucket/runs?region=a&sig=", True),
        ("s3://bucket/runs?endpoint=http://KEY:SECRET@host", True),
        ("abfss://container@account.dfs.core.windows.net/runs", False),
        ("s3://bucket/runs?region=eu-west-1&endpoint=http://host:9000", False),
        ("runs/key:secret@home", False),
    ],
)
def test_credentials_in_a_uri_are_refused_without_showing_them(uri: str, secret: bool) -> None:
    problems = check_uri(uri)
    assert [problem.path for problem in problems] == ["storage_path"] * secret
    assert "SECRET" not in str(problems)


@pytest.mark.parametrize(
    ("uri", "rule"),
    [
        ("s3://[bucket]/runs", "is no valid URI"),
        ("s3://KEY:SECRET@[bucket]/runs", "is no valid URI"),
        ("file://runs", "names a host, not a folder"),
        ("file:///runs", ""),
        ("file://localhost/runs", ""),
    ],
)
def test_a_wrong_uri_is_refused(uri: str, rule: str) -> None:
    problems = check_uri(uri)
    assert [problem.rule.startswith(rule) for problem in problems] == [True] * bool(rule)
    assert "SECRET" not in str(problems)


@pytest.mark.parametrize(
    ("storage_path", "joined"),
    [
        ("runs/", "runs/r-1"),
        ("/a b?c=d", "/a b?c=d/r-1"),
        ("s3://bucket", "s3://bucket/r-1"),
        (
            "s3://bucket/runs/?virtual_hosted_style_request=true&endpoint=127.0.0.1:9000&region=eu-west-1",
            "s3://bucket/runs/r-1?virtual_hosted_style_request=true&endpoint=127.0.0.1:9000&region=eu-west-1",
        ),
        ("file:///tmp/runs", "file:///tmp/runs/r-1"),
    ],
)
def test_options_of_a_uri_stay_at_its_end(storage_path: str, joined: str) -> None:
    assert storage.join(storage_path, "r-1") == joined
    assert storage.last_name(joined) == "r-1"
    assert storage.last_name(f"{storage_path.split('?')[0]}/r-2/") == "r-2"


@pytest.mark.parametrize("location", ["{}", "file://{}"])
def test_a_file_is_written_read_and_removed(tmp_path: Path, location: str) -> None:
    storage_path = location.format(tmp_path / "new")
    assert storage.read(storage_path, "a/b") is None
    storage.write(storage_path, "a/b", b"content")
    assert storage.read(storage_path, "a/b") == b"content"
    storage.remove(storage_path, "a/b")
    assert storage.read(storage_path, "a/b") is None


@pytest.mark.parametrize("value", [float("nan"), {"a": [float("inf")]}])
def test_values_that_are_not_json_are_never_written(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "x.json", value)
    assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize("error", [OSError(28, "full"), RuntimeError("torch: full")])
def test_a_failed_write_keeps_the_old_file(tmp_path: Path, error: Exception) -> None:
    path = tmp_path / "x"
    write_text(path, "old")

    def write(temporary: Path) -> None:
        temporary.write_text("half of the n")
        raise error

    with pytest.raises(StorageError, match=r"x cannot be written: .*full") as caught:
        write_atomic(path, write)
    assert caught.value.__cause__ is error
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_the_mode_of_a_file_follows_the_umask(tmp_path: Path) -> None:
    """safetensors makes files that only their owner can read."""

    def write(temporary: Path) -> None:
        temporary.unlink()
        temporary.touch(mode=0o600)

    umask = os.umask(0o027)
    try:
        write_atomic(tmp_path / "x", write)
    finally:
        os.umask(umask)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640


def test_a_file_and_then_its_name_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    monkeypatch.setattr("os.fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    write_text(tmp_path / "x", "content")
    assert synced == [(tmp_path / "x").stat().st_ino, tmp_path.stat().st_ino]


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"", []),
        (b'{"a": 1}\n', [b'{"a": 1}']),
        (b'{"a": 1}\n{"a": 2}', [b'{"a": 1}', b'{"a": 2}']),
        (b'\xef\xbb\xbf{"a": 1}\r\n{"a": 2}\r', [b'{"a": 1}\r', b'{"a": 2}\r']),
        (b'\n{"a": 1}\n\n{"a": 2}\n\r\n\n', [b'{"a": 1}', b'{"a": 2}']),
        (b'{"a": 1}\n{"a": [2', [b'{"a": 1}']),
        (b'{"a": 1}\n' + bytes(9), [b'{"a": 1}']),
        (b'{"a": 1}\n{"a": "\xc3', [b'{"a": 1}']),
    ],
)
def test_a_last_line_is_complete_if_its_json_is(
    tmp_path: Path, content: bytes, lines: list[bytes]
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    assert storage.complete_lines(content) == lines
    append_lines(path, ["{}"])
    assert storage.complete_lines(path.read_bytes()) == [*lines, b"{}"]


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)


@pytest.mark.parametrize(
    "make", [os.mkfifo, Path.mkdir, make_socket, lambda path: path.symlink_to("/dev/zero")]
)
def test_what_is_no_plain_file_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], object]
) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "x")
    with pytest.raises(StorageError, match="x cannot be read: .*(plain file|No such device)"):
        storage.read(str(tmp_path), "x")
    with pytest.raises(StorageError, match="x cannot be written: "):
        append_lines(tmp_path / "x", ["{}"])


def test_a_file_that_would_fill_the_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "MAX_BYTES", 1000)
    with (tmp_path / "x").open("wb") as file:
        file.truncate(2**40)  # sparse
    with pytest.raises(StorageError, match="has more than 1,000 bytes"):
        storage.read(str(tmp_path), "x")


def test_a_line_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"nowhere.x\.jsonl cannot be written"):
        append_lines(tmp_path / "nowhere" / "x.jsonl", ["{}"])
