"""Commits: whole or not there, kept as the job says, readable without running code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from full_disk import files_at_most
from safetensors.torch import load_file
from torch import nn

from raytrain_opt.config.schema import CheckpointSection
from raytrain_opt.errors import CommitError
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
    value = json.loads((tmp_path / "index.json").read_text())
    assert value == {"commits": [{"epoch": 1, "folder": "epoch-0001", "test_accuracy": 0.5}]}
