"""Checkpoints on disk: weights as safetensors, the rest as a file that loads without pickle.

    checkpoints/epoch-0003/weights.safetensors   the model's tensors by name, and how to build it
    checkpoints/epoch-0003/rest.pt               optimizer, scaler, progress (weights_only=True)
    checkpoints/epoch-0003-round-02/             the same after 2 rounds of epoch 4
    checkpoints/epoch-0003-round-02-candidate-05/    and 5 candidates of the third one
    checkpoints/epoch-0003-round-02-candidate-05-step-000012/    and 12 steps of the next ones
    checkpoints/epoch-0003-step-000120/          the same after 120 steps of epoch 4
    checkpoints/index.json                       the complete checkpoints, oldest first

A checkpoint exists once the index names it, with the SHA-256 of its files. The index is replaced
atomically. Torch is imported late: the driver looks for checkpoints before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import MinLen
from pydantic import TypeAdapter, ValidationError

from raytrain_opt.config.schema import CheckpointSection
from raytrain_opt.errors import CheckpointError, JobError, Problem, StorageError
from raytrain_opt.recording.reader import first_error
from raytrain_opt.storage import open_plain, read_file, remove_tree, sync, write_atomic, write_json

if TYPE_CHECKING:
    from torch import Tensor

    from raytrain_opt.train.state import TrainingState

WEIGHTS, REST = "weights.safetensors", "rest.pt"


@dataclass(frozen=True)
class Point:
    """A point in a run: complete epochs, and rounds or steps of the next epoch."""

    epoch: int
    rounds: int = 0
    steps: int = 0
    candidates: int = 0  # of the next round
    candidate_steps: int = 0  # of the candidates that follow them

    @property
    def folder(self) -> str:
        """Name of its checkpoint's folder; not read from the index, which might name any path."""
        in_round = self.candidates or self.candidate_steps
        parts = (
            ("step", 6, self.steps, self.steps),
            ("round", 2, self.rounds, self.rounds or in_round),
            ("candidate", 2, self.candidates, in_round),
            ("step", 6, self.candidate_steps, self.candidate_steps),
        )
        shown = [f"-{name}-{value:0{digits}d}" for name, digits, value, is_in in parts if is_in]
        return "".join([f"epoch-{self.epoch:04d}", *shown])

    @property
    def is_partial(self) -> bool:
        return any((self.rounds, self.steps, self.candidates, self.candidate_steps))

    @property
    def text(self) -> str:
        """Its text, such as `epoch 3`, `round 2 of epoch 4`, or `step 120 of epoch 4`."""
        epoch = f"epoch {self.epoch + 1}"
        if self.steps:
            return f"step {self.steps} of {epoch}"
        if self.candidate_steps:
            first = f"candidate {self.candidates + 1} of round {self.rounds + 1} of {epoch}"
            return f"{self.candidate_steps} steps from {first}"
        if self.candidates:
            return f"candidate {self.candidates} of round {self.rounds + 1} of {epoch}"
        return f"round {self.rounds} of {epoch}" if self.rounds else f"epoch {self.epoch}"


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Point):
    """One entry of the index: its point in the run, and its files."""

    score: float | None  # on the test split, higher is better
    sha256: dict[str, str]  # by file name, hexadecimal


@dataclass(frozen=True)
class _Index:
    """The content of index.json; other keys are ignored: under a URI there is `writer`."""

    checkpoints: Annotated[list[Checkpoint], MinLen(1)]  # it is written with the first one


_INDEX = TypeAdapter(_Index)


