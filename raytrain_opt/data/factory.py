"""Open the data set that the `data` section of a job names.

The imports inside the functions keep torch, which takes seconds to import, out of the driver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raytrain_opt.config.data import ArraysData, ArraySetData

if TYPE_CHECKING:
    import torch

    from raytrain_opt.config.data import DataSection, HoldOut
    from raytrain_opt.data.base import TrainingData
    from raytrain_opt.data.in_memory_sets import DatasetArrays


def load_shared_arrays(section: DataSection) -> DatasetArrays | None:
    """Read the arrays that the driver shares with all processes; None for data read from disk.

    Raises DataError.
    """
    if isinstance(section, (ArraySetData, ArraysData)):
        from raytrain_opt.data.in_memory_sets import load_arrays

        return load_arrays(section)
    return None


def open_data(
    section: DataSection,
    shared: DatasetArrays | None,
    *,
    hold_out: HoldOut,
    seed: int,
    device: torch.device,
    channels_last: bool,
) -> TrainingData:
    """Open the data of a job in a process that trains or evaluates on `device`.

    `shared` is the result of `load_shared_arrays`; without it, an in-memory set is read here.
    `hold_out` and `seed` decide which training samples form the validation split. Raises
    DataError.
    """
    if isinstance(section, (ArraySetData, ArraysData)):
        from raytrain_opt.data.in_memory import InMemoryData
        from raytrain_opt.data.in_memory_sets import load_arrays

        arrays = shared if shared is not None else load_arrays(section)
        return InMemoryData(
            arrays,
            section,
            hold_out=hold_out,
            seed=seed,
            device=device,
            channels_last=channels_last,
        )
    from raytrain_opt.data.loader import DataLoaderData

    return DataLoaderData(
        section, hold_out=hold_out, seed=seed, device=device, channels_last=channels_last
    )
