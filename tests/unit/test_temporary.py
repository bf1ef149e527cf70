"""Temporary folders are private, and the next process removes those of a killed one."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from raytrain_opt.temporary import TemporaryFolder, remove_abandoned

KILLED = """
import os, sys
from raytrain_opt.temporary import TemporaryFolder
folder = TemporaryFolder()
(folder.path / "sub").mkdir()
if sys.argv[1] == "keep":
    folder.keep()
print(folder.path, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("RAY_TMPDIR", raising=False)


@pytest.mark.parametrize(("choice", "stays"), [("leave", False), ("keep", True)])
def test_the_folder_of_a_killed_process_is_removed_unless_it_is_kept(
    choice: str, stays: bool
) -> None:
    command = [sys.executable, "-c", KILLED, choice]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    remove_abandoned()
    assert Path(done.stdout.strip()).exists() == stays


def test_a_folder_is_private_and_stays_while_its_process_lives() -> None:
    folder = TemporaryFolder()
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    remove_abandoned()
    assert folder.path.exists()
    folder.remove()
    assert not folder.path.exists()


def test_a_link_and_a_folder_without_owner_are_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / ".owner").touch()
    (tmp_path / "rto-link").symlink_to(target)
    (tmp_path / "rto-other").mkdir()
    remove_abandoned()
    assert (target / ".owner").exists()
    assert (tmp_path / "rto-other").exists()
