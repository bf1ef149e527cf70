"""Open the data set that the `data` section of a job names.

The imports inside the functions keep torch, which takes seconds to import, out of the driver.
"""

from __future__ import annotations

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


def load_shared_data(section: DataSection) -> SharedData:
    """Read what the driver shares: arrays, image files' names or shards' indices.

    None for a user's Datasets. Raises DataError.
    """
    from raytrain_opt.data.image_folder import ImageFolderSource
    from raytrain_opt.data.in_memory_sets import load_array_set, load_arrays
    from raytrain_opt.data.shards import ShardSource

    match section:
        case ArraySetData():
            return load_array_set(section)
        case ArraysData():
            return load_arrays(section)
        case ImageFolderData():
            return ImageFolderSource(section)
        case ShardsData():
            return ShardSource(section)
    return None


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

    `shared`: of `load_shared_data`; else the data are read here. Training samples are drawn from
    `seed` to be the validation split. Without `classification`, samples of a user's Datasets are
    any nesting of tensors. Raises DataError.
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
