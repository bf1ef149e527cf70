"""Open the data set that the `data` section of a job names.

The imports inside the functions keep torch, which takes seconds to import, out of the driver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, cast

from raytrain_opt.config.data import ArraysData, ArraySetData, ImageFolderData, ShardsData

if TYPE_CHECKING:
    import torch

    from raytrain_opt.config.data import DataSection, HoldOut
    from raytrain_opt.data.base import TrainingData
    from raytrain_opt.data.image_folder import ImageFolderSource
    from raytrain_opt.data.in_memory_sets import DatasetArrays
    from raytrain_opt.data.shards import ShardSource

# What the driver reads once for all processes.
SharedData: TypeAlias = "DatasetArrays | ImageFolderSource | ShardSource | None"


def load_shared_data(section: DataSection) -> SharedData:
    """Read what the driver shares: arrays, image files' names or shards' indices.

    A thousand processes that each walked the folders of images would read a shared file system a
    thousand times. None for a user's Datasets. Raises DataError.
    """
    if isinstance(section, (ArraySetData, ArraysData)):
        from raytrain_opt.data.in_memory_sets import load_arrays

        return load_arrays(section)
    if isinstance(section, ImageFolderData):
        from raytrain_opt.data.image_folder import ImageFolderSource

        return ImageFolderSource(section)
    if isinstance(section, ShardsData):
        from raytrain_opt.data.shards import ShardSource

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

    `shared` is the result of `load_shared_data`; without it, the data are read here.
    `hold_out` and `seed` decide which training samples form the validation split. Without
    `classification`, samples of a user's Datasets are any nesting of tensors. Raises DataError.
    """
    settings = (hold_out, seed, device, channels_last)
    if isinstance(section, (ArraySetData, ArraysData)):
        from raytrain_opt.data.in_memory import InMemoryData

        arrays = cast("DatasetArrays", load_shared_data(section) if shared is None else shared)
        return InMemoryData(arrays, section, *settings)
    from raytrain_opt.data.loader import DataLoaderData

    files = cast("ImageFolderSource | ShardSource | None", shared)
    return DataLoaderData(section, *settings, files=files, classification=classification)
