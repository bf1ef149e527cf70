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


def initialize(folder: Path, output: Path, label_column: str | None = None) -> tuple[Job, str]:
    """Return the job that was written, which has passed the checks before a run, and the table."""
    lines: list[str] = []
    init(folder, output, lambda line: lines.append(str(line)), label_column)
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


def test_a_class_may_be_called_like_a_set_and_others_differ_in_case(
    tmp_path: Path, output: Path
) -> None:
    write_classes(tmp_path / "set", car=10, Car=10, train=10)
    for name in ("car", "Car"):  # a folder of one name in each class is no class
        write_classes(tmp_path / "set" / name, images=3)
    job, table = initialize(tmp_path / "set", output)
    assert {row["label"] for row in rows_of(job)} == {"car", "Car", "train"}
    assert "some classes differ in upper and lower case only" in table


@pytest.mark.parametrize(
    ("header", "line", "split"),
    [
        ("id,Category", "{stem},{label}", False),
        ("patient_id,image_id,label,age", "p{i},{stem},{label},7", False),
        ("path,class", "{stem}.png,{label}", False),
        ("file,label", "./images//{stem}.png,{label}", False),
        ("file,label", "{folder}/images/{stem}.png,{label}", False),
        ("file,label", "images\\{stem}.png, {label} ", False),
        ("class id,filepaths,labels,data set", "3,images/{stem}.png,{label},{split}", True),
        ("Image Path;Class;Split", "images/{stem}.png;{label}; {split} ", True),
        ("age,label,image", "7,{label},images/{stem}.png", False),
        ("path,class,set", "images/{stem}.png,{label},{split}", True),
        ("path,class,fold", "images/{stem}.png,{label},{split}", True),
        ("file,label,split", "images/{stem}.png,{label},{split}", True),
        ("\ufefffile;label", "images/{stem}.png;{label}", False),
        ('"fname", "label"', '"images/{stem}.png", "{label}"', False),
        ("note, x\tfile\tlabel", "a, b; c\timages/{stem}.png\t{label}", False),
    ],
)
def test_a_table_of_a_flat_folder_is_understood(
    tmp_path: Path, output: Path, header: str, line: str, split: bool
) -> None:
    """A row whose file is missing is left out."""
    folder = tmp_path / "set"
    lines = [header]
    for i in range(41):
        split_name = ("valid", "TEST")[i % 2] if i > 35 else "Train"
        values = {"stem": f"x{i}", "label": "ab"[i % 2], "split": split_name}
        lines.append(line.format(**values, i=i, folder=folder))
        if i < 40:
            write_image(folder / "images" / f"x{i}.png")
    (folder / "labels.csv").write_text("\n".join(lines))
    job, table = initialize(folder, output)
    rows = rows_of(job)
    assert "labels.csv has the columns " in table
    assert "40 of 41 rows name an image by " in table
    assert {row["file"]: row["label"] for row in rows} == {
        f"images/x{i}.png": "ab"[i % 2] for i in range(40)
    }
    sets = Counter(row["split"] for row in rows)
    assert sets == ({"train": 36, "val": 2, "test": 2} if split else {"train": 32, "test": 8})


@pytest.mark.parametrize(
    ("header", "line", "message"),
    [
        ("image,a,b", "{path},1.0,0.0", "name the column .* may be a, b"),
        ("patient,image,dx", "p1,{path},{label}", "--label-column COLUMN, which may be patient"),
        ("file,label,class", "{path},{label},{label}", "which may be label, class"),
        ("file,label", "{path}.jpg,{label}", "no data to train on; .*0 of 40 rows name an image"),
        ("file,label", "/elsewhere/{path},{label}", "0 of 40 rows .* by file"),
        ("photo,label", "{path},{label}", "columns photo, label; 0 of 40 rows name an image"),
        ("file,label", "{path},{stem}", "no class has three images"),
        (
            "file,label,split,set",
            "{path},{label},train,test",
            "train or test, in one column, not split, set",
        ),
        ("file,label,split", "{path},{label},hold", "in one column, not split with hold"),
        ("file,label", "images/x0.png,{label}", "lines 2 and 3 name one file, .*images/x0.png"),
        ("file,label", "{path},{label},", "line 2 has 3 values.* or move the table away"),
        ("file,label", '"{path},{label}', "line 2 begins a quote that never ends"),
        ("file,label", "{path},a", "has no data to train on; all 40 images are of one class, a"),
    ],
)
def test_a_table_that_may_mean_several_things_is_refused(
    tmp_path: Path, output: Path, header: str, line: str, message: str
) -> None:
    folder = tmp_path / "set"
    lines = [header]
    for i in range(40):
        path = f"images/x{i}.png"
        lines.append(line.format(stem=f"x{i}", path=path, label="ab"[i % 2]))
        write_image(folder / "images" / f"x{i}.png")
    (folder / "meta.csv").write_text("\n".join(lines))
    with pytest.raises(DataError, match=message) as caught:
        init(folder, output, lambda _: None)
    assert "meta.csv" in str(caught.value) or "name one file" in message
    assert not output.exists()


