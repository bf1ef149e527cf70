"""Commits on disk: weights as safetensors, the rest as a file that loads without pickle.

    checkpoints/epoch-0003/weights.safetensors   the model's tensors by name
    checkpoints/epoch-0003/rest.pt               optimiser, scaler, position (weights_only=True)
    checkpoints/index.json                       the commits that are whole, oldest first

A commit exists when the index names it; the index is replaced atomically.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from raytrain_opt.config.schema import CheckpointSection
from raytrain_opt.errors import CheckpointError
from raytrain_opt.paths import remove_tree, write_atomic, write_json
from raytrain_opt.train.state import HostState, model_tensors, optimizer_state_dict, to_host


@dataclass(frozen=True)
class Commit:
    """One entry of the index."""

    epoch: int
    folder: str
    test_accuracy: float | None


class Checkpoints:
    """The commits of one run; those the job does not keep are removed."""

    def __init__(self, folder: Path, section: CheckpointSection) -> None:
        self.folder, self.section = folder, section
        self.commits = read_index(folder)

    @property
    def latest(self) -> Commit | None:
        """The last whole one."""
        return self.commits[-1] if self.commits else None

    def save(
        self, epoch: int, state: HostState, position: dict[str, Any], test_accuracy: float | None
    ) -> Commit:
        """Write a commit, name it in the index, then remove what is no longer kept.

        `position` is whatever else the run goes on from: numbers, texts, lists and dicts.
        Raises CommitError when the storage refuses; earlier commits stay.
        """
        commit = Commit(epoch, _folder_name(epoch), test_accuracy)
        write_checkpoint(self.folder / commit.folder, state, position)
        kept = self._kept([*self.commits, commit])
        dropped = [c for c in self.commits if c not in kept]
        write_json(self.folder / "index.json", {"commits": [vars(c) for c in kept]})
        self.commits = kept
        for old in dropped:
            remove_tree(self.folder / old.folder)
        return commit

    def _kept(self, commits: list[Commit]) -> list[Commit]:
        if self.section.keep == "all":
            return commits
        best = _best(commits) if self.section.keep_best else None
        return [c for c in commits if c in commits[-self.section.keep :] or c == best]


def _best(commits: list[Commit]) -> Commit | None:
    """The best test accuracy; the earlier of equals; None when none was measured."""
    measured = [(c.test_accuracy, -c.epoch, c) for c in commits if c.test_accuracy is not None]
    return max(measured, key=lambda entry: entry[:2])[2] if measured else None


def write_checkpoint(folder: Path, state: HostState, position: dict[str, Any]) -> None:
    """One commit's files. Raises CommitError naming the path."""
    weights = {name: tensor.contiguous() for name, tensor in model_tensors(state).items()}
    rest = {
        "optimizer": optimizer_state_dict(state),
        "scaler": state.plain["scaler"],
        "position": position,
    }
    write_atomic(folder / "weights.safetensors", lambda path: save_file(weights, path))
    write_atomic(folder / "rest.pt", lambda path: torch.save(rest, path))


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The model's tensors, for `model.load_state_dict`. Raises CheckpointError."""
    file = folder / "weights.safetensors"
    try:
        return load_file(file)
    except Exception as error:
        raise _unreadable(file, error) from error


def read_rest(folder: Path) -> dict[str, Any]:
    """Optimiser, scaler and position; executes no code from the file. Raises CheckpointError."""
    file = folder / "rest.pt"
    try:
        rest: dict[str, Any] = torch.load(file, weights_only=True)
    except Exception as error:  # damage can look like anything to an unpickler
        raise _unreadable(file, error) from error
    if not isinstance(rest, dict) or not {"optimizer", "scaler", "position"} <= rest.keys():
        raise _unreadable(file, "it holds something else")
    return rest


def read_checkpoint(folder: Path) -> tuple[HostState, dict[str, Any]]:
    """The state and the position of a commit. Raises CheckpointError."""
    rest, weights = read_rest(folder), read_weights(folder)
    try:
        state = to_host(weights, rest["optimizer"], rest["scaler"], copy=False)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _unreadable(folder / "rest.pt", error) from error
    return state, rest["position"]


def read_index(folder: Path) -> list[Commit]:
    """The whole commits of a run's checkpoint folder, oldest first; none without an index.

    Raises CheckpointError. A folder is named as `Checkpoints` names it, or refused: old ones
    are removed by these names.
    """
    file = folder / "index.json"
    if not file.exists():
        return []
    try:
        commits = [Commit(**at) for at in json.loads(file.read_text(encoding="utf-8"))["commits"]]
        wrong = [c.folder for c in commits if c.folder != _folder_name(c.epoch)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unreadable(file, error) from error
    if wrong:
        raise _unreadable(file, f"it names {wrong[0]!r}, which is no folder of a commit")
    return commits


def _folder_name(epoch: int) -> str:
    return f"epoch-{epoch:04d}"


def _unreadable(file: Path, why: object) -> CheckpointError:
    text = f"{type(why).__name__}: {why}" if isinstance(why, Exception) else why
    return CheckpointError(
        f"{file} is damaged, or was not written by this package; no code in it was run: {text}"
    )
