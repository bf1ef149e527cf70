"""A folder of data as users have them becomes a job that can be trained."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from PIL import Image

from raytrain_opt.commands.init import Facts, choose, init, job_text
from raytrain_opt.config.data import ImageFolderData
from raytrain_opt.config.load import load_job, parse_job
from raytrain_opt.config.schema import Job
from raytrain_opt.data.base import DataInfo
from raytrain_opt.errors import DataError
from raytrain_opt.execution.check import check_job, try_job


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "job.yaml"


def write_image(path: Path, size: int = 20, mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(len(str(path))).integers(0, 256, (size, size + 4, 3), np.uint8)
    image = Image.fromarray(pixels)
    (image.convert("L") if mode == "I;16" else image).convert(mode).save(path)


def write_classes(folder: Path, mode: str = "RGB", /, **counts: int) -> None:
    for name, count in counts.items():
        for i in range(count):
            write_image(folder / name / f"{i}.png", mode=mode)


def initialize(folder: Path, output: Path) -> tuple[Job, str]:
    """Return the job that was written, which has passed the checks before a run, and the table."""
    lines: list[str] = []
    init(folder, output, lambda line: lines.append(str(line)))
    job = load_job(output)
    assert check_job(job) == []
    try_job(job)
    return job, "\n".join(lines)


def rows_of(job: Job) -> list[dict[str, str]]:
    section = cast(ImageFolderData, job.data)
    with open(str(section.labels), newline="") as file:
        return list(csv.DictReader(file))


def test_folders_of_classes_get_a_test_set_and_a_list_of_what_is_unusual(
    tmp_path: Path, output: Path
) -> None:
    folder = tmp_path / "my photos"
    write_classes(folder, cat=60, dog=20)
    (folder / "dog/7.png").write_bytes((folder / "dog/7.png").read_bytes()[:200])
    (folder / "notes").mkdir()
    job, table = initialize(folder, output)
    rows = rows_of(job)
    of_test = [row["label"] for row in rows if row["split"] == "test"]
    assert (len(rows), of_test.count("cat"), of_test.count("dog")) == (80, 12, 4)
    assert job.name == "my-photos"
    assert cast(ImageFolderData, job.data).on_unreadable == "skip"
    for text in (
        "64 to train on, 16 to test",
        "2: cat, dog",
        "16 to 48 samples of a class; consider data.sampler: balanced",
        "about 20 pixels on the shorter side",
        "dog/7.png (class dog) cannot be read",
        f"raytrain-opt run {output}",
    ):
        assert text in table


@pytest.mark.parametrize(
    ("train", "test"),
    [("train", "val"), ("Training", "test_images"), ("seg_train", "seg_test"), ("train", "dev")],
)
def test_split_folders_are_used_as_they_are(
    tmp_path: Path, output: Path, train: str, test: str
) -> None:
    write_classes(tmp_path / "set" / train, a=30, b=30)
    write_classes(tmp_path / "set" / test, a=2, b=3)
    job, table = initialize(tmp_path / "set", output)
    section = cast(ImageFolderData, job.data)
    assert (section.train_split, section.test_split, section.labels) == (train, test, None)
    assert "60 to train on, 5 to test" in table
    assert "sampler" not in table


def test_a_training_set_beside_unlabeled_images_is_split(tmp_path: Path, output: Path) -> None:
    write_classes(tmp_path / "set" / "train", a=20, b=20)
    write_image(tmp_path / "set" / "test" / "0.png")
    job, table = initialize(tmp_path / "set", output)
    rows = rows_of(job)
    assert len(rows) == 40
    assert rows[0]["file"] == "train/a/0.png"
    assert "folders that are not read: test" in table


def test_a_class_may_be_called_like_a_set(tmp_path: Path, output: Path) -> None:
    write_classes(tmp_path / "set", car=10, Car=10, train=10)
    for name in ("car", "Car"):  # a folder of one name in each class is no class
        write_classes(tmp_path / "set" / name, images=3)
    job, _ = initialize(tmp_path / "set", output)
    assert {row["label"] for row in rows_of(job)} == {"car", "Car", "train"}


@pytest.mark.parametrize(
    ("header", "line", "split"),
    [
        ("file,label", "./images//{stem}.png, {label} ", False),
        ("\ufefffile;label", "images/{stem}.png;{label}", False),
        ('age, "file", "label"', '7, "images/{stem}.png", "{label}"', False),
        ("note, x\tfile\tlabel\tsplit", "a, b; c\timages/{stem}.png\t{label}\t{split}", True),
    ],
)
def test_a_table_of_a_flat_folder_is_read(
    tmp_path: Path, output: Path, header: str, line: str, split: bool
) -> None:
    folder = tmp_path / "set"
    lines = [header]
    for i in range(40):
        values = {"stem": f"x{i}", "label": "ab"[i % 2], "split": "train" if i < 36 else "val"}
        lines.append(line.format(**values))
        write_image(folder / "images" / f"x{i}.png")
    (folder / "labels.csv").write_text("\n".join(lines))
    rows = rows_of(initialize(folder, output)[0])
    assert {row["file"].removeprefix("./").replace("//", "/"): row["label"] for row in rows} == {
        f"images/x{i}.png": "ab"[i % 2] for i in range(40)
    }
    sets = Counter(row["split"] for row in rows)
    assert sets == ({"train": 36, "val": 4} if split else {"train": 32, "test": 8})


@pytest.mark.parametrize(
    ("header", "line", "message"),
    [
        ("image,a,b", "{path},1.0,0.0", r"meta.csv with the columns image, a, b; init reads one"),
        ("file,label", "{path}.jpg,{label}", "line 2: there is no file .*images/x0.png.jpg"),
        ("file,label", "{path},{stem}", "no class has three images"),
        ("file,label,split", "{path},{label},hold", "needs a label, and the split train, val or"),
        ("file,label", "images/x0.png,{label}", "lines 2 and 3 name one file, .*images/x0.png"),
        ("file,label", "{path},{label},", "meta.csv: line 2 has 3 values"),
        ("file,label", '"{path},{label}', "line 2 begins a quote that never ends"),
        ("file,label", "{path},a", "has no data to train on; all 40 images are of one class, a"),
    ],
)
def test_a_table_that_is_not_a_list_of_images_is_refused(
    tmp_path: Path, output: Path, header: str, line: str, message: str
) -> None:
    folder = tmp_path / "set"
    lines = [header]
    for i in range(40):
        path = f"images/x{i}.png"
        lines.append(line.format(stem=f"x{i}", path=path, label="ab"[i % 2]))
        write_image(folder / "images" / f"x{i}.png")
    (folder / "meta.csv").write_text("\n".join(lines))
    with pytest.raises(DataError, match=message):
        init(folder, output, lambda _: None)
    assert not output.exists()


def test_other_tables_and_unreadable_folders_are_named(tmp_path: Path, output: Path) -> None:
    folder = tmp_path / "set"
    write_classes(folder, a=3, b=3)
    for name in ("t.csv", "u.csv"):
        (folder / name).write_text("file,label\na/0.png,a\n")
    with pytest.raises(DataError, match=r"t\.csv with .* file, label, u\.csv; .* move other"):
        init(folder, output, lambda _: None)
    for table in folder.glob("*.csv"):
        table.unlink()
    (folder / "loop").symlink_to("loop")
    with pytest.raises(DataError, match="cannot be read: .*symbolic links"):
        init(folder, output, lambda _: None)


AB, NOT_UTF_8 = {"a": 3, "b": 3}, {"a": 3, "\udce9": 3}


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        ({}, "has no data to train on; valid are folders of images"),
        ({"": {"only": 3}}, "all 3 images are of one class, only"),
        ({"": {"a": 2, "b": 2}}, "no class has three images"),
        ({"fold1": AB, "fold2": AB}, "has several folders called a, b"),
        ({"": AB, "set": AB}, "has several folders called a, b"),
        ({"train": {"a": 2, "train": 2}, "val": {"a": 2, "val": 2}}, "them has: train, val"),
        ({"": NOT_UTF_8}, "'.*e9.* is not UTF-8"),
        ({"train": NOT_UTF_8, "test": NOT_UTF_8}, "'.*e9.* is not UTF-8"),
    ],
)
def test_classes_that_cannot_be_trained_on_are_explained(
    tmp_path: Path, output: Path, classes: dict[str, dict[str, int]], message: str
) -> None:
    for part, counts in classes.items():
        write_classes(tmp_path / "set" / part, **counts)
    refuse(tmp_path, output, message)


def refuse(folder: Path, output: Path, message: str) -> None:
    """Check that the data are refused, and that nothing is written."""
    (folder / "set").mkdir(exist_ok=True)
    with pytest.raises(DataError, match=message):
        init(folder / "set", output, lambda _: None)
    assert [path.name for path in folder.iterdir()] == ["set"]


def test_files_that_cannot_be_read_are_explained(tmp_path: Path, output: Path) -> None:
    folder = tmp_path / "set"
    write_classes(folder, "I;16", a=5, b=5)
    refuse(tmp_path, output, "no examined file can .*png .*: 16-bit or float gray image")


def test_what_is_left_out_is_said(tmp_path: Path, output: Path) -> None:
    folder = tmp_path / "set"
    write_classes(folder, a=10, b=10)
    write_classes(folder / "__MACOSX", a=3)
    write_classes(folder / "a" / ".ipynb_checkpoints", b=3)
    write_image(folder / "a" / "x.gif")
    job, table = initialize(folder, output)
    assert {row["label"] for row in rows_of(job)} == {"a", "b"}
    assert "3 files or folders are left out: 2 hidden, 1 .gif" in table


@pytest.mark.parametrize("name", ["job.yaml", "job-labels.csv"])
def test_nothing_is_overwritten(tmp_path: Path, output: Path, name: str) -> None:
    write_classes(tmp_path / "set", a=3, b=3)
    (tmp_path / name).write_text("mine")
    with pytest.raises(DataError, match=rf"{name}: exists, and init overwrites nothing"):
        init(tmp_path / "set", output, lambda _: None)
    assert (tmp_path / name).read_text() == "mine"


@pytest.mark.parametrize("gpus", [0, 1, 8])
@pytest.mark.parametrize("side", [8, 28, 64, 500])
@pytest.mark.parametrize("train", [20, 3000, 1_300_000])
def test_choices_fit_data_and_machine(train: int, side: int, gpus: int) -> None:
    info = DataInfo(2, (3, 224, 224), train, train, 0, 10, class_counts=(train - 5, 5))
    facts = Facts(info, side)
    _, size, batch, epochs = choose(facts, gpus=gpus)
    assert size <= max(64, 1.2 * side)
    assert batch <= min(train // 2, 128 * gpus or 64)
    assert 10 <= epochs <= 60
    assert choose(facts, gpus=max(1, gpus))[1] >= size
    section = {"name": "image_folder", "root": "/data"}
    assert parse_job(job_text("x", section, facts, gpus=gpus)).epochs == epochs