class Checkpoints:
    """The checkpoints of one run; removes those that the job does not keep."""

    def __init__(self, folder: Path, section: CheckpointSection) -> None:
        """Read the index of a checkpoint folder, if there is one. Raises CheckpointError."""
        self.folder, self.section = folder, section
        self.saved = read_index(folder)
        self.metadata: dict[str, str] = {}  # of the weights' files (`train.trained_model`)
        self._damaged_folders: set[str] = set()

    @property
    def latest(self) -> Checkpoint | None:
        return self.saved[-1] if self.saved else None

    def drop_damaged(self) -> list[str]:
        """Drop damaged checkpoints from the end; return messages, or raise CheckpointError."""
        messages: list[str] = []
        while self.saved and (damage := find_damage(self.folder, self.saved[-1])):
            checkpoint = self.saved.pop()
            self._damaged_folders.add(checkpoint.folder)
            messages.append(f"the checkpoint after {checkpoint.text} is damaged: {damage}")
        if messages and not self.saved:
            raise CheckpointError(
                "all checkpoints of this run are damaged:\n  "
                + "\n  ".join(messages)
                + "\nRestore these files from a backup, or start a new run "
                "(raytrain-opt run JOB.yaml)."
            )
        return messages

    def remove_orphans(self) -> None:
        """Remove checkpoints that the index does not name, if any: a run was killed meanwhile."""
        known = self._damaged_folders.union(checkpoint.folder for checkpoint in self.saved)
        for folder in self.folder.glob("epoch-*") if self.saved else ():
            if folder.name not in known:
                remove_tree(folder)

    def save(
        self,
        point: Point,
        state: TrainingState,
        progress: dict[str, Any],
        score: float | None,
        candidates: Mapping[int, TrainingState] | None = None,
    ) -> Checkpoint:
        """Write a checkpoint, add it to the index, then remove checkpoints no longer kept.

        `progress`: numbers, text, lists and dicts that a resume needs. `candidates`: states of a
        round in progress, by index. Raises StorageError.
        """
        folder = self.folder / point.folder
        sha256 = write_checkpoint(folder, state, progress, self.metadata, candidates or {})
        checkpoint = Checkpoint(score=score, sha256=sha256, **vars(point))
        kept = self._select_kept([*self.saved, checkpoint])
        entries = [{"folder": c.folder, **vars(c)} for c in kept]
        write_json(self.folder / "index.json", {"checkpoints": entries})
        folders = self._damaged_folders.union(c.folder for c in self.saved)
        self.saved, self._damaged_folders = kept, set()
        for name in folders.difference(c.folder for c in kept):
            remove_tree(self.folder / name)
        return checkpoint

    def _select_kept(self, checkpoints: list[Checkpoint]) -> list[Checkpoint]:
        """Select the newest checkpoint, and the last and best ones at the end of an epoch."""
        epochs = [c for c in checkpoints if not c.is_partial]
        if self.section.keep != "all":
            kept = [*epochs[-self.section.keep :], best_of(epochs)]
            epochs = [c for c in epochs if c in kept]
        return [*epochs, checkpoints[-1]] if checkpoints[-1].is_partial else epochs


def best_of(checkpoints: Sequence[Checkpoint]) -> Checkpoint | None:
    """Return the first of those with the best metric."""
    scored = [(c.score, -c.epoch, c) for c in checkpoints if c.score is not None]
    return max(scored, key=lambda entry: entry[:2])[2] if scored else None


def find_damage(
    folder: Path, checkpoint: Checkpoint, names: Sequence[str] = (WEIGHTS, REST)
) -> str | None:
    """Return which of these files is missing or differs from its digest."""
    for name in names:
        path = folder / checkpoint.folder / name
        try:
            digest = _sha256(path)
        except OSError as error:
            return f"{path} cannot be read: {error.strerror}"
        if digest != checkpoint.sha256.get(name):
            return f"{path} was changed after it was written (SHA-256 {digest[:12]}…)"
    return None


def _sha256(path: Path) -> str:
    with open(path, "rb", opener=open_plain) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_checkpoint(
    folder: Path,
    state: TrainingState,
    progress: dict[str, Any],
    metadata: Mapping[str, str] | None = None,
    candidates: Mapping[int, TrainingState] | None = None,
) -> dict[str, str]:
    """Write the files of a checkpoint; return the SHA-256 of each.

    Raises StorageError, and JobError if an optimizer of one's own could not be read back.
    """
    import torch
    from safetensors.torch import save_file

    from raytrain_opt.train.state import model_tensors

    try:
        folder.mkdir(exist_ok=True)
        sync(folder.parent)  # before the index names it
    except OSError as error:
        raise StorageError(f"{folder} cannot be written: {error}") from error
    require_readable(state)
    weights = {name: tensor.contiguous() for name, tensor in model_tensors(state).items()}
    # One entry at most: safetensors writes several in random order, so that digests would differ.
    texts = dict(metadata or {})
    assert len(texts) <= 1
    rest = {
        **_rest_of(state),
        "progress": progress,
        "candidates": {
            index: {"weights": model_tensors(one), **_rest_of(one)}
            for index, one in (candidates or {}).items()
        },
    }
    return {
        WEIGHTS: _write(folder / WEIGHTS, lambda path: save_file(weights, path, texts)),
        REST: _write(folder / REST, lambda path: torch.save(rest, path)),
    }


