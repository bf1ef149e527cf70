"""Samples read one at a time: equal batches with any number of loader processes, and errors."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, TensorDataset, random_split
from torchvision.datasets import ImageFolder

from raytrain_opt.config.data import DatasetData, HoldOut, ImageFolderData
from raytrain_opt.data import load_shared_data, open_data
from raytrain_opt.data.base import Batch
from raytrain_opt.data.image_folder import ImageFolderSource, list_folder
from raytrain_opt.data.loader import DataLoaderData
from raytrain_opt.data.user_datasets import UserDatasetSource
from raytrain_opt.errors import DataError

CPU = torch.device("cpu")
Section = ImageFolderData | DatasetData


def new_data(
    section: Section, seed: int = 0, channels_last: bool = True, hold_out: HoldOut | None = None
) -> DataLoaderData:
    """Hold out a tenth unless the section or `hold_out` says otherwise."""
    fraction = 0.1 if section.validation_fraction is None else section.validation_fraction
    data = open_data(
        section,
        None,
        hold_out=hold_out or HoldOut(fraction),
        seed=seed,
        device=CPU,
        channels_last=channels_last,
    )
    assert isinstance(data, DataLoaderData)
    return data


@contextmanager
def open_section(
    section: Section, seed: int = 0, channels_last: bool = True, hold_out: HoldOut | None = None
) -> Iterator[DataLoaderData]:
    data = new_data(section, seed, channels_last, hold_out)
    try:
        yield data
    finally:
        data.close()


def read_epoch(
    data: DataLoaderData, number: int = 0, num_micro_batches: int = 1, size: int = 4
) -> list[Batch]:
    steps = range(data.info.steps_per_epoch(size))
    return list(
        data.train_batches(
            number, product(steps, range(num_micro_batches)), num_micro_batches, size
        )
    )


def concatenate(batches: list[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([b.x for b in batches]), torch.cat([b.y for b in batches])


def read_all(data: DataLoaderData) -> None:
    read_epoch(data)
    for split in ("validation", "test"):
        if split == "test" or data.info.validation_size:
            list(data.eval_batches(split, 0, 1, 2))  # type: ignore[arg-type]


def folder_section(root: Path, **fields: Any) -> ImageFolderData:
    fields = {"image_size": 8, "loader_workers": 0, "normalize": "none", **fields}
    return ImageFolderData(name="image_folder", root=str(root), **fields)


class Noisy(Dataset[Any]):
    """Sample i: x = [i, a number from each generator], label i; `broken` samples raise."""

    classes = tuple(range(30))

    def __init__(self, size: int = 26, broken: tuple[int, ...] = ()) -> None:
        self._size = size
        self._broken = broken

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index in self._broken:
            raise OSError(f"disk block {index} is bad")
        draws = (torch.rand(()).item(), float(np.random.rand()), random.random())
        return torch.tensor([index, *draws]), index


def noisy(train_broken: tuple[int, ...] = (), test_broken: tuple[int, ...] = ()) -> Any:
    return Noisy(26, train_broken), Noisy(7, test_broken)


def dataset_section(function: Callable[..., Any] = noisy, **fields: Any) -> DatasetData:
    return DatasetData(name=function, **{"loader_workers": 0, **fields})


# --- The same samples for any reader -------------------------------------------------------------


def test_loader_processes_change_no_bit(image_tree: Path) -> None:
    one, two = (folder_section(image_tree, loader_workers=workers) for workers in (0, 2))
    with open_section(one) as single, open_section(two) as parallel:
        for number in (0, 1):
            for a, b in zip(
                concatenate(read_epoch(single, number)),
                concatenate(read_epoch(parallel, number, 2)),
                strict=True,
            ):
                assert torch.equal(a, b)


def test_random_numbers_differ_by_epoch_seed_and_sample() -> None:
    with open_section(dataset_section()) as data, open_section(dataset_section(), seed=1) as other:
        runs = [
            concatenate(read_epoch(data, 0)),
            concatenate(read_epoch(data, 1)),
            concatenate(read_epoch(other, 0)),
        ]
    drawn = [{int(y): tuple(x[1:].tolist()) for x, y in zip(*run, strict=True)} for run in runs]
    assert len(set(drawn[0].values())) == len(drawn[0])
    for run in drawn[1:]:
        assert all(run[y] != drawn[0][y] for y in run.keys() & drawn[0].keys())


def test_the_callers_random_state_is_preserved() -> None:
    def states() -> list[Any]:
        return [
            torch.get_rng_state().tolist(),
            random.getstate(),
            np.random.get_state()[1].tolist(),
        ]

    for workers in (0, 1):
        before = states()
        with open_section(dataset_section(loader_workers=workers)) as data:
            read_epoch(data)
            list(data.eval_batches("test", 0, 1, 4))
        assert states() == before


def test_phases_can_be_left_early_and_repeated() -> None:
    with open_section(dataset_section(loader_workers=2)) as data:
        first = concatenate(read_epoch(data))
        for _ in range(3):
            next(
                data.train_batches(1, product(range(6), range(1)), 1, 4)
            )  # the remaining batches are never read
            next(data.eval_batches("test", 0, 1, 2))
        again = concatenate(read_epoch(data))
    assert torch.equal(first[0], again[0])


class ProcessNumbers(Noisy):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([os.getpid(), torch.get_num_threads()]), index


def process_numbers() -> Any:
    return ProcessNumbers(26), ProcessNumbers(8)


class Slow(ProcessNumbers):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.01)
        return super().__getitem__(index)


def slow() -> Any:
    return Slow(26), Slow(8)


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker:UserWarning")
@pytest.mark.parametrize(
    ("workers", "train_s", "expected"), [("auto", 0.002, 3), (2, 0.002, 2), ("auto", 0.03, 2)]
)
def test_loader_processes_are_added_until_they_keep_up_within_the_threads(
    workers: Any, train_s: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    with open_section(dataset_section(slow, loader_workers=workers)) as data:
        pids: list[set[int]] = []
        for number in range(3):
            pids.append(set())
            for batch in data.train_batches(number, product(range(12), range(1)), 1, 2):
                pids[-1].update(batch.x[:, 0].tolist())
                time.sleep(train_s)
    assert [len(p) for p in pids] == [2, expected, expected]
    assert pids[1] == pids[2]


def test_loader_processes_use_one_thread_get_no_signals_of_the_group_and_end_with_close() -> None:
    with open_section(dataset_section(process_numbers, loader_workers=1)) as data:
        [[pid, threads]] = concatenate(read_epoch(data))[0].unique(dim=0).int().tolist()
        assert threads == 1
        assert os.getpgid(pid) == pid != os.getpgid(0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_batches_of_an_earlier_phase_cannot_be_read() -> None:
    with open_section(dataset_section(loader_workers=1)) as data:
        first = data.train_batches(0, product(range(6), range(1)), 1, 4)
        next(first)
        next(data.eval_batches("test", 0, 1, 2))
        with pytest.raises(RuntimeError, match="earlier phase were read in a later one"):
            next(first)
        assert len(read_epoch(data)) == 6


def test_a_loader_process_that_dies_is_reported_and_replaced() -> None:
    def phases() -> int:
        with open_section(dataset_section(process_numbers, loader_workers=1)) as data:
            batches = data.train_batches(0, product(range(6), range(1)), 1, 4)
            os.kill(int(next(batches).x[0, 0]), signal.SIGKILL)
            with pytest.raises(DataError, match=r"data\.loader_workers: .*try fewer \(now 1\)"):
                list(batches)
            return len(read_epoch(data))

    # As in a Ray worker, where the loop is not the main thread: there torch has a signal
    # handler of its own, which raises wherever the main thread happens to be.
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(phases).result() == 6
    finally:
        signal.signal(signal.SIGCHLD, handler)


def test_a_function_that_generates_data_generates_the_same_every_time() -> None:
    def generated() -> Any:
        x, y = torch.rand(20, 3), torch.randint(0, 2, (20,))
        both = torch.utils.data.TensorDataset(x, y)
        return both, both

    runs = []
    for _ in range(2):
        torch.rand(1)
        with open_section(dataset_section(generated, num_classes=2)) as data:
            runs.append(concatenate(read_epoch(data))[0])
    assert torch.equal(runs[0], runs[1])


# --- Image folders -------------------------------------------------------------------------------


def test_training_images_may_be_the_center(image_tree: Path) -> None:
    for random_crop in (True, False):
        files = ImageFolderSource(folder_section(image_tree, random_crop=random_crop))
        x, center = (files.read("train", 0, augment)[0] for augment in (True, False))
        assert torch.equal(x, center) != random_crop


def test_files_are_those_of_torchvisions_image_folder(image_tree: Path) -> None:
    """Also with a folder in a class, a class that is a link, and a name that is not UTF-8."""
    train = image_tree / "train"
    (train / "cat" / "more").mkdir()
    for target in (train / "cat" / "more" / "0.JPEG", train / "cat" / os.fsdecode(b"caf\xe9.png")):
        target.write_bytes((train / "cat" / "0.png").read_bytes())
    (train / "cat" / "notes.txt").write_text("no image")
    shutil.copytree(train / "dog", image_tree / "elsewhere")
    (train / "lynx").symlink_to("../elsewhere")
    expected, files = ImageFolder(train), list_folder(train, Counter(), {})
    assert files.classes == expected.classes
    assert [files[i] for i in range(len(files))] == expected.samples


def test_what_is_no_image_of_a_class_is_left_out_and_said(image_tree: Path) -> None:
    before, cat = len(list_folder(image_tree / "train", Counter(), {})), image_tree / "train/cat"
    for folder in (".ipynb_checkpoints", "@eaDir", "__MACOSX"):
        shutil.copytree(image_tree / "train/dog", cat / folder)
        shutil.copytree(image_tree / "train/dog", image_tree / "train" / folder)
    for name in ("._0.png", ".hidden.png", "a.gif", "b.GIF", "c.jfif", "notes", "../beside.png"):
        shutil.copy(cat / "0.png", cat / name)
    for name, target in {"self": ".", "up": "..", "dog": "../dog", "all": "/"}.items():
        (cat / name).symlink_to(target)
    os.mkfifo(cat / "fifo.png")
    source = ImageFolderSource(folder_section(image_tree))
    assert source.size("train") == before
    assert source.class_names == ("cat", "dog")
    [note] = source.notes
    assert note.startswith(
        "18 files or folders are left out: 8 hidden, 4 link to a folder, 2 .gif"
    )
    for kind in ("1 .jfif", "1 no suffix", "1 no plain file", "1 beside the folders of classes"):
        assert kind in note


@pytest.mark.parametrize(
    ("link", "target"),
    [
        ("train/lynx", "cat"),
        ("train/all", ".."),
        ("train/self", "."),
        ("train/cat/twice.png", "0.png"),
        ("train/cat/other.png", "../dog/1.png"),
        ("train/cat/tested.png", "../../val/dog/1.png"),
    ],
)
def test_a_file_with_two_classes_or_in_two_sets_is_refused(
    image_tree: Path, link: str, target: str
) -> None:
    (image_tree / link).symlink_to(target)
    for split in ("train", "val"):  # the class exists in both sets
        (image_tree / split / Path(link).parts[1]).mkdir(exist_ok=True)
    if len(Path(link).parts) == 2:
        shutil.copytree(
            image_tree / "val/cat", image_tree / "val" / Path(link).name, dirs_exist_ok=True
        )
    with pytest.raises(DataError, match=rf"{image_tree}.* and {image_tree}.* are one file"):
        new_data(folder_section(image_tree))


def test_links_to_files_elsewhere_are_samples_and_broken_ones_are_named(image_tree: Path) -> None:
    (image_tree / "pool").mkdir()
    for file in sorted((image_tree / "train/cat").iterdir()):
        file.rename(image_tree / "pool" / file.name)
        file.symlink_to(image_tree / "pool" / file.name)
    with open_section(folder_section(image_tree)) as data:
        assert data.info.train_size == 18
        (image_tree / "pool/0.png").unlink()
    assert ImageFolderSource(folder_section(image_tree)).size("train") == 20
    with (
        open_section(folder_section(image_tree, validation_fraction=0)) as data,
        pytest.raises(DataError, match=r"cat/0\.png .*No such file"),
    ):
        data.first_samples("train")


def test_auto_normalizes_with_imagenets_mean_and_std(image_tree: Path) -> None:
    with (
        open_section(folder_section(image_tree)) as plain,
        open_section(folder_section(image_tree, normalize="auto")) as auto,
    ):
        x, z = (next(data.eval_batches("test", 0, 1, 6)).x for data in (plain, auto))
    mean, std = (
        torch.tensor(v).view(3, 1, 1) for v in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    )
    torch.testing.assert_close(z, (x - mean) / std)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("broken", ["train/cat/3.png", "val/dog/1.png"])
def test_an_unreadable_file_is_named(image_tree: Path, broken: str, workers: int) -> None:
    path = image_tree / broken
    path.write_bytes(path.read_bytes()[:60])
    section = folder_section(image_tree, loader_workers=workers, validation_fraction=0.0)
    with open_section(section) as data, pytest.raises(DataError) as caught:
        read_all(data)
    for text in (str(path), f"class {broken.split('/')[1]}", "data.on_unreadable: skip"):
        assert text in str(caught.value)
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_files_can_be_skipped_and_are_counted(image_tree: Path, workers: int) -> None:
    (image_tree / "train/cat/3.png").write_bytes(b"no image")
    (image_tree / "val/dog/1.png").write_bytes(b"")
    section = folder_section(
        image_tree, loader_workers=workers, validation_fraction=0.0, on_unreadable="skip"
    )
    with open_section(section) as data:
        train, test = read_epoch(data), list(data.eval_batches("test", 0, 1, 4))
    assert sum(b.skipped for b in train) == 1
    assert sum(len(b.y) for b in train) == 19
    assert [(len(b.y), len(b.x), b.skipped) for b in test] == [(4, 4, 0), (1, 1, 1)]


@pytest.mark.parametrize("workers", [0, 1])
def test_of_batches_without_readable_samples_those_of_an_evaluation_are_passed_over(
    image_tree: Path, workers: int
) -> None:
    for path in image_tree.glob("*/cat/*.png"):
        path.write_bytes(b"no image")
    section = folder_section(
        image_tree, on_unreadable="skip", loader_workers=workers, validation_fraction=0.0
    )
    with open_section(section) as data:
        assert [b.y.tolist() for b in data.eval_batches("test", 0, 1, 3)] == [[1, 1, 1]]
        assert data.skipped == 3
        indices = ((step, 0) for step in range(20))
        with pytest.raises(DataError, match=r"no sample of a batch .*\.png"):
            list(data.train_batches(0, indices, 1, 1))
        shutil.rmtree(image_tree / "val")
        with pytest.raises(DataError, match="no sample of .* can be read"):
            list(data.eval_batches("test", 0, 1, 3))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda tree: shutil.rmtree(tree / "val"),
            r"data\.test_split: there is no folder /.*/val",
        ),
        (
            lambda tree: empty(tree / "train"),
            r"data\.train_split: .*/train has no usable images: ",
        ),
        (lambda tree: empty(tree / "train/cat"), r"data\.train_split: .* has no usable images: "),
        (
            lambda tree: (tree / "val/dog").rename(tree / "val/wolf"),
            "same class folders; only one of them has: dog, wolf",
        ),
    ],
)
def test_folders_that_cannot_be_used_are_named(
    image_tree: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(image_tree)
    with pytest.raises(DataError, match=message):
        new_data(folder_section(image_tree))


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def write_labels(tree: Path, text: str) -> str:
    path = tree / "labels.csv"
    path.write_bytes(os.fsencode(text))
    return str(path)


ROWS = "train/cat/0.png,tom,train\ntrain/dog/1.png,rex,train\nval/dog/0.png,rex,test\n"


def test_a_csv_file_gives_labels_and_splits(image_tree: Path) -> None:
    """Also with other columns, in another order, and when the same list is opened elsewhere."""
    rows = "".join(f"x,{line}\n" for line in ROWS.splitlines())
    section = folder_section(
        image_tree,
        labels=write_labels(image_tree, f"id,file,label,split\n{rows}"),
        validation_fraction=0,
    )
    source = cast(ImageFolderSource, pickle.loads(pickle.dumps(load_shared_data(section))))
    assert source.class_names == ("rex", "tom")
    assert [source.size("train"), source.size("test")] == [2, 1]
    expected = folder_section(image_tree)
    with open_section(section) as data, open_section(expected) as folders:
        assert data.info.class_counts == (1, 1)
        assert folders.info.class_counts == (10, 10)
        [batch] = data.eval_batches("test", 0, 1, 4)
        other = next(folders.eval_batches("test", 0, 1, 4))
        assert batch.y.tolist() == [0]
        assert torch.equal(batch.x[0], other.x[other.y == 1][0])


def test_files_are_found_from_any_folder(
    image_tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process elsewhere reads what a relative root and an absolute path mean here."""
    rows = ROWS.replace("val/", f"{image_tree}/val/")
    section = folder_section(
        Path("."), labels=write_labels(image_tree, f"file,label,split\n{rows}")
    )
    monkeypatch.chdir(image_tree)
    source = ImageFolderSource(section)
    monkeypatch.chdir("/")
    assert source.content("train", 0) == (image_tree / "train/cat/0.png").read_bytes()
    assert source.content("test", 0) == (image_tree / "val/dog/0.png").read_bytes()
    assert source.describe("test", 0).startswith(f"{image_tree}/val/dog/0.png ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("file,class\n", "needs a first line with .* file, label and split; it has file, c"),
        (f"file,label,split\n{ROWS}no.png,rex,train\n", r"line 5: there is no file .*/no\.png"),
        (f"file,label,split\n{ROWS}val/cat/0.png,,test\n", r"line 5: .* needs a label, .*''"),
        (f"file,label,split\n{ROWS}val/cat/0.png,rex,dev\n", "line 5: .*train, val or .*'dev'"),
        (
            f"file,label,split\n{ROWS}val/cat/0.png,wolf,test\n",
            "has labels that only test .*: wolf",
        ),
        ("file,label,split\nval/cat/0.png,tom,train\n", "has no file of split test"),
        (f"file,label,split\n{ROWS}val/cat/0.png\n", "line 5 has 1 values, but .* 3 columns"),
        (f"file,label,split\n{ROWS}\udce9.png,tom,train\n", "line 5 is not UTF-8 text"),
        ("", "must name its columns in the first line, each once"),
        (f"file,label,split,label\n{ROWS}", "must name its columns .*once, not .*split"),
        (f'file,label,split\n"{ROWS}', "line 2 begins a quote that never ends"),
        (f'file,label,split\n{ROWS}"val/cat/0.png"1,tom,test\n', "line 5 begins a quote that"),
        (f"file,label,split\n{ROWS}../x.png,tom,train\n", r"line 5: \.\./x.png is not below"),
        (f"file,label,split\n{ROWS}train/fifo.png,tom,train\n", "line 5: there is no file"),
        (f"file,label,split\n{ROWS}train/\0.png,tom,train\n", "line 5: there is no file"),
        (f"file,label,split\n{ROWS}{'x' * 999}.png,tom,train\n", "line 5: .*xx… .below data.root"),
        # One file counts once, by whatever name.
        (f"file,label,split\n{ROWS}val/dog/0.png,rex,test\n", "lines 4 and 5 name one file"),
        (f"file,label,split\n{ROWS}./val//dog/0.png,tom,test\n", "lines 4 and 5 name one file"),
        (f"file,label,split\n{ROWS}link/0.png,tom,test\n", "lines 4 and 5 name one file"),
    ],
)
def test_a_wrong_csv_file_is_explained(image_tree: Path, text: str, message: str) -> None:
    os.mkfifo(image_tree / "train/fifo.png")
    (image_tree / "link.png").symlink_to("val/dog/0.png")
    (image_tree / "link").symlink_to("val/dog")
    section = folder_section(image_tree, labels=write_labels(image_tree, text))
    with pytest.raises(DataError, match=rf"data\.labels: .*labels\.csv {message}") as caught:
        new_data(section)
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace(",", ";"),
        lambda text: text.replace(",", "\t"),
        lambda text: text.replace("\n", "\r\n"),
        lambda text: "\ufeff" + text,
        lambda text: text.replace("\n", "\n\n"),
        lambda text: text.replace(",", " , ").replace(" , ", ", ", 2).replace("png ,", "png,"),
        lambda text: "".join(f'"{line}"\n'.replace(",", '","') for line in text.splitlines()),
    ],
)
def test_csv_files_of_other_programs_are_read(
    image_tree: Path, change: Callable[[str], str]
) -> None:
    text = change(f"file,label,split\n{ROWS}")
    source = ImageFolderSource(folder_section(image_tree, labels=write_labels(image_tree, text)))
    assert source.class_names == ("rex", "tom")
    assert source.describe("test", 0).startswith(f"{image_tree}/val/dog/0.png (class rex)")


