"""What a CPU can show of the batch-size paper: settings, files, searches and traces."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.papers import mbso
from raytrain_opt.results import Probe

IMAGES = 8


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Write a set like Imagenette's, and the files of it."""
    root = tmp_path_factory.mktemp("root")
    random, blob, ends = np.random.default_rng(0), b"", []
    for _ in range(IMAGES):
        content = io.BytesIO()
        Image.fromarray(random.integers(0, 256, (24, 24, 3), np.uint8)).save(content, "JPEG")
        blob += content.getvalue()
        ends.append(len(blob))
    (root / "small").mkdir()
    labels = np.arange(IMAGES) % 2
    np.savez(
        root / "small" / "imagenette224_small.npz",
        train_blob=np.frombuffer(blob, np.uint8),
        train_ends=ends,
        train_y=labels,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mbso, "JPEG_FILES", IMAGES)
        yield mbso.write_jpegs(root, root / "imagenet")


@pytest.fixture(scope="module")
def probed(files: Path) -> mbso.Probed:
    return mbso.Probed(mbso.PATTERNS[3], {"root": str(files)})


def test_a_search_takes_the_published_steps(
    probed: mbso.Probed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The positive step grows by one a loop: 32, 34, 37, 41."""
    data = probed.learner.data
    monkeypatch.setattr(data, "info", replace(data.info, train_size=1000))
    monkeypatch.setattr(
        mbso.Probed, "probe", lambda _self, size, _job: Probe(size, "ok", samples_per_s=size)
    )
    probes = probed.search("epoch_time_minimize", 32, 4)
    assert [probe.batch_size for probe in probes[:4]] == [32, 34, 37, 41]
    assert mbso._shorter_pct(probes) == pytest.approx(100 * (1 - 32 / probes[-1].batch_size), 0.01)
