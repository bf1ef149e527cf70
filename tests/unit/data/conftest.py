"""A small tree of image files, as ImageNet is laid out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def image_tree(tmp_path: Path) -> Path:
    """root/train/{cat,dog}/0..9.png, root/val/{cat,dog}/0..2.png: noise of several sizes.

    dog/0.png is grayscale.
    """
    random = np.random.default_rng(0)
    for split, count in (("train", 10), ("val", 3)):
        for name in ("cat", "dog"):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                shape = (20 + i, 24) if (name, i) == ("dog", 0) else (20 + i, 24, 3)
                pixels = random.integers(0, 256, shape, dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")
    return tmp_path