@pytest.mark.parametrize("workers", [0, 2])
def test_balanced_files_are_augmented_anew_each_time(image_tree: Path, workers: int) -> None:
    for i in range(1, 10):
        (image_tree / f"train/dog/{i}.png").unlink()
    section = folder_section(
        image_tree, sampler="balanced", validation_fraction=0, loader_workers=workers
    )
    with open_section(section) as data:
        x, y = concatenate(read_epoch(data, size=2))
        again, _ = concatenate(read_epoch(data, size=2, num_micro_batches=2))
    assert torch.equal(x, again)
    assert sorted(torch.bincount(y).tolist()) == [5, 5]
    copies = x[y == 1]  # all of dog/0.png
    assert len(torch.unique(copies.flatten(1), dim=0)) == 5


# --- Datasets of the user ------------------------------------------------------------------------


class Fixed(Dataset[Any]):
    def __init__(self, *samples: Any) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return self._samples[index]


def samples_section(*samples: Any, kind: type[Any] = Fixed, **fields: Any) -> DatasetData:
    fields = {"num_classes": 3, "validation_fraction": 0.0, **fields}
    return dataset_section(lambda: (kind(*samples), kind(*samples)), **fields)


def only_batch(section: DatasetData, channels_last: bool = True) -> Batch:
    with open_section(section, channels_last=channels_last) as data:
        return next(data.eval_batches("test", 0, 1, 100))


