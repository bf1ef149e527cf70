"""Data that are missing, damaged or elsewhere: reported in one message, before Ray starts.

What each kind of data refuses is in tests/unit/data.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support.cli_errors import LINEAR, command_error, write_job

pytestmark = pytest.mark.usefixtures("no_ray")


@pytest.mark.parametrize(
    ("changes", "place", "words"),
    [
        ({"train": ["no.npy", "y.npy"]}, "data.train.0", "no such file or folder on this machine"),
        ({"train": ["x.npy", "folder"]}, "data.train.1", "folder"),
        ({"test": ["x.npy", "x.npy"]}, "data.test.1", "labels must be"),
        ({"train": ["x.npy", "large.npy"]}, "data.train.1", "no sample of class 3, 4,"),
    ],
)
def test_a_problem_of_the_data_names_field_and_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, list[str]],
    place: str,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save(tmp_path / "x.npy", np.zeros((40, 4), np.float32))
    np.save(tmp_path / "y.npy", np.arange(40) % 3)
    np.save(tmp_path / "large.npy", np.array([10**13, *[0, 1, 2] * 13]))
    (tmp_path / "folder").mkdir()
    pair = ["x.npy", "y.npy"]
    data = json.dumps({"name": "arrays", "train": pair, "test": pair, **changes})
    message = command_error("run", write_job(tmp_path, LINEAR, f"data: {data}"))
    assert message.split("\n")[-1].strip().startswith(f"{place}: ")
    assert words in message


def test_uris_of_data_are_refused(tmp_path: Path) -> None:
    data = "data: {name: image_folder, root: 's3://bucket/images'}"
    message = command_error("run", write_job(tmp_path, data))
    assert "data.root: must be a path in the file system of every node, not a URI" in message


def test_every_class_is_decoded_once_before_the_run(tmp_path: Path) -> None:
    for name in ("train/a/0.png", "train/b/0.png", "val/a/0.png", "val/b/broken.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 40)).save(tmp_path / name)
    (tmp_path / "val/b/broken.png").write_bytes(b"no image")
    data = f"data: {{name: image_folder, root: '{tmp_path}', image_size: 32}}"
    message = command_error("run", write_job(tmp_path, "model: resnet8", data))
    assert message.split("\n")[-1].strip().startswith("data.root: ")
    assert "broken.png (class b) cannot be read" in message
