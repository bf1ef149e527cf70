"""Checkpoints: complete or absent, kept as the job says, readable without running code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from raytrain_opt.config.schema import CheckpointSection
from raytrain_opt.errors import JobError, StorageError
from raytrain_opt.storage import remove_tree
from raytrain_opt.train import checkpoint as checkpoint_module
from raytrain_opt.train.checkpoint import Checkpoints, Point, read_checkpoint, read_index
from raytrain_opt.train.state import TrainingState, capture, model_tensors
from tests.support.full_disk import limit_file_size

PROGRESS = {"next_epoch": 4, "lrs": [0.1, 0.2], "history": ({"winner": None, "x": float("-inf")},)}


def trained(seed: int = 0, optimizer: str = "AdamW") -> TrainingState:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).to(
        memory_format=torch.channels_last
    )
    stepper = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1)
    model(torch.randn(2, 3, 5, 5)).square().sum().backward()
    stepper.step()
    return capture(model, stepper, torch.amp.GradScaler("cpu", init_scale=4.0), copy=True)


def open_checkpoints(folder: Path, **section: Any) -> Checkpoints:
    return Checkpoints(folder, CheckpointSection(**section))


def folders(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def save_all(checkpoints: Checkpoints, accuracies: list[float | None]) -> None:
    state = trained()
    for epoch, accuracy in enumerate(accuracies, start=1):
        checkpoints.save(Point(epoch), state, {}, accuracy)


# Contents.


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_a_checkpoint_is_read_back_bit_by_bit(tmp_path: Path, optimizer: str) -> None:
    state = trained(optimizer=optimizer)
    saved = open_checkpoints(tmp_path).save(Point(3), state, PROGRESS, 0.5)
    back, progress, _ = read_checkpoint(tmp_path / saved.folder)
    assert progress == PROGRESS
    assert replace(back, tensors={}) == replace(state, tensors={})
    # Weights come back in plain order, whatever the order in memory was.
    for name, tensor in state.tensors.items():
        assert torch.equal(back.tensors[name].tensor(), tensor.tensor())
    assert back.tensors.keys() == state.tensors.keys()


def test_the_states_of_candidates_are_read_back_bit_by_bit(tmp_path: Path) -> None:
    candidates = {0: trained(1), 3: trained(2)}
    point = Point(3, rounds=1, candidates=2, candidate_steps=12)
    saved = open_checkpoints(tmp_path).save(point, trained(), PROGRESS, None, candidates)
    assert saved.folder == "epoch-0003-round-01-candidate-02-step-000012"
    assert saved.text == "12 steps from candidate 3 of round 2 of epoch 4"
    assert read_index(tmp_path) == [saved]
    *_, back = read_checkpoint(tmp_path / saved.folder)
    digests = {index: state.digest() for index, state in back.items()}
    assert digests == {index: state.digest() for index, state in candidates.items()}


def test_the_files_are_plain_safetensors_without_code(tmp_path: Path) -> None:
    state = trained()
    folder = tmp_path / open_checkpoints(tmp_path).save(Point(1), state, PROGRESS, None).folder
    assert sorted(path.name for path in folder.iterdir()) == ["rest.pt", "weights.safetensors"]
    weights = load_file(folder / "weights.safetensors")
    assert sorted(weights) == sorted(model_tensors(state))
    rest = torch.load(folder / "rest.pt", weights_only=True)
    assert rest["scaler"]["scale"] == 4.0
    assert rest["optimizer"]["param_groups"][0]["lr"] == 0.1


# Which checkpoints are kept.


@pytest.mark.parametrize(
    ("section", "kept"),
    [
        ({"keep": 2}, [2, 4, 5]),
        ({"keep": 1}, [2, 5]),
        ({"keep": 4}, [2, 3, 4, 5]),
        ({"keep": 9}, [1, 2, 3, 4, 5]),
        ({"keep": "all"}, [1, 2, 3, 4, 5]),
    ],
)
def test_the_latest_and_the_best_are_kept(
    tmp_path: Path, section: dict[str, Any], kept: list[int]
) -> None:
    checkpoints = open_checkpoints(tmp_path, **section)
    save_all(checkpoints, [0.1, 0.9, 0.5, 0.9, 0.3])
    assert [checkpoint.epoch for checkpoint in checkpoints.saved] == kept
    assert folders(tmp_path) == [f"epoch-{epoch:04d}" for epoch in kept]
    assert read_index(tmp_path) == checkpoints.saved


# Storage that cannot be written.


def read_files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    ("room", "file"), [(100, "weights.safetensors"), (2500, "rest.pt")], ids=["weights", "rest"]
)
def test_a_full_disk_is_a_storage_error_and_earlier_checkpoints_are_kept(
    tmp_path: Path, room: int, file: str
) -> None:
    checkpoints = open_checkpoints(tmp_path, keep=1)
    checkpoints.save(Point(1), trained(), PROGRESS, 0.5)
    before = read_files(tmp_path)
    assert len(before["epoch-0001/weights.safetensors"]) < 2500 < len(before["epoch-0001/rest.pt"])
    with limit_file_size(room), pytest.raises(StorageError, match=rf"epoch-0002.{file}.*written"):
        checkpoints.save(Point(2), trained(1), PROGRESS, 0.6)
    assert [checkpoint.epoch for checkpoint in checkpoints.saved] == [1]
    after = read_files(tmp_path)
    assert {name: after[name] for name in before} == before
    assert not [name for name in after if name.endswith(".tmp")]
    assert open_checkpoints(tmp_path).latest == checkpoints.latest


# Within an epoch.


def test_the_checkpoint_within_an_epoch_is_removed_at_its_end(tmp_path: Path) -> None:
    checkpoints, state = open_checkpoints(tmp_path, keep=2), trained()
    listings = []
    for epoch in (1, 2, 3):
        for rounds in (1, 2):
            checkpoints.save(Point(epoch - 1, rounds), state, {}, None)
            listings.append(folders(tmp_path))
        checkpoints.save(Point(epoch), state, {}, None)
        listings.append(folders(tmp_path))
    assert listings == [
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


def test_checkpoints_within_epochs_do_not_count_as_kept_ones(tmp_path: Path) -> None:
    """Even if only every third epoch has a checkpoint, and the best is an old one."""
    checkpoints, state = open_checkpoints(tmp_path, keep=1), trained()
    checkpoints.save(Point(3), state, {}, 0.9)
    checkpoints.save(Point(6), state, {}, 0.1)
    for epoch in (6, 7, 8):
        checkpoints.save(Point(epoch, rounds=1), state, {}, None)
    assert [checkpoint.text for checkpoint in checkpoints.saved] == [
        "epoch 3",
        "epoch 6",
        "round 1 of epoch 9",
    ]
    assert folders(tmp_path) == ["epoch-0003", "epoch-0006", "epoch-0008-round-01"]
    assert open_checkpoints(tmp_path).saved == checkpoints.saved


# Damage.


def flip_bit(file: Path) -> None:
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
    checkpoint_module.write_checkpoint(file.parent / "other", state, PROGRESS)
    (file.parent / "other" / file.name).replace(file)


@pytest.mark.parametrize("file", ["weights.safetensors", "rest.pt"])
@pytest.mark.parametrize(
    ("damage_file", "message"),
    [
        (Path.unlink, "cannot be read: No such file"),
        (lambda file: file.write_bytes(b""), "was changed after it was written"),
        (truncate, "was changed after it was written"),
        (flip_bit, "was changed after it was written"),
        (replace_by_another_shape, "was changed after it was written"),
    ],
    ids=["missing", "half-written", "truncated", "bit-flipped", "another shape"],
)
def test_a_damaged_checkpoint_is_named_and_the_previous_one_is_used(
    tmp_path: Path, file: str, damage_file: Callable[[Path], Any], message: str
) -> None:
    checkpoints = open_checkpoints(tmp_path, keep=2)
    save_all(checkpoints, [0.1, 0.2])
    checkpoints.save(Point(2, rounds=1), trained(1), PROGRESS, None)
    damage_file(tmp_path / "epoch-0002-round-01" / file)
    again = open_checkpoints(tmp_path, keep=2)
    [damage] = again.drop_damaged()
    assert damage.startswith("the checkpoint after round 1 of epoch 3 is damaged: ")
    assert f"epoch-0002-round-01/{file} {message}" in damage
    assert again.latest == open_checkpoints(tmp_path).saved[1]
    read_checkpoint(tmp_path / "epoch-0002")
    again.save(Point(3), trained(1), PROGRESS, 0.3)  # removes the damaged checkpoint
    assert folders(tmp_path) == ["epoch-0002", "epoch-0003"]
    assert open_checkpoints(tmp_path).drop_damaged() == []


def test_checkpoints_that_the_index_does_not_name_are_removed(tmp_path: Path) -> None:
    """A kill between two writes leaves them. Damaged ones stay until they are replaced."""
    checkpoints = open_checkpoints(tmp_path, keep=2)
    save_all(checkpoints, [0.1, 0.2, 0.3])
    for name in ("epoch-0001", "epoch-0003-round-01", "mine"):
        (tmp_path / name).mkdir()
    (tmp_path / "epoch-0003" / "rest.pt").unlink()
    resumed = open_checkpoints(tmp_path, keep=2)
    resumed.drop_damaged()
    resumed.remove_orphans()
    assert folders(tmp_path) == ["epoch-0002", "epoch-0003", "mine"]


def test_without_an_index_no_checkpoint_is_removed(tmp_path: Path) -> None:
    save_all(open_checkpoints(tmp_path), [0.1])
    (tmp_path / "index.json").unlink()
    open_checkpoints(tmp_path).remove_orphans()
    assert folders(tmp_path) == ["epoch-0001"]


def test_if_all_checkpoints_are_damaged_the_error_lists_each(tmp_path: Path) -> None:
    save_all(open_checkpoints(tmp_path, keep="all"), [0.1, 0.2, 0.3])
    flip_bit(tmp_path / "epoch-0003" / "rest.pt")
    truncate(tmp_path / "epoch-0002" / "weights.safetensors")
    remove_tree(tmp_path / "epoch-0001")
    with pytest.raises(StorageError) as caught:
        open_checkpoints(tmp_path).drop_damaged()
    message = str(caught.value)
    assert "all checkpoints of this run are damaged" in message
    indices = [message.index(text) for text in ("-0003/rest", "-0002/weights", "-0001/weights")]
    assert indices == sorted(indices)
    assert "start a new run" in message


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"checkpoints": [{"epoch": 1,',
        b"\xff\xfe\x00",
        b"[1, 2]",
        b'{"checkpoint": []}',
        b'{"checkpoints": [{"epoch": 1, "folder": "epoch-0001", "score": 0.5}]}',
        b'{"checkpoints": [{"epoch": "../x", "score": 0.5, "sha256": {}}]}',
    ],
)
def test_a_damaged_index_is_named(tmp_path: Path, content: bytes) -> None:
    save_all(open_checkpoints(tmp_path), [0.1])
    (tmp_path / "index.json").write_bytes(content)
    with pytest.raises(StorageError, match=r"index\.json is damaged.*\n.*start a new run"):
        open_checkpoints(tmp_path)


def test_an_index_can_neither_leave_out_a_file_nor_name_a_folder_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    save_all(open_checkpoints(folder, keep=1), [0.1])
    index = folder / "index.json"
    index.write_text(
        index.read_text().replace("epoch-0001", "../mine").replace('"rest.pt"', '"x"')
    )
    again = open_checkpoints(folder, keep=1)
    with pytest.raises(
        StorageError, match=r"epoch-0001/rest\.pt was changed after it was written"
    ):
        again.drop_damaged()
    again.save(Point(2), trained(), {}, None)
    assert folders(tmp_path) == ["checkpoints", "mine"]
    assert folders(folder) == ["epoch-0002"]


def test_an_optimizer_that_could_not_be_read_back_is_not_saved(tmp_path: Path) -> None:
    state = trained()
    state.param_groups[0]["folder"] = tmp_path
    with pytest.raises(JobError, match=r"optimizer\.name: .* pathlib.*Path.* a resume"):
        open_checkpoints(tmp_path).save(Point(3), state, PROGRESS, 0.5)
    assert read_index(tmp_path) == []
