"""Samples read one at a time: the same with any number of loader processes, and their errors."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset

from raytrain_opt.config.schema import DatasetData, ImageFolderData
from raytrain_opt.data import load_shared, open_data
from raytrain_opt.data.base import Batch
from raytrain_opt.data.datasets import LoaderData
from raytrain_opt.errors import DataError

CPU = torch.device("cpu")
Section = ImageFolderData | DatasetData


@contextmanager
def opened(section: Section, seed: int = 0, channels_last: bool = True) -> Iterator[LoaderData]:
    data = LoaderData(section, seed=seed, device=CPU, channels_last=channels_last)
    try:
        yield data
    finally:
        data.close()


def epoch(data: LoaderData, number: int = 0, num_shares: int = 1, size: int = 4) -> list[Batch]:
    steps = range(data.info.steps_per_epoch(size))
    return list(data.train(number, steps, range(num_shares), num_shares, size))


def joined(batches: list[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([b.x for b in batches]), torch.cat([b.y for b in batches])


def read_all(data: LoaderData) -> None:
    epoch(data)
    for split in ("selection", "test"):
        if split == "test" or data.info.selection_size:
            list(data.evaluate(split, 0, 1, 2))  # type: ignore[arg-type]


def folder(root: Path, **fields: Any) -> ImageFolderData:
    fields = {"image_size": 8, "loader_workers": 0, "normalize": "none", **fields}
    return ImageFolderData(name="image_folder", root=str(root), **fields)


class Noisy(Dataset[Any]):
    """Sample i: x = [i, a number from each generator], label i; `broken` ones cannot be read."""

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


def own(function: Callable[..., Any] = noisy, **fields: Any) -> DatasetData:
    return DatasetData(name=function, **{"loader_workers": 0, **fields})


# --- the same samples for everyone -------------------------------------------------------------


@pytest.mark.parametrize("kind", ["folder", "own"])
def test_loader_processes_change_no_bit(image_tree: Path, kind: str) -> None:
    def section(workers: int) -> Section:
        return (
            folder(image_tree, loader_workers=workers)
            if kind == "folder"
            else own(loader_workers=workers)
        )

    with opened(section(0)) as alone, opened(section(2)) as helped:
        for number in (0, 1):
            for one, two in zip(
                joined(epoch(alone, number)), joined(epoch(helped, number, 2)), strict=True
            ):
                assert torch.equal(one, two)
        for split in ("selection", "test"):
            one, two = (
                joined(list(data.evaluate(split, 0, 1, 3)))[0]  # type: ignore[arg-type]
                for data in (alone, helped)
            )
            assert torch.equal(one, two)


@pytest.mark.parametrize("num_shares", [2, 4])
def test_the_number_of_shares_changes_no_bit(num_shares: int) -> None:
    with opened(own()) as data:
        one, other = joined(epoch(data)), joined(epoch(data, num_shares=num_shares))
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])


def test_an_epoch_has_every_training_sample_once_and_no_selection_sample() -> None:
    with opened(own()) as data:
        assert (data.info.train_size, data.info.selection_size, data.info.test_size) == (24, 2, 7)
        selection = joined(list(data.evaluate("selection", 0, 1, 8)))[1].tolist()
        first, second = (joined(epoch(data, number))[1].tolist() for number in (0, 1))
    assert sorted(first + selection) == list(range(26))
    assert sorted(first) == sorted(second)
    assert first != second


def test_random_changes_differ_by_epoch_seed_and_sample() -> None:
    with opened(own()) as data, opened(own(), seed=1) as other:
        runs = [joined(epoch(data, 0)), joined(epoch(data, 1)), joined(epoch(other, 0))]
    drawn = [{int(y): tuple(x[1:].tolist()) for x, y in zip(*run, strict=True)} for run in runs]
    assert len(set(drawn[0].values())) == len(drawn[0])
    for run in drawn[1:]:
        assert all(run[y] != drawn[0][y] for y in run.keys() & drawn[0].keys())


def test_the_callers_random_state_is_untouched() -> None:
    def states() -> list[Any]:
        return [
            torch.get_rng_state().tolist(),
            random.getstate(),
            np.random.get_state()[1].tolist(),
        ]

    for workers in (0, 1):
        before = states()
        with opened(own(loader_workers=workers)) as data:
            epoch(data)
            list(data.evaluate("test", 0, 1, 4))
        assert states() == before


def test_phases_can_be_left_early_and_repeated() -> None:
    with opened(own(loader_workers=2)) as data:
        whole = joined(epoch(data))
        for _ in range(3):
            next(data.train(1, range(6), range(1), 1, 4))  # the rest is never asked for
            next(data.evaluate("test", 0, 1, 2))
        again = joined(epoch(data))
    assert torch.equal(whole[0], again[0])


def test_loader_processes_live_on_over_phases() -> None:
    with opened(own(process_numbers, loader_workers=2)) as data:
        pids = [set(joined(epoch(data, number))[0][:, 0].tolist()) for number in range(3)]
        test = set(joined(list(data.evaluate("test", 0, 1, 2)))[0][:, 0].tolist())
    assert len(pids[0]) == 2
    assert pids[0] == pids[1] == pids[2] == test
    assert os.getpid() not in pids[0]


class ProcessNumbers(Noisy):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([os.getpid(), torch.get_num_threads()]), index


def process_numbers() -> Any:
    return ProcessNumbers(26), ProcessNumbers(8)


def test_loader_processes_use_one_thread() -> None:
    with opened(own(process_numbers, loader_workers=1)) as data:
        assert set(joined(epoch(data))[0][:, 1].tolist()) == {1}


def test_loader_processes_end_with_close() -> None:
    with opened(own(process_numbers, loader_workers=1)) as data:
        pid = int(epoch(data)[0].x[0, 0])
        os.kill(pid, 0)  # raises when there is no such process
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_phase_that_was_overtaken_is_not_read_on() -> None:
    with opened(own(loader_workers=1)) as data:
        first = data.train(0, range(6), range(1), 1, 4)
        next(first)
        next(data.evaluate("test", 0, 1, 2))
        with pytest.raises(RuntimeError, match="read on after the next one had begun"):
            next(first)
        assert len(epoch(data)) == 6


def test_a_loader_process_that_dies_is_reported_and_replaced() -> None:
    def phases() -> int:
        with opened(own(process_numbers, loader_workers=1)) as data:
            batches = data.train(0, range(6), range(1), 1, 4)
            os.kill(int(next(batches).x[0, 0]), signal.SIGKILL)
            with pytest.raises(RuntimeError, match=r"data\.loader_workers is 1"):
                list(batches)
            return len(epoch(data))

    # As in a Ray worker, where the loop is not the main thread: there torch has a signal
    # handler of its own, which raises wherever the main thread happens to be.
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(phases).result() == 6
    finally:
        signal.signal(signal.SIGCHLD, handler)


@pytest.mark.parametrize(("split", "size"), [("selection", 2), ("test", 7)])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_evaluation_counts_each_sample_once(split: Any, size: int, world_size: int) -> None:
    with opened(own()) as data:
        labels = [
            int(y)
            for rank in range(world_size)
            for batch in data.evaluate(split, rank, world_size, 2)
            for y in batch.y
        ]
    assert len(labels) == len(set(labels)) == size


def test_without_a_selection_split_it_cannot_be_scored_on() -> None:
    with (
        opened(own(selection_fraction=0.0)) as data,
        pytest.raises(DataError, match=r"data\.selection_fraction"),
    ):
        data.evaluate("selection", 0, 1, 2)


def test_a_function_that_makes_up_data_makes_the_same_everywhere() -> None:
    def made_up() -> Any:
        x, y = torch.rand(20, 3), torch.randint(0, 2, (20,))
        both = torch.utils.data.TensorDataset(x, y)
        return both, both

    runs = []
    for _ in range(2):
        torch.rand(1)
        with opened(own(made_up, num_classes=2)) as data:
            runs.append(joined(epoch(data))[0])
    assert torch.equal(runs[0], runs[1])


@pytest.mark.parametrize("workers", [0, 1])
def test_wrong_steps_and_shares_are_refused(workers: int) -> None:
    with opened(own(loader_workers=workers)) as data:
        with pytest.raises(ValueError, match="step 6 of an epoch of 6 steps"):
            list(data.train(0, range(5, 7), range(1), 1, 4))
        with pytest.raises(ValueError, match="share 0 of 3"):
            next(data.train(0, range(1), range(1), 3, 4))
        assert len(epoch(data)) == 6


# --- image folders -----------------------------------------------------------------------------


def test_folder_info(image_tree: Path) -> None:
    section = folder(image_tree)
    assert load_shared(section) is None
    data = open_data(section, None, seed=0, device=CPU, channels_last=True)
    info = data.info
    assert (info.num_classes, info.sample_shape) == (2, (3, 8, 8))
    assert (info.train_size, info.selection_size, info.test_size) == (18, 2, 6)
    batch = next(data.train(0, range(1), range(1), 1, 4))
    assert batch.x.shape == (4, 3, 8, 8)
    assert batch.x.is_contiguous(memory_format=torch.channels_last)
    assert batch.x.dtype == torch.float32


def test_evaluation_takes_the_centre(image_tree: Path) -> None:
    from torchvision.transforms import v2

    with opened(folder(image_tree)) as data:
        x, y = joined(list(data.evaluate("test", 0, 1, 4)))
    assert y.tolist() == [0, 0, 0, 1, 1, 1]
    transform = v2.Compose([v2.Resize(9), v2.CenterCrop(8), v2.PILToTensor()])
    for i in range(6):
        file = image_tree / "val" / ("cat", "dog")[i // 3] / f"{i % 3}.png"
        image = transform(Image.open(file).convert("RGB"))
        torch.testing.assert_close(x[i], image / 255)


def test_greyscale_becomes_rgb(image_tree: Path) -> None:
    with opened(folder(image_tree)) as data:
        dog = joined(list(data.evaluate("test", 0, 1, 6)))[0][3]
    assert torch.equal(dog[0], dog[1])
    assert torch.equal(dog[1], dog[2])


def test_training_images_are_random_crops(image_tree: Path) -> None:
    with opened(folder(image_tree)) as data:
        first, second = (joined(epoch(data, number))[0] for number in (0, 1))
        again = joined(epoch(data, 0))[0]
    assert torch.equal(first, again)
    assert len({x.numpy().tobytes() for x in torch.cat([first, second])}) == 32


def test_auto_is_imagenets_moments(image_tree: Path) -> None:
    with opened(folder(image_tree)) as plain, opened(folder(image_tree, normalize="auto")) as auto:
        x, z = (next(data.evaluate("test", 0, 1, 6)).x for data in (plain, auto))
    mean, deviation = (
        torch.tensor(v).view(3, 1, 1) for v in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    )
    torch.testing.assert_close(z, (x - mean) / deviation)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("broken", ["train/cat/3.png", "val/dog/1.png"])
def test_a_corrupt_file_is_named(image_tree: Path, broken: str, workers: int) -> None:
    path = image_tree / broken
    path.write_bytes(path.read_bytes()[:60])
    section = folder(image_tree, loader_workers=workers, selection_fraction=0.0)
    with opened(section) as data, pytest.raises(DataError) as caught:
        read_all(data)
    for words in (str(path), f"class {broken.split('/')[1]}", "Error", "data.corrupt: skip"):
        assert words in str(caught.value)
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize("workers", [0, 2])
def test_corrupt_files_can_be_skipped_and_are_counted(image_tree: Path, workers: int) -> None:
    (image_tree / "train/cat/3.png").write_bytes(b"no image")
    (image_tree / "val/dog/1.png").write_bytes(b"")
    section = folder(image_tree, loader_workers=workers, selection_fraction=0.0, corrupt="skip")
    with opened(section) as data:
        train, test = epoch(data), list(data.evaluate("test", 0, 1, 4))
    assert sum(b.skipped for b in train) == 1
    assert sum(len(b.y) for b in train) == 19
    assert [(len(b.y), len(b.x), b.skipped) for b in test] == [(4, 4, 0), (1, 1, 1)]


def test_a_batch_with_nothing_left_is_an_error(image_tree: Path) -> None:
    for i in range(3):
        (image_tree / f"val/dog/{i}.png").write_bytes(b"no image")
    with opened(folder(image_tree, corrupt="skip")) as data:
        batches = data.evaluate("test", 0, 1, 3)
        assert next(batches).y.tolist() == [0, 0, 0]
        with pytest.raises(DataError, match=r"left of batch 1 of rank 0 of the test.*2\.png"):
            next(batches)


def test_after_an_error_the_data_can_be_used_again(image_tree: Path) -> None:
    (image_tree / "val/dog/1.png").write_bytes(b"no image")
    with opened(folder(image_tree, loader_workers=1)) as data:
        with pytest.raises(DataError):
            list(data.evaluate("test", 0, 1, 2))
        assert len(epoch(data)) == 4


def test_a_missing_folder_is_named(image_tree: Path) -> None:
    shutil.rmtree(image_tree / "val")
    with pytest.raises(DataError, match=rf"data\.test_split: there is no folder {image_tree}/val"):
        LoaderData(folder(image_tree), seed=0, device=CPU, channels_last=True)


@pytest.mark.parametrize("emptied", ["train", "train/cat"])
def test_an_empty_folder_is_named(image_tree: Path, emptied: str) -> None:
    shutil.rmtree(image_tree / emptied)
    (image_tree / emptied).mkdir()
    with pytest.raises(DataError, match=r"data\.train_split: .*/train holds no usable images: "):
        LoaderData(folder(image_tree), seed=0, device=CPU, channels_last=True)


def test_classes_of_both_splits_must_be_the_same(image_tree: Path) -> None:
    (image_tree / "val/dog").rename(image_tree / "val/wolf")
    with pytest.raises(DataError, match="same class folders; in one of them only: dog, wolf"):
        LoaderData(folder(image_tree), seed=0, device=CPU, channels_last=True)


# --- the user's own Datasets -------------------------------------------------------------------


class Fixed(Dataset[Any]):
    """The given samples."""

    def __init__(self, *samples: Any) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return self._samples[index]


def of_samples(*samples: Any, **fields: Any) -> DatasetData:
    fields = {"num_classes": 3, "selection_fraction": 0.0, **fields}
    return own(lambda: (Fixed(*samples), Fixed(*samples)), **fields)


def only_batch(section: DatasetData, channels_last: bool = True) -> Batch:
    with opened(section, channels_last=channels_last) as data:
        return next(data.evaluate("test", 0, 1, 100))


@pytest.mark.parametrize("channels_last", [True, False])
def test_uint8_images_are_scaled_to_one(channels_last: bool) -> None:
    images = torch.randint(0, 256, (2, 3, 4, 5), dtype=torch.uint8)
    batch = only_batch(of_samples((images[0], 0), (images[1], 1)), channels_last)
    torch.testing.assert_close(batch.x, images / 255)
    wanted = torch.channels_last if channels_last else torch.contiguous_format
    assert batch.x.is_contiguous(memory_format=wanted)


def test_given_moments_are_used_for_images_and_for_values() -> None:
    image = torch.randint(0, 256, (3, 4, 5), dtype=torch.uint8)
    moments = ([0.5, 0.4, 0.3], [0.1, 0.2, 0.3])
    mean, deviation = (torch.tensor(v).view(3, 1, 1) for v in moments)
    expected = (image / 255 - mean) / deviation
    for x in (image, image / 255):
        batch = only_batch(of_samples((x, 0), normalize=moments))
        torch.testing.assert_close(batch.x[0], expected)


def test_floats_stay_and_other_types_are_cast() -> None:
    values = torch.randn(5)
    assert torch.equal(only_batch(of_samples((values, 0))).x[0], values)
    assert only_batch(of_samples((values.double().numpy(), 0))).x.dtype == torch.float32
    tokens = torch.arange(5)
    assert torch.equal(only_batch(of_samples((tokens, 0))).x[0], tokens)


def test_read_only_and_reversed_arrays_are_accepted() -> None:
    array = np.arange(6, dtype=np.float32)
    array.flags.writeable = False
    assert only_batch(of_samples((array[::-1], 0))).x[0].tolist() == [5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize(
    "label", [2, np.int64(2), np.uint8(2), torch.tensor(2), np.array(2), torch.tensor([2])]
)
def test_whole_numbers_of_any_kind_are_labels(label: Any) -> None:
    y = only_batch(of_samples((torch.zeros(2), label))).y
    assert y.tolist() == [2]
    assert y.dtype == torch.int64


def with_attribute(**attributes: Any) -> Callable[[], Any]:
    def function() -> Any:
        train = Fixed(*[(torch.zeros(2), 0)] * 20)
        for name, value in attributes.items():
            setattr(train, name, value)
        return train, Fixed((torch.zeros(2), 0))

    return function


@pytest.mark.parametrize(
    ("function", "given", "expected"),
    [
        (with_attribute(num_classes=4, classes=["a"]), 7, 7),
        (with_attribute(num_classes=4, classes=["a"]), None, 4),
        (with_attribute(classes=["a", "b"]), None, 2),
    ],
)
def test_number_of_classes(function: Callable[[], Any], given: int | None, expected: int) -> None:
    with opened(own(function, num_classes=given)) as data:
        assert data.info.num_classes == expected


def test_an_unknown_number_of_classes_names_the_field() -> None:
    with pytest.raises(DataError, match=r"data\.num_classes: .* neither num_classes nor classes"):
        LoaderData(own(with_attribute()), seed=0, device=CPU, channels_last=True)


def test_arguments_reach_the_function() -> None:
    section = own(args={"test_broken": (0, 1, 2)}, corrupt="skip")
    with opened(section) as data:
        assert next(data.evaluate("test", 0, 1, 7)).skipped == 3


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


def failing() -> Any:
    raise KeyError("weather")


GOOD = (torch.zeros(2), 0)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        (own(lambda: Fixed(GOOD)), r"must return \(train, test\).*it returned Fixed"),
        (own(lambda: (Fixed(GOOD),)), r"must return \(train, test\)"),
        (own(lambda: (Endless(), Fixed(GOOD))), "the train set of .* is Endless; .*map-style"),
        (own(lambda: (Fixed(GOOD), Fixed())), "the test set of .* is empty"),
        (own(failing), r"raised KeyError: 'weather' \(at .*test_datasets\.py:\d+\)"),
        (own(args={"size": 3}), r"data\.args \{'size': 3\}, raised TypeError"),
        (of_samples(7), r"sample 0 of the train set of .*must be a pair \(x, label\), not int"),
        (of_samples((1, 2, 3)), "must be a pair"),
        (of_samples((Image.new("L", (2, 2)), 0)), r"x is PIL\.Image\.Image.*PILToTensor"),
        (of_samples((torch.zeros(2), "cat")), "its label is 'cat' .*whole class number"),
        (of_samples((torch.zeros(2), 1.0)), "its label is 1.0 .*whole class number"),
        (own(args={"train_broken": [0]}), "sample 0 of the train .*disk block 0 is bad"),
    ],
)
def test_wrong_sets_are_refused_when_opened(section: DatasetData, words: str) -> None:
    with pytest.raises(DataError, match=words):
        LoaderData(section, seed=0, device=CPU, channels_last=True)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("corrupt", ["error", "skip"])
@pytest.mark.parametrize(
    ("sample", "words"),
    [
        ((torch.zeros(2), 3), "sample 1 of the test .*label is 3, outside 0 to 2"),
        ((torch.zeros(2), -1), "label is -1, outside 0 to 2"),
        ((torch.zeros(3), 0), r"x is torch.float32 \[3\] but .*first .*torch.float32 \[2\]"),
    ],
)
def test_wrong_samples_are_refused_when_read(
    sample: Any, words: str, corrupt: str, workers: int
) -> None:
    section = of_samples(GOOD, sample, corrupt=corrupt, loader_workers=workers)
    with opened(section) as data, pytest.raises(DataError, match=words):
        list(data.evaluate("test", 0, 1, 1))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_sample_is_named_with_its_cause(workers: int) -> None:
    with opened(own(args={"train_broken": (5, 9)}, loader_workers=workers)) as data:
        with pytest.raises(DataError) as caught:
            read_all(data)
        assert len(joined(list(data.evaluate("test", 0, 1, 2)))[1]) == 7
    for words in ("of the train set of", "OSError: disk block", "data.corrupt: skip"):
        assert words in str(caught.value)


def test_the_first_samples_may_be_unreadable_when_skipping() -> None:
    with opened(own(args={"train_broken": (0, 1)}, corrupt="skip")) as data:
        assert data.info.sample_shape == (4,)
        batches = [*epoch(data, size=8), *data.evaluate("selection", 0, 1, 8)]
    assert sum(b.skipped for b in batches) == 2
    assert sum(len(b.y) for b in batches) == 24
