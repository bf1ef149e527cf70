"""Run directories with damage of every sort: used rightly, or refused without a changed byte."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import obstore
import pytest
from click.testing import CliRunner

from raytrain_opt import Job, cli, load_model, run, storage
from raytrain_opt.commands.evaluate import evaluate_runs
from raytrain_opt.config.schema import ModelSection
from raytrain_opt.errors import JobError, RaytrainOptError, StorageError
from raytrain_opt.execution.resume import load_run_job
from raytrain_opt.execution.workspace import open_frontend, open_workspace
from raytrain_opt.report.run_reader import read_run
from raytrain_opt.report.summary import tiles
from raytrain_opt.train.pretrained import read_pretrained
from tests.support.s3_server import S3Server

INDEX, WEIGHTS = "checkpoints/index.json", "checkpoints/epoch-0002/weights.safetensors"


def rewrite(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(change(path.read_bytes()))


def bind_socket(path: Path) -> None:
    path.unlink()
    directory = os.getcwd()
    os.chdir(path.parent)  # the path of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(directory)


def replace_by(make: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda path: (path.unlink(), make(path))


BYTES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "halved": lambda content: content[: len(content) // 2],
    "NUL bytes": lambda content: bytes(len(content)),
    "CRLF": lambda content: content.replace(b"\n", b"\r\n"),
    "BOM": lambda content: b"\xef\xbb\xbf" + content,
    "no newline": lambda content: content.removesuffix(b"\n"),
    "first line missing": lambda content: content.partition(b"\n")[2],
    "last line missing": lambda content: b"".join(content.splitlines(True)[:-1]),
    "last line twice": lambda content: content + content.splitlines(True)[-1],
    "too large": lambda content: content + bytes(2**20),
}
DAMAGES: dict[str, Callable[[Path], object]] = {
    **{name: rewrite(change) for name, change in BYTES.items()},
    "missing": Path.unlink,
    "directory": replace_by(Path.mkdir),
    "FIFO": replace_by(os.mkfifo),
    "socket": bind_socket,
    "device": replace_by(lambda path: path.symlink_to("/dev/zero")),
    "dangling link": replace_by(lambda path: path.symlink_to("nowhere")),
}
# The content is the same: to refuse them is right, and to use them is, too.
HARMLESS = {"CRLF", "BOM", "no newline"}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two epochs."""
    values: dict[str, Any] = {
        "model": {"name": "small_cnn", "args": {"width": 4}},
        "data": "digits",
        "epochs": 2,
        "global_batch_size": 256,
        "learning_rate": {"policy": "schedule", "shape": "constant", "initial": 0.1},
        "workers": {"count": 1, "threads": 1},
        "storage_path": str(tmp_path_factory.mktemp("runs")),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raytrain_opt.execution.result.try_write_report", lambda *_: "")
        return Path(run(Job.model_validate(values), in_process=True).run_dir)


@pytest.fixture
def finished(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(storage, "MAX_BYTES", 2**20)
    return Path(shutil.copytree(original, tmp_path / original.name))


@pytest.fixture
def unfinished(finished: Path) -> Path:
    (finished / "result.json").unlink()
    job = finished / "job.yaml"
    job.write_text(job.read_text().replace("epochs: 2\n", "epochs: 4\n"))
    return finished


def tree(folder: Path) -> dict[str, object]:
    """Return kind and digest of everything below the folder, but for who holds the lock."""

    def content(path: Path) -> object:
        mode = path.lstat().st_mode
        plain = stat.S_ISREG(mode) and hashlib.sha256(path.read_bytes()).hexdigest()
        return stat.S_IFMT(mode), plain

    return {str(path): content(path) for path in folder.rglob("*") if path.name != ".lock"}


def resume(run_dir: str) -> None:
    """Do all that a resume does before the training starts."""
    job = load_run_job(run_dir, (), trust=False)
    with open_frontend(0.0) as frontend, open_workspace(job, frontend, run_dir):
        pass


def copied(run_dir: Path, name: str, damage: str) -> Path:
    """Return a copy of the run, in a folder of its own, with this damage to the file."""
    folder = run_dir.parent / f"copy {name.replace('/', ' ')}"
    copy = Path(shutil.copytree(run_dir, folder / run_dir.name))
    for path in copy.glob(name):
        DAMAGES[damage](path)
    return copy


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_resume_that_is_refused_changes_no_byte(unfinished: Path, damage: str) -> None:
    counted, hashed = ("epochs.jsonl", "schedule.jsonl"), (INDEX, "checkpoints/*/weights.*")
    for name in (*counted, *hashed, "job.yaml", "events.jsonl", ".lock"):
        run_dir = copied(unfinished, name, damage)
        before, refusal = tree(run_dir), ""
        try:
            resume(str(run_dir))
        except RaytrainOptError as error:
            refusal = str(error)
        if refusal:
            assert tree(run_dir) == before, (name, damage)
            assert str(run_dir) in refusal
        if name in counted:
            # A resume removes lines after the checkpoint.
            assert bool(refusal) == (damage not in {*HARMLESS, "last line twice"}), (name, damage)
        if name in hashed and damage not in {*HARMLESS, "first line missing"}:
            assert refusal or name == INDEX, (name, damage)


@pytest.mark.parametrize("damage", sorted(BYTES.keys() - {"too large"}))
@pytest.mark.parametrize("name", ["epochs.jsonl", INDEX, "checkpoints/epoch-0002/rest.pt"])
def test_a_run_under_a_uri_is_refused_without_a_change(
    unfinished: Path, s3: S3Server, damage: str, name: str
) -> None:
    uri = storage.join(s3.new_uri(), unfinished.name)
    DAMAGES[damage](unfinished / name)
    for path in filter(Path.is_file, unfinished.rglob("*")):
        storage.write(uri, str(path.relative_to(unfinished)), path.read_bytes())

    def objects() -> dict[str, object]:
        store = storage.open_store(uri)
        names = [o["path"] for batch in obstore.list(store) for o in batch]
        return {name: bytes(obstore.get(store, name).bytes()) for name in names}

    before = objects()
    try:
        resume(uri)
    except RaytrainOptError:
        assert objects() == before


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("state", ["finished", "unfinished"])
def test_records_are_read_rightly_or_refused(
    request: pytest.FixtureRequest, damage: str, state: str
) -> None:
    run_dir: Path = request.getfixturevalue(state)
    names = ["epochs.jsonl", "schedule.jsonl", "job.yaml", INDEX, "predictions.json"]
    expected = tiles(read_run(str(run_dir)))
    for name in names + ["result.json"] * (state == "finished"):
        copy = copied(run_dir, name, damage)
        before = tree(copy)
        assert CliRunner().invoke(cli.main, ["runs", str(copy.parent)]).exit_code == 0
        refusal = ""
        try:
            shown = tiles(read_run(str(copy)))
        except RaytrainOptError as error:
            refusal = str(error)
        if refusal:
            assert copy.name in refusal
        else:  # without a result, the run is one that was interrupted
            assert shown == expected or name == "result.json", (name, damage)
        assert tree(copy) == before


# Weights.


def arguments_for(run_dir: Path) -> Iterator[str]:
    """Yield the arguments that name the last checkpoint."""
    folder = run_dir / "checkpoints/epoch-0002"
    (run_dir / "link").symlink_to(folder)
    yield from map(str, (run_dir, folder, folder / "weights.safetensors", run_dir / "link"))
    yield from (f"file://{run_dir}", f"file://{folder}", os.path.relpath(folder))


READERS: dict[str, Callable[[str], object]] = {
    "load_model": lambda run_dir: load_model(run_dir, device="cpu"),
    "evaluate": lambda run_dir: evaluate_runs([run_dir], ensemble=False),
    "model.weights": lambda run_dir: read_pretrained(
        ModelSection(name="small_cnn", weights=run_dir)
    ),
}


@pytest.mark.filterwarnings("ignore:the checkpoint after")
@pytest.mark.parametrize("reader", READERS)
def test_no_reader_uses_weights_that_differ_from_their_digest(finished: Path, reader: str) -> None:
    for argument in arguments_for(finished):
        READERS[reader](argument)
    (finished / "link").unlink()
    content = bytearray((finished / WEIGHTS).read_bytes())
    content[-3] ^= 0x40
    damages = {**DAMAGES, "a bit": lambda path: path.write_bytes(bytes(content))}
    for damage in (damages[name] for name in damages.keys() - {"CRLF", "no newline"}):
        copy = Path(shutil.copytree(finished, finished.parent / "copy"))
        damage(copy / WEIGHTS)
        shutil.rmtree(copy / "checkpoints/epoch-0001")  # nothing to fall back to
        for argument in arguments_for(copy):
            with pytest.raises((StorageError, JobError), match=r"weights|complete checkpoints"):
                READERS[reader](argument)
        shutil.rmtree(copy)


# Folders that are links.


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard", "ray", "checkpoints/epoch-0002"])
def test_a_folder_that_is_a_link_is_neither_written_nor_cleaned(
    unfinished: Path, name: str
) -> None:
    elsewhere, folder = unfinished.parent / "elsewhere", unfinished / name
    folder.mkdir(exist_ok=True)
    folder.rename(elsewhere)
    (elsewhere / "epoch-0042").mkdir()
    folder.symlink_to(elsewhere)
    before = tree(unfinished), tree(elsewhere)
    with pytest.raises(JobError, match=f"--resume: {folder} is a link.*move {elsewhere} to"):
        resume(str(unfinished))
    assert (tree(unfinished), tree(elsewhere)) == before


def test_a_checkpoint_that_the_index_does_not_name_is_refused(finished: Path) -> None:
    orphan = finished / "checkpoints/epoch-0003"
    shutil.copytree(finished / "checkpoints/epoch-0002", orphan)
    with pytest.raises(JobError, match="not among the complete checkpoints"):
        load_model(orphan)
    moved = Path(shutil.copytree(orphan, finished.parent / "moved"))
    (finished.parent / "index.json").write_text("{}")  # of something else
    load_model(moved)