def test_a_part_of_a_tensor_dataset_tells_its_classes_and_columns_of_unequal_size() -> None:
    table = TensorDataset(torch.tensor([[0.5, -900.0]] * 9), torch.arange(9, dtype=torch.int8) % 3)
    parts = random_split(table, [6, 3])
    with open_section(dataset_section(lambda: parts, num_classes=None)) as data:
        assert data.info.num_classes == 3
        assert "tensor 0: the largest absolute values of columns are 0.5" in data.info.notes[0]


@pytest.mark.parametrize("values", [Fixed((torch.zeros(2), 0)), TensorDataset(torch.zeros(2, 1))])
def test_a_dataset_without_a_number_of_classes_says_what_to_write(values: Any) -> None:
    section = dataset_section(lambda: (values, values), num_classes=None)
    message = 'num_classes": 10.*without classes, write a task'
    with pytest.raises(DataError, match=message), open_section(section):
        pass


@pytest.mark.parametrize(
    "shape", [(20, 24, 3), (20, 24, 1), (3, 20, 24), (1, 20, 24), (5, 20, 24)]
)
def test_the_layout_of_images_of_a_dataset_is_seen_in_their_shape_and_said(
    shape: tuple[int, ...],
) -> None:
    image = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    section, is_last = samples_section((image, 0), (image, 1)), shape[0] == 20
    with open_section(section) as data:
        batch = next(data.eval_batches("test", 0, 1, 100))
        [note] = data.info.notes
    expected = torch.from_numpy(image / 255).float()
    torch.testing.assert_close(batch.x[0], expected.permute(2, 0, 1) if is_last else expected)
    assert f"{list(shape)} is read as 24 x 20 pixels" in note
    assert note.endswith(f"(channels {'last' if is_last else 'first'})")


