"""The order of what is queued on streams that only note it. tests/gpu copies on real ones."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from raytrain_opt.data.transforms import CopyStream

CUDA = torch.device("cuda")


class FakeTensor:
    def __init__(self, log: list[str]) -> None:
        self._log = log

    def pin_memory(self) -> FakeTensor:
        self._log.append("pin")
        return self

    def to(self, device: torch.device, non_blocking: bool) -> FakeTensor:
        assert (device, non_blocking) == (CUDA, True)
        self._log.append("copy")
        return self

    def record_stream(self, stream: FakeStream) -> None:
        self._log.append(f"used by {stream.name}")


class FakeStream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def wait_stream(self, other: FakeStream) -> None:
        self._log.append(f"{self.name} waits for {other.name}")


def test_the_training_stream_waits_for_the_copies_and_keeps_their_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []

    def enter(stream: FakeStream) -> Any:
        log.append(f"on {stream.name}")
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "Stream", lambda _: FakeStream("copies", log))
    monkeypatch.setattr(torch.cuda, "stream", enter)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: FakeStream("training", log))
    x, y = FakeTensor(log), FakeTensor(log)
    assert CopyStream(CUDA).copy(x, y) == [x, y]  # type: ignore[arg-type]
    assert log == [
        "on copies",
        *["pin", "copy"] * 2,
        "training waits for copies",
        *["used by training"] * 2,
    ]