def _rest_of(state: TrainingState) -> dict[str, Any]:
    from raytrain_opt.train.state import optimizer_state_dict

    return {
        "optimizer": optimizer_state_dict(state),
        "optimizer_index": state.optimizer_index,
        "scaler": state.scaler,
    }


def _to_state(weights: Mapping[str, Tensor], rest: Mapping[str, Any]) -> TrainingState:
    from raytrain_opt.train.state import to_cpu_state

    optimizer, index = rest["optimizer"], rest["optimizer_index"]
    return to_cpu_state(weights, optimizer, rest["scaler"], copy=False, optimizer_index=index)


def require_readable(state: TrainingState) -> None:
    """Raise JobError if an optimizer of one's own could not be read back from a checkpoint."""
    import torch

    plain, hint = BytesIO(), "keep tensors, numbers, texts, lists and dicts there"
    rule = "its groups or state hold {}, which a resume could not read"
    try:
        torch.save((state.param_groups, state.optimizer_state), plain)
    except Exception as error:  # whatever an object raises that cannot be pickled
        rule = rule.format(f"what cannot be saved ({error})")
        raise JobError([Problem("optimizer.name", rule, hint=hint)]) from error
    plain.seek(0)
    if unsafe := torch.serialization.get_unsafe_globals_in_checkpoint(plain):
        rule = rule.format(", ".join(unsafe))
        raise JobError([Problem("optimizer.name", rule, hint=hint)])


def _write(path: Path, write: Callable[[Path], None]) -> str:
    digests: list[str] = []

    def write_and_hash(temporary: Path) -> None:
        write(temporary)
        digests.append(_sha256(temporary))

    write_atomic(path, write_and_hash)
    return digests[0]


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read the model's tensors, for `model.load_state_dict`. Raises CheckpointError."""
    from safetensors.torch import load_file

    with _readable(folder / WEIGHTS) as path:
        return load_file(path)


def read_metadata(folder: Path) -> dict[str, str]:
    """Read the texts that were saved with the model's tensors. Raises CheckpointError."""
    from safetensors import safe_open

    with _readable(folder / WEIGHTS) as path, safe_open(path, "pt") as file:
        return file.metadata() or {}


def read_checkpoint(
    folder: Path,
) -> tuple[TrainingState, dict[str, Any], dict[int, TrainingState]]:
    """Read state, progress, and states of candidates of a round in progress, by index.

    Executes no code in them. Raises CheckpointError.
    """
    import torch

    weights = read_weights(folder)
    with _readable(folder / REST) as path:
        rest = torch.load(path, weights_only=True)
        candidates = {i: _to_state(one["weights"], one) for i, one in rest["candidates"].items()}
        return _to_state(weights, rest), rest["progress"], candidates


def read_index(folder: Path) -> list[Checkpoint]:
    """Read the checkpoints of the index, oldest first; none without. Raises CheckpointError."""
    path = folder / "index.json"
    try:
        return _INDEX.validate_json(read_file(path)).checkpoints
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValidationError) as error:
        cause = first_error(error) if isinstance(error, ValidationError) else error
        raise CheckpointError(
            f"{path} is damaged, so the complete checkpoints cannot be identified: {cause}\n"
            "Restore it from a backup, or start a new run (raytrain-opt run JOB.yaml)."
        ) from error


@contextmanager
def _readable(file: Path) -> Iterator[Path]:
    """Raise CheckpointError for a file that cannot be read: damage can look like anything."""
    try:
        yield file
    except Exception as error:
        raise CheckpointError(
            f"{file} is damaged, or was not written by this package; no code in it was run: "
            f"{type(error).__name__}: {error}"
        ) from error
