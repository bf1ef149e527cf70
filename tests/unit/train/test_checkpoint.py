"""Commits: whole or not there, kept as the job says, readable without running code."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from full_disk import files_at_most
from safetensors.torch import load_file
from torch import nn

from raytrain_opt.config.schema import CheckpointSection
from raytrain_opt.errors import CommitError
from raytrain_opt.paths import remove_tree
from raytrain_opt.train import checkpoint
from raytrain_opt.train.checkpoint import Checkpoints, read_checkpoint, read_index
from raytrain_opt.train.state import HostState, capture

POSITION = {"next_epoch": 4, "lrs": [0.1, 0.2], "history": ({"winner": None, "x": float("-inf")},)}


def trained(seed: int = 0, optimizer: str = "AdamW") -> HostState:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).to(
        memory_format=torch.channels_last
    )
    stepper = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1)
    model(torch.randn(2, 3, 5, 5)).square().sum().backward()
    stepper.step()
    return capture(model, stepper, torch.amp.GradScaler("cpu", init_scale=4.0), copy=True)


def opened(folder: Path, **section: Any) -> Checkpoints:
    return Checkpoints(folder, CheckpointSection(**section))


def folders(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def save_all(commits: Checkpoints, accuracies: list[float | None]) -> None:
    state = trained()
    for epoch, accuracy in enumerate(accuracies, start=1):
        commits.save(epoch, state, {}, accuracy)


# Contents.


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_a_commit_comes_back_bit_by_bit(tmp_path: Path, optimizer: str) -> None:
    state = trained(optimizer=optimizer)
    commit = opened(tmp_path).save(3, state, POSITION, 0.5)
    back, position = read_checkpoint(tmp_path / commit.folder)
    assert position == POSITION
    assert back.plain == state.plain
    # Weights come back in plain order, whatever the order in memory was.
    for name, tensor in state.tensors.items():
        assert torch.equal(back.tensors[name].tensor(), tensor.tensor())
    assert back.tensors.keys() == state.tensors.keys()


def test_the_files_are_plain_safetensors_and_free_of_code(tmp_path: Path) -> None:
    state = trained()
    folder = tmp_path / opened(tmp_path).save(1, state, POSITION, None).folder
    assert sorted(path.name for path in folder.iterdir()) == ["rest.pt", "weights.safetensors"]
    weights = load_file(folder / "weights.safetensors")
    assert sorted(weights) == sorted(checkpoint.model_tensors(state))
    rest = torch.load(folder / "rest.pt", weights_only=True)
    assert rest["scaler"]["scale"] == 4.0
    assert rest["optimizer"]["param_groups"][0]["lr"] == 0.1


# Which commits stay.


@pytest.mark.parametrize(
    ("section", "kept"),
    [
        ({"keep": 2, "keep_best": True}, [2, 4, 5]),
        ({"keep": 2, "keep_best": False}, [4, 5]),
        ({"keep": 1, "keep_best": True}, [2, 5]),
        ({"keep": 4}, [2, 3, 4, 5]),
        ({"keep": 9}, [1, 2, 3, 4, 5]),
        ({"keep": "all", "keep_best": False}, [1, 2, 3, 4, 5]),
    ],
)
def test_the_latest_and_the_best_stay(
    tmp_path: Path, section: dict[str, Any], kept: list[int]
) -> None:
    commits = opened(tmp_path, **section)
    save_all(commits, [0.1, 0.9, 0.5, 0.9, 0.3])
    assert [commit.epoch for commit in commits.commits] == kept
    assert folders(tmp_path) == [f"epoch-{epoch:04d}" for epoch in kept]
    assert read_index(tmp_path) == commits.commits


@pytest.mark.parametrize(
    ("accuracies", "kept"),
    [([None, 0.9, 0.9, None], [2, 4]), ([None, None, None], [3])],
)
def test_unmeasured_commits_are_never_the_best(
    tmp_path: Path, accuracies: list[float | None], kept: list[int]
) -> None:
    commits = opened(tmp_path, keep=1)
    assert commits.latest is None
    save_all(commits, accuracies)
    assert [commit.epoch for commit in commits.commits] == kept


def test_a_resumed_run_goes_on_with_the_index(tmp_path: Path) -> None:
    save_all(opened(tmp_path, keep=1), [0.9, 0.1])
    again = opened(tmp_path, keep=1)
    assert again.latest is not None
    assert again.latest.epoch == 2
    again.save(3, trained(), {}, 0.2)
    assert folders(tmp_path) == ["epoch-0001", "epoch-0003"]


def test_without_an_index_there_are_no_commits(tmp_path: Path) -> None:
    assert read_index(tmp_path) == []


def test_what_the_index_does_not_name_is_no_commit(tmp_path: Path) -> None:
    """As after a crash between the files and the index."""
    commits = opened(tmp_path)
    commits.save(1, trained(), {}, 0.5)
    checkpoint.write_checkpoint(tmp_path / "epoch-0002", trained(1), {})
    again = opened(tmp_path)
    assert again.latest == commits.latest
    again.save(2, trained(2), {}, 0.6)
    back, _ = read_checkpoint(tmp_path / "epoch-0002")
    assert torch.equal(
        checkpoint.model_tensors(back)["0.weight"],
        checkpoint.model_tensors(trained(2))["0.weight"],
    )


# Storage that refuses.


def whole_files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    ("room", "file"), [(100, "weights.safetensors"), (2500, "rest.pt")], ids=["weights", "rest"]
)
def test_a_full_disk_is_a_commit_error_and_earlier_commits_stay(
    tmp_path: Path, room: int, file: str
) -> None:
    commits = opened(tmp_path, keep=1)
    commits.save(1, trained(), POSITION, 0.5)
    before = whole_files(tmp_path)
    assert len(before["epoch-0001/weights.safetensors"]) < 2500 < len(before["epoch-0001/rest.pt"])
    with files_at_most(room), pytest.raises(CommitError, match=rf"epoch-0002.{file}.*written"):
        commits.save(2, trained(1), POSITION, 0.6)
    assert [commit.epoch for commit in commits.commits] == [1]
    after = whole_files(tmp_path)
    assert {name: after[name] for name in before} == before
    assert not [name for name in after if name.endswith(".tmp")]
    assert opened(tmp_path).latest == commits.latest


def test_an_index_that_cannot_be_written_leaves_the_old_one_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = opened(tmp_path, keep=1, keep_best=False)
    commits.save(1, trained(), {}, 0.5)

    def refuse(self: Path, target: Path) -> Path:
        if target.name == "index.json":
            raise OSError(28, "No space left on device")
        return rename(self, target)

    rename = Path.replace
    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(CommitError, match=r"index\.json cannot be written.*No space left"):
        commits.save(2, trained(1), {}, 0.6)
    assert commits.latest is not None
    assert commits.latest.epoch == 1
    assert opened(tmp_path).latest == commits.latest
    read_checkpoint(tmp_path / "epoch-0001")


def test_the_index_is_readable_json(tmp_path: Path) -> None:
    opened(tmp_path).save(1, trained(), {}, 0.5)
    [commit] = json.loads((tmp_path / "index.json").read_text())["commits"]
    files = {file.name: file.read_bytes() for file in (tmp_path / "epoch-0001").iterdir()}
    sha256 = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    assert commit == {
        "folder": "epoch-0001",
        "epoch": 1,
        "rounds": 0,
        "test_accuracy": 0.5,
        "sha256": sha256,
    }


# Within an epoch.


def test_at_most_one_commit_is_within_an_epoch_and_it_goes_with_the_next_epochs(
    tmp_path: Path,
) -> None:
    commits, state = opened(tmp_path, keep=2, keep_best=False), trained()
    seen = []
    for epoch in (1, 2, 3):
        for rounds in (1, 2):
            commits.save(epoch - 1, state, {}, None, rounds=rounds)
            seen.append(folders(tmp_path))
        commits.save(epoch, state, {}, 0.5)
        seen.append(folders(tmp_path))
    assert seen == [
        ["epoch-0000-round-01"],
        ["epoch-0000-round-02"],
        ["epoch-0001"],
        ["epoch-0001", "epoch-0001-round-01"],
        ["epoch-0001", "epoch-0001-round-02"],
        ["epoch-0001", "epoch-0002"],
        ["epoch-0001", "epoch-0002", "epoch-0002-round-01"],
        ["epoch-0001", "epoch-0002", "epoch-0002-round-02"],
        ["epoch-0002", "epoch-0003"],
    ]


def test_commits_within_epochs_do_not_count_for_what_is_kept(tmp_path: Path) -> None:
    """Also where only every third epoch is committed, and the best is an old one."""
    commits, state = opened(tmp_path, keep=1), trained()
    commits.save(3, state, {}, 0.9)
    commits.save(6, state, {}, 0.1)
    for epoch in (6, 7, 8):
        commits.save(epoch, state, {}, None, rounds=1)
    assert [commit.reached for commit in commits.commits] == [
        "epoch 3",
        "epoch 6",
        "round 1 of epoch 9",
    ]
    assert folders(tmp_path) == ["epoch-0003", "epoch-0006", "epoch-0008-round-01"]
    assert opened(tmp_path).commits == commits.commits


# Damage.


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def replace_by_another_shape(file: Path) -> None:
    other = nn.Linear(3, 2)
    state = capture(
        other, torch.optim.SGD(other.parameters()), torch.amp.GradScaler("cpu"), copy=True
    )
    checkpoint.write_checkpoint(file.parent / "other", state, POSITION)
    (file.parent / "other" / file.name).replace(file)


@pytest.mark.parametrize("file", ["weights.safetensors", "rest.pt"])
@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (Path.unlink, "cannot be read: No such file"),
        (lambda file: file.write_bytes(b""), "is not as it was written"),
        (truncate, "is not as it was written"),
        (flip_a_bit, "is not as it was written"),
        (replace_by_another_shape, "is not as it was written"),
    ],
    ids=["missing", "half-written", "truncated", "bit-flipped", "another shape"],
)
def test_a_damaged_commit_is_named_and_the_one_before_is_used(
    tmp_path: Path, file: str, spoil: Callable[[Path], Any], why: str
) -> None:
    commits = opened(tmp_path, keep=2, keep_best=False)
    save_all(commits, [0.1, 0.2])
    commits.save(2, trained(1), POSITION, None, rounds=1)
    spoil(tmp_path / "epoch-0002-round-01" / file)
    again = opened(tmp_path, keep=2, keep_best=False)
    [damage] = again.forget_damaged()
    assert damage.startswith("the commit after round 1 of epoch 3 is damaged: ")
    assert f"epoch-0002-round-01/{file} {why}" in damage
    assert again.latest == opened(tmp_path).commits[1]
    read_checkpoint(tmp_path / "epoch-0002")
    again.save(3, trained(1), POSITION, 0.3)  # what was damaged leaves with the next commit
    assert folders(tmp_path) == ["epoch-0002", "epoch-0003"]
    assert opened(tmp_path).forget_damaged() == []


def test_a_damaged_commit_is_replaced_when_its_epoch_is_trained_again(tmp_path: Path) -> None:
    save_all(opened(tmp_path), [0.1, 0.2])
    flip_a_bit(tmp_path / "epoch-0002" / "rest.pt")
    again = opened(tmp_path)
    assert len(again.forget_damaged()) == 1
    again.save(2, trained(1), POSITION, 0.2)
    assert [commit.epoch for commit in again.commits] == [1, 2]
    assert opened(tmp_path).forget_damaged() == []
    assert read_checkpoint(tmp_path / "epoch-0002")[1] == POSITION


def test_older_commits_are_not_looked_at(tmp_path: Path) -> None:
    save_all(opened(tmp_path, keep="all"), [0.1, 0.2])
    flip_a_bit(tmp_path / "epoch-0001" / "rest.pt")
    assert opened(tmp_path).forget_damaged() == []


def test_when_no_commit_is_whole_the_error_lists_each(tmp_path: Path) -> None:
    save_all(opened(tmp_path, keep="all"), [0.1, 0.2, 0.3])
    flip_a_bit(tmp_path / "epoch-0003" / "rest.pt")
    truncate(tmp_path / "epoch-0002" / "weights.safetensors")
    remove_tree(tmp_path / "epoch-0001")
    with pytest.raises(CommitError) as caught:
        opened(tmp_path).forget_damaged()
    message = str(caught.value)
    assert "no commit of this run is whole" in message
    places = [message.index(text) for text in ("-0003/rest", "-0002/weights", "-0001/weights")]
    assert places == sorted(places)
    assert "start a new run" in message


def test_a_run_without_commits_has_none_that_is_damaged(tmp_path: Path) -> None:
    assert opened(tmp_path).forget_damaged() == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"commits": [{"epoch": 1,',
        b"\xff\xfe\x00",
        b"[1, 2]",
        b'{"commit": []}',
        b'{"commits": [{"epoch": 1, "folder": "epoch-0001", "test_accuracy": 0.5}]}',
        b'{"commits": [{"epoch": "../x", "test_accuracy": 0.5, "sha256": {}}]}',
    ],
)
def test_a_damaged_index_is_named(tmp_path: Path, content: bytes) -> None:
    save_all(opened(tmp_path), [0.1])
    (tmp_path / "index.json").write_bytes(content)
    with pytest.raises(CommitError, match=r"index\.json is damaged.*\n.*start a new run"):
        opened(tmp_path)


def test_an_index_can_neither_leave_out_a_file_nor_name_a_folder_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    save_all(opened(folder, keep=1, keep_best=False), [0.1])
    index = folder / "index.json"
    index.write_text(
        index.read_text().replace("epoch-0001", "../mine").replace('"rest.pt"', '"x"')
    )
    again = opened(folder, keep=1, keep_best=False)
    with pytest.raises(CommitError, match=r"epoch-0001/rest\.pt is not as it was written"):
        again.forget_damaged()
    again.save(2, trained(), {}, None)
    assert folders(tmp_path) == ["checkpoints", "mine"]
    assert folders(folder) == ["epoch-0002"]
