"""What a run that is resumed finds out before Ray is started."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from small_jobs import small_job
from torch import nn

from raytrain_opt import start
from raytrain_opt.errors import CommitError
from raytrain_opt.paths import RunPaths
from raytrain_opt.start import open_session
from raytrain_opt.train.checkpoint import Checkpoints
from raytrain_opt.train.state import capture


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with three commits."""
    model = nn.Linear(3, 2)
    optimizer, scaler = torch.optim.SGD(model.parameters()), torch.amp.GradScaler("cpu")
    state = capture(model, optimizer, scaler, copy=True)
    run = RunPaths.create(str(tmp_path), "test")
    commits = Checkpoints(run.checkpoints, small_job(tmp_path).checkpoint)
    commits.save(1, state, {}, 0.5)
    commits.save(2, state, {}, 0.6)
    commits.save(2, state, {}, None, rounds=1)
    return run.local


@pytest.fixture
def ray_sessions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Put in place of Ray; a line for each time that it was started."""
    started: list[str] = []

    @contextmanager
    def session(address: object, verbose: bool) -> Iterator[bool]:
        started.append("started")
        yield True

    monkeypatch.setattr(start, "ray_session", session)
    return started


def opened(run_dir: Path) -> Checkpoints:
    job = small_job(run_dir.parent)
    with open_session(
        job, address=None, verbose=False, began_s=0.0, resume=str(run_dir)
    ) as session:
        return session.checkpoints


def test_damaged_commits_are_named_and_the_one_before_them_is_used(
    run_dir: Path, ray_sessions: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = run_dir / "checkpoints"
    (checkpoints / "epoch-0002-round-01" / "rest.pt").unlink()
    (checkpoints / "epoch-0002" / "weights.safetensors").write_bytes(b"half")
    latest = opened(run_dir).latest
    assert latest is not None
    assert latest.reached == "epoch 1"
    told = capsys.readouterr().out
    assert f"going on with {run_dir}" in told
    assert "the commit after round 1 of epoch 3 is damaged" in told
    assert "rest.pt cannot be read: No such file" in told
    assert "the commit after epoch 2 is damaged" in told
    assert told.count("the one before is used") == 2


@pytest.mark.parametrize("damaged", ["index.json", "*/rest.pt"])
def test_without_a_whole_commit_nothing_is_started(
    run_dir: Path, ray_sessions: list[str], damaged: str
) -> None:
    for file in (run_dir / "checkpoints").glob(damaged):
        file.write_bytes(b"{")
    with pytest.raises(CommitError, match=r"(?s)(index\.json is|rest\.pt is not as).*new run"):
        opened(run_dir)
    assert ray_sessions == []
