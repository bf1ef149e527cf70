"""A disk that loses power: what it holds then, for every choice that a file system may make.

The order of system calls is recorded; a crash after any of them keeps what was synced, and of the
rest nothing, everything, or any single change. (POSIX promises no order of unsynced changes.)
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from raytrain_opt import storage
from raytrain_opt.train import checkpoint


@dataclass(frozen=True)
class Change:
    """A change of a directory's list of names: `name` gets the file, or is removed (None)."""

    directory: Path
    name: str
    file: int | None
    removed: str | None = None  # the old name of a renamed file


@dataclass
class LossyDisk:
    """What is on the disk below `root`, and what is still on its way there.

    Files have numbers, as inodes; a directory is a file without content.
    """

    root: Path
    content: dict[int, bytes] = field(default_factory=dict)
    names: dict[Path, int] = field(default_factory=dict)
    pending: list[Change] = field(default_factory=list)
    crashes: list[tuple[int, dict[Path, bytes]]] = field(default_factory=list)
    reported: int = 0  # what the program has reported as saved
    _files: dict[Path, int] = field(default_factory=dict)  # as the program sees them

    def record(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Record all changes that the package makes from now on."""

        def after(owner: Any, name: str, note: Callable[..., None]) -> None:
            real = getattr(owner, name)

            def call(*arguments: Any, **options: Any) -> Any:
                result = real(*arguments, **options)
                note(*arguments)
                self._crash()
                return result

            monkeypatch.setattr(owner, name, call)

        after(Path, "touch", self._add)
        after(Path, "mkdir", self._add)
        after(Path, "replace", self._rename)
        after(shutil, "rmtree", lambda path, **_: self._remove(path))
        for module in (storage, checkpoint):
            after(module, "sync", self._sync)

    def _add(self, path: Path) -> None:
        if path not in self._files:
            self._files[path] = number = len(self.content)
            self.content[number] = b""
            self.pending.append(Change(path.parent, path.name, number))

    def _rename(self, path: Path, target: Path) -> None:
        self._files[target] = number = self._files.pop(path)
        self.pending.append(Change(path.parent, target.name, number, path.name))

    def _remove(self, path: Path) -> None:
        for known in [p for p in self._files if p == path or path in p.parents]:
            del self._files[known]
        self.pending.append(Change(path.parent, path.name, None))

    def _sync(self, path: Path) -> None:
        if path.is_file():
            self.content[self._files[path]] = path.read_bytes()
            return
        for change in [c for c in self.pending if c.directory == path]:
            _apply(self.names, change)
            self.pending.remove(change)

    def _crash(self) -> None:
        """Note what the disk would hold if the power failed now."""
        choices = [[], self.pending, *([change] for change in self.pending)]
        for kept in choices:
            names = dict(self.names)
            for change in kept:
                _apply(names, change)
            files = {path: self.content[number] for path, number in names.items()}
            self.crashes.append((self.reported, files))

    def restored(self, folder: Path) -> Iterator[tuple[int, Path]]:
        """Yield for each different crash what was reported, and a copy of the disk in `folder`."""
        seen = set()
        for number, (reported, files) in enumerate(self.crashes):
            key = (reported, frozenset(files.items()))
            if key in seen:
                continue
            seen.add(key)
            root = folder / str(number)
            root.mkdir()
            for path, content in sorted(files.items()):
                target = root / path.relative_to(self.root)
                if path.suffix and target.parent.is_dir():
                    target.write_bytes(content)
                elif target.parent.is_dir():
                    target.mkdir()
            yield reported, root


def _apply(names: dict[Path, int], change: Change) -> None:
    path = change.directory / change.name
    if change.removed is not None:
        names.pop(change.directory / change.removed, None)
    if change.file is not None:
        names[path] = change.file
        return
    for known in [p for p in names if p == path or path in p.parents]:
        del names[known]