def test_floats_and_integers_are_unchanged_and_other_types_are_cast() -> None:
    values = torch.randn(5)
    assert torch.equal(only_batch(samples_section((values, 0))).x[0], values)
    assert only_batch(samples_section((values.double().numpy(), 0))).x.dtype == torch.float32
    tokens = torch.arange(5)
    assert torch.equal(only_batch(samples_section((tokens, 0))).x[0], tokens)


def test_integers_are_not_mixed() -> None:
    tokens = (torch.tensor([1, 2]), 0)
    with pytest.raises(DataError, match=r"mixup: needs samples of floats .* are torch\.int64"):
        new_data(samples_section(tokens, augment={"mixup": 0.2}))
    new_data(samples_section(tokens, augment={"mixup": 0.2}, normalize=([0, 0], [1, 1])))


class Pair(NamedTuple):
    left: Any
    right: Any


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_of_a_task_have_the_nesting_of_its_samples(workers: int) -> None:
    sample = {"a": Pair(torch.ones(2), (1, Pair(2.0, [3])))}
    section = samples_section(sample, loader_workers=workers)
    source = UserDatasetSource(section, 0, classification=False)
    data = DataLoaderData(source, section, HoldOut(0), 0, CPU, False)
    [batch] = data.eval_batches("test", 0, 1, 4)
    data.close()
    assert batch.y is None
    assert batch.x["a"].left.tolist() == [[1, 1]]
    number, inner = batch.x["a"].right
    assert (number, inner.left, inner.right) == (1, 2, (3,))
    assert data.source.example["a"].right[1].left == 2


