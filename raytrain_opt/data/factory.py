"""Open the data set that the `data` section of a job names.

The imports inside the functions keep torch, which takes seconds to import, out of the driver.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, TypeAlias, cast

from raytrain_opt.config.data import ArraysData, ArraySetData, ImageFolderData, ShardsData

if TYPE_CHECKING:
    import torch

    from raytrain_opt.config.data import DataSection, DatasetData, HoldOut, LoaderSection
    from raytrain_opt.data.base import TrainingData
    from raytrain_opt.data.in_memory_sets import DatasetArrays
    from raytrain_opt.data.source import SampleSource

# What the driver reads once for all processes.
SharedData: TypeAlias = "DatasetArrays | SampleSource | None"

# Module and function that read a kind of data, which the driver shares.
_READERS = {
    ArraySetData: ("in_memory_sets", "load_array_set"),
    ArraysData: ("in_memory_sets", "load_arrays"),
    ImageFolderData: ("image_folder", "ImageFolderSource"),
    ShardsData: ("shards", "ShardSource"),
}


def load_shared_data(section: DataSection) -> SharedData:
    """Read what the driver shares: arrays, image files' names or shards' indices.

    A thousand processes that each walked the folders of images would read a shared file system a
    thousand times. None for a user's Datasets. Raises DataError.
    """
    if type(section) not in _READERS:
        return None
    module, function = _READERS[type(section)]
    shared: SharedData = getattr(import_module(f"raytrain_opt.data.{module}"), function)(section)
    return shared


def open_data(
    section: DataSection,
    shared: SharedData,
    *,
    hold_out: HoldOut,
    seed: int,
    device: torch.device,
    channels_last: bool,
    classification: bool = True,
) -> TrainingData:
    """Open the data of a job in a process that trains or evaluates on `device`.

    `shared` is the result of `load_shared_data`; without it, the data are read here.
    `hold_out` and `seed` decide which training samples form the validation split. Without
    `classification`, samples of a user's Datasets are any nesting of tensors. Raises DataError.
    """
    from raytrain_opt.data.in_memory import InMemoryData
    from raytrain_opt.data.in_memory_sets import DatasetArrays
    from raytrain_opt.data.loader import DataLoaderData
    from raytrain_opt.data.user_datasets import UserDatasetSource

    source = load_shared_data(section) if shared is None else shared
    if isinstance(source, DatasetArrays):
        return InMemoryData(source, section, hold_out, seed, device, channels_last)
    if source is None:
        dataset = cast("DatasetData", section)
        source = UserDatasetSource(dataset, seed, classification=classification)
    loader = cast("LoaderSection", section)
    return DataLoaderData(source, loader, hold_out, seed, device, channels_last)