def test_the_column_of_labels_can_be_named(tmp_path: Path, output: Path) -> None:
    folder = tmp_path / "set"
    for i in range(20):
        write_image(folder / f"x{i}.png")
    lines = [f"x{i}.png,{i},{'ab'[i % 2]}" for i in range(20)]
    (folder / "t.csv").write_text("\n".join(["file,label,diagnosis", *lines]))
    assert {row["label"] for row in rows_of(initialize(folder, output, "diagnosis")[0])} == {*"ab"}
    output.unlink()
    output.with_name("job-labels.csv").unlink()
    for wrong in ("file", "age"):
        with pytest.raises(DataError, match="which may be label, diagnosis"):
            init(folder, output, lambda _: None, wrong)
    (folder / "t.csv").unlink()
    write_classes(folder, a=3, b=3)
    with pytest.raises(DataError, match="has no data to train on"):
        init(folder, output, lambda _: None, "diagnosis")
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


def test_arrays_are_named_with_their_shapes(tmp_path: Path, output: Path) -> None:
    (tmp_path / "set").mkdir()
    np.save(tmp_path / "set" / "train_y.npy", np.zeros((4, 1)))
    refuse(tmp_path, output, r"train_y.npy is an array of shape \[4, 1\]; .*name: arrays")
    np.save(tmp_path / "set" / "train_x.npy", np.array(["a", None]))
    refuse(tmp_path, output, "set: cannot be read: .*bject")


def refuse(folder: Path, output: Path, message: str) -> None:
    """Check that the data are refused, and that nothing is written."""
    (folder / "set").mkdir(exist_ok=True)
    with pytest.raises(DataError, match=message):
        init(folder / "set", output, lambda _: None)
    assert [path.name for path in folder.iterdir()] == ["set"]


def test_files_that_cannot_be_read_are_explained(tmp_path: Path, output: Path) -> None:
    folder = tmp_path / "set"
    write_classes(folder, "I;16", a=5, b=5)
    refuse(tmp_path, output, "no examined .* a can be read; .*png .*: 16-bit or float gray image")
    for file in folder.glob("a/*"):
        write_image(file)
    for file in folder.glob("b/*"):
        file.write_bytes(b"text")
    refuse(tmp_path, output, "no examined file of class b can be read; .*/b/.*it is not an image")
    (folder / "t.csv").write_bytes(b"\xe9")
    refuse(tmp_path, output, "t.csv; line 1 is not UTF-8 text")


def test_of_several_tables_the_one_with_the_images_of_all_others_is_read(
    tmp_path: Path, output: Path
) -> None:
    folder = tmp_path / "set"
    for i in range(60):
        write_image(folder / f"x{i}.png")
    lines = [f"x{i},{'ab'[i % 2]}" for i in range(60)]
    (folder / "labels.csv").write_text("\n".join(["id,label", *lines[:40], "x41,"]))
    (folder / "a_submission.csv").write_text("\n".join(["id,label", *lines[:5]]))
    (folder / "log.csv").write_text("epoch,loss\n1,0.5\n")
    job, table = initialize(folder, output)
    assert len(rows_of(job)) == 40
    assert "log.csv has the columns epoch, loss; 0 of 1 rows name an image" in table
    output.unlink()
    output.with_name("job-labels.csv").unlink()
    for others in (lines[40:], [line.replace(",a", ",b") for line in lines[:40]]):
        (folder / "a_submission.csv").write_text("\n".join(["id,label", *others]))
        with pytest.raises(DataError, match=r"several tables .*a_submission\.csv .*labels\.csv"):
            init(folder, output, lambda _: None)


def test_a_table_selects_no_image_whose_name_others_have(tmp_path: Path, output: Path) -> None:
    folder = tmp_path / "set"
    for i in range(20):
        write_image(folder / f"x{i}.png")
        if i < 5:
            write_image(folder / "masks" / f"x{i}.png")
    lines = [f"x{i},{'ab'[i % 2]}" for i in range(20)]
    (folder / "labels.csv").write_text("\n".join(["id,label", *lines]))
    with pytest.raises(DataError, match="x0 is the name of several images; list"):
        init(folder, output, lambda _: None)
    (folder / "labels.csv").write_text(
        "\n".join(["id,label", *(line.replace(",", ".png,") for line in lines)])
    )
    rows = rows_of(initialize(folder, output)[0])  # by their paths
    assert {row["file"] for row in rows} == {f"x{i}.png" for i in range(20)}


def test_what_is_left_out_is_said(tmp_path: Path, output: Path) -> None:
    folder = tmp_path / "set"
    write_classes(folder, a=10, b=10)
    write_classes(folder / "__MACOSX", a=3)
    write_classes(folder / "a" / ".ipynb_checkpoints", b=3)
    write_image(folder / "a" / "x.gif")
    (folder / "empty").mkdir()
    job, table = initialize(folder, output)
    assert {row["label"] for row in rows_of(job)} == {"a", "b"}
    assert "3 files or folders are left out: 2 hidden, 1 .gif" in table
    assert "empty/ has no image and is not a class" in table


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