@pytest.mark.parametrize(
    "label", [2, np.int64(2), np.uint8(2), torch.tensor(2), np.array(2), torch.tensor([2])]
)
def test_integers_of_any_type_are_labels(label: Any) -> None:
    y = only_batch(samples_section((torch.zeros(2), label))).y
    assert y.tolist() == [2]
    assert y.dtype == torch.int64


def with_attribute(**attributes: Any) -> Callable[[], Any]:
    def function() -> Any:
        train = Fixed(*[(torch.zeros(2), 0)] * 20)
        for name, value in attributes.items():
            setattr(train, name, value)
        return train, Fixed((torch.zeros(2), 0))

    return function


@pytest.mark.parametrize("targets", [[0] * 18 + [1] * 2, torch.tensor([0] * 18 + [1] * 2)])
def test_balanced_takes_the_targets_of_a_dataset(targets: Any) -> None:
    function = with_attribute(num_classes=2, targets=targets)
    section = dataset_section(function, sampler="balanced", validation_fraction=0)
    with open_section(section) as data:
        order = data._split.order(0, search=False)
        assert data.info.class_counts == (18, 2)
    assert (order >= 18).sum() == 10


@pytest.mark.parametrize("targets", [None, [0] * 19, [[0, 1]] * 20, [[0], [1, 0]] * 10, [7] * 20])
def test_balanced_needs_one_class_of_each_sample(targets: Any) -> None:
    function = with_attribute(num_classes=2, **({} if targets is None else {"targets": targets}))
    with pytest.raises(DataError, match=r"data\.sampler: balanced needs the class of each sample"):
        new_data(dataset_section(function, sampler="balanced"))


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


