"""Commits on disk: weights as safetensors, the rest as a file that loads without pickle.

    checkpoints/epoch-0003/weights.safetensors   the model's tensors by name
    checkpoints/epoch-0003/rest.pt               optimiser, scaler, position (weights_only=True)
    checkpoints/epoch-0003-round-02/             the same after 2 rounds of epoch 4
    checkpoints/index.json                       the commits that are whole, oldest first

A commit exists when the index names it, with the SHA-256 of its files; the index is replaced
atomically.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor

from raytrain_opt.config.schema import CheckpointSection
from raytrain_opt.errors import CheckpointError, CommitError
from raytrain_opt.paths import remove_tree, write_atomic, write_json
from raytrain_opt.train.state import HostState, model_tensors, optimizer_state_dict, to_host

_WEIGHTS, _REST = "weights.safetensors", "rest.pt"


@dataclass(frozen=True)
class Commit:
    """One entry of the index: after `epoch` whole epochs and `rounds` rounds of the next one.
    `sha256` of each of its files, hexadecimal.
    """

    epoch: int
    test_accuracy: float | None
    sha256: dict[str, str]
    rounds: int = 0

    @property
    def folder(self) -> str:
        """Its name below the checkpoint folder; what the index says of it is for people."""
        return _folder_name(self.epoch, self.rounds)

    @property
    def reached(self) -> str:
        """For messages: `epoch 3`, `round 2 of epoch 4`."""
        if self.rounds:
            return f"round {self.rounds} of epoch {self.epoch + 1}"
        return f"epoch {self.epoch}"


@dataclass(frozen=True)
class _Index:
    commits: list[Commit]


_INDEX = TypeAdapter(_Index)


class Checkpoints:
    """The commits of one run; those the job does not keep are removed."""

    def __init__(self, folder: Path, section: CheckpointSection) -> None:
        """Raises CheckpointError when the index cannot be read."""
        self.folder, self.section = folder, section
        self.commits = read_index(folder)
        self._forgotten: set[str] = set()

    @property
    def latest(self) -> Commit | None:
        """The last one."""
        return self.commits[-1] if self.commits else None

    def forget_damaged(self) -> list[str]:
        """Until the last commit is whole, forget it. Returns what is wrong with each forgotten
        one, newest first.

        Raises CheckpointError with the same when there were commits and none is whole.
        """
        wrong: list[str] = []
        while self.commits and (damage := self._damage(self.commits[-1])):
            commit = self.commits.pop()
            self._forgotten.add(commit.folder)
            wrong.append(f"the commit after {commit.reached} is damaged: {damage}")
        if wrong and not self.commits:
            raise CheckpointError(
                "no commit of this run is whole:\n  " + "\n  ".join(wrong) + "\nPut these files "
                "back from a copy, or start a new run (raytrain-opt run JOB.yaml)."
            )
        return wrong

    def _damage(self, commit: Commit) -> str | None:
        for name in (_WEIGHTS, _REST):
            path = self.folder / commit.folder / name
            try:
                found = _sha256(path)
            except OSError as error:
                return f"{path} cannot be read: {error.strerror}"
            if found != commit.sha256.get(name):
                return f"{path} is not as it was written (SHA-256 {found[:12]}…)"
        return None

    def save(
        self,
        epoch: int,
        state: HostState,
        position: dict[str, Any],
        test_accuracy: float | None,
        *,
        rounds: int = 0,
    ) -> Commit:
        """Write a commit, name it in the index, then remove what is no longer kept.

        `position` is whatever else the run goes on from: numbers, texts, lists and dicts.
        Raises CommitError when the storage refuses; earlier commits stay.
        """
        folder = _folder_name(epoch, rounds)
        sha256 = write_checkpoint(self.folder / folder, state, position)
        commit = Commit(epoch, test_accuracy, sha256, rounds)
        kept = self._kept([*self.commits, commit])
        entries = [{"folder": c.folder, **vars(c)} for c in kept]
        write_json(self.folder / "index.json", {"commits": entries})
        dropped = self._forgotten.union(c.folder for c in self.commits)
        self.commits, self._forgotten = kept, set()
        for old in dropped.difference(c.folder for c in kept):
            remove_tree(self.folder / old)
        return commit

    def _kept(self, commits: list[Commit]) -> list[Commit]:
        """The newest, and of those after whole epochs the last ones and the best."""
        epochs = [c for c in commits if not c.rounds]
        if self.section.keep != "all":
            best = _best(epochs) if self.section.keep_best else None
            epochs = [c for c in epochs if c in epochs[-self.section.keep :] or c == best]
        return [*epochs, commits[-1]] if commits[-1].rounds else epochs


def _folder_name(epoch: int, rounds: int) -> str:
    return f"epoch-{epoch:04d}" + (f"-round-{rounds:02d}" if rounds else "")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _best(commits: list[Commit]) -> Commit | None:
    """The best test accuracy; the earlier of equals; None when none was measured."""
    measured = [(c.test_accuracy, -c.epoch, c) for c in commits if c.test_accuracy is not None]
    return max(measured, key=lambda entry: entry[:2])[2] if measured else None


def write_checkpoint(folder: Path, state: HostState, position: dict[str, Any]) -> dict[str, str]:
    """One commit's files; returns the SHA-256 of each. Raises CommitError naming the path."""
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise CommitError(f"{folder} cannot be written: {error}") from error
    weights = {name: tensor.contiguous() for name, tensor in model_tensors(state).items()}
    rest = {
        "optimizer": optimizer_state_dict(state),
        "scaler": state.plain["scaler"],
        "position": position,
    }
    return {
        _WEIGHTS: _write(folder / _WEIGHTS, lambda path: save_file(weights, path)),
        _REST: _write(folder / _REST, lambda path: torch.save(rest, path)),
    }


def _write(path: Path, write: Callable[[Path], None]) -> str:
    found: list[str] = []

    def write_and_hash(temporary: Path) -> None:
        write(temporary)
        found.append(_sha256(temporary))

    write_atomic(path, write_and_hash)
    return found[0]


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The model's tensors, for `model.load_state_dict`. Raises CheckpointError."""
    try:
        return load_file(folder / _WEIGHTS)
    except Exception as error:
        raise _unreadable(folder / _WEIGHTS, error) from error


def read_rest(folder: Path) -> dict[str, Any]:
    """Optimiser, scaler and position; executes no code from the file. Raises CheckpointError."""
    file = folder / _REST
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
        raise _unreadable(folder / _REST, error) from error
    return state, rest["position"]


def read_index(folder: Path) -> list[Commit]:
    """The commits of a run's checkpoint folder, oldest first; none without an index.

    Raises CheckpointError when the index is no index.
    """
    path = folder / "index.json"
    if not path.exists():
        return []
    try:
        return _INDEX.validate_json(path.read_bytes()).commits
    except (OSError, ValidationError) as error:
        raise CheckpointError(
            f"{path} is damaged, so that nobody knows which commits are whole: {_why(error)}\n"
            "Put it back from a copy, or start a new run (raytrain-opt run JOB.yaml). The weights "
            "in the folders beside it may still be good: they are plain safetensors."
        ) from error


def _why(error: OSError | ValidationError) -> str:
    if isinstance(error, OSError):
        return str(error.strerror)
    found = error.errors(include_url=False)
    return "; ".join(": ".join([*map(str, at["loc"]), at["msg"]]) for at in found)


def _unreadable(file: Path, why: object) -> CheckpointError:
    text = f"{type(why).__name__}: {why}" if isinstance(why, Exception) else why
    return CheckpointError(
        f"{file} is damaged, or was not written by this package; no code in it was run: {text}"
    )