def failing() -> Any:
    raise KeyError("weather")


GOOD = (torch.zeros(2), 0)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            dataset_section(lambda: Fixed(GOOD)),
            r"must return or be \(train, test\), two .*not Fixed",
        ),
        (
            dataset_section(lambda: (Endless(), Fixed(GOOD))),
            "the train set of .* is an IterableDataset, .*wrap list",
        ),
        (dataset_section(lambda: (Fixed(GOOD), Fixed())), "the test set of .*, and not empty"),
        (
            dataset_section(failing),
            r"raised KeyError: 'weather' \(at .*test_loader\.py:\d+ in failing\)",
        ),
        (dataset_section(args={"size": 3}), r"data\.args \{'size': 3\}, raised TypeError"),
        (
            samples_section(7),
            r"sample 0 of the train set of .*must be a pair \(x, label\), not int",
        ),
        (samples_section((Image.new("L", (2, 2)), 0)), r"x is PIL\.Image\.Image.*PILToTensor"),
        (samples_section((torch.zeros(2), "cat")), "its label is 'cat' .*integer below"),
        (
            samples_section(*[GOOD] * 3, kind=type("Renamed", (Fixed,), {"targets": [1, 0, 2]})),
            "its label is 0, but `targets` of the Dataset say 1",
        ),
        (
            dataset_section(args={"train_broken": [0]}),
            "sample 0 of the train .*disk block 0 is bad",
        ),
    ],
)
def test_wrong_datasets_are_errors_before_the_training(section: DatasetData, message: str) -> None:
    with pytest.raises(DataError, match=message):
        new_data(section).first_samples("train")


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("on_unreadable", ["error", "skip"])
@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ((torch.zeros(2), 3), "sample 1 of the test .*label is 3 .* integer below 3"),
        ((torch.zeros(2), -1), "label is -1 .int.; it must be an integer below 3"),
        ((torch.zeros(3), 0), r"it is \(torch.float32 \[3\], int\) but .*first .*float32 \[2\]"),
    ],
)
def test_wrong_samples_are_errors_when_read(
    sample: Any, message: str, on_unreadable: str, workers: int
) -> None:
    section = samples_section(GOOD, sample, on_unreadable=on_unreadable, loader_workers=workers)
    with open_section(section) as data, pytest.raises(DataError, match=message):
        list(data.eval_batches("test", 0, 1, 1))


def test_unreadable_samples_are_skipped_among_the_first_too() -> None:
    broken = {"train_broken": (1, 2, 25), "test_broken": (0,)}
    with open_section(dataset_section(args=broken, on_unreadable="skip")) as data:
        assert [len(data.first_samples(split, 3).y) for split in ("train", "test")] == [3, 3]
        batches = [*read_epoch(data, size=8), *data.eval_batches("validation", 0, 1, 8)]
    assert sum(b.skipped for b in batches) == 3
    assert sum(len(b.y) for b in batches) == 23
