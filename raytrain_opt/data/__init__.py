"""Training data: public sets, arrays, image folders and the user's own Datasets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raytrain_opt.config.schema import ArraysData, ArraySetData
from raytrain_opt.data.base import Batch, DataInfo, Split, TrainingData

if TYPE_CHECKING:
    import torch

    from raytrain_opt.config.schema import DataSection
    from raytrain_opt.data.array_sets import Arrays

__all__ = ["Batch", "DataInfo", "Split", "TrainingData", "load_shared", "open_data"]


def load_shared(section: DataSection) -> Arrays | None:
    """What the driver loads once and shares with all processes: in-memory sets; else None."""
    if isinstance(section, (ArraySetData, ArraysData)):
        from raytrain_opt.data.array_sets import load_arrays

        return load_arrays(section)
    return None


def open_data(
    section: DataSection,
    shared: Arrays | None,
    *,
    seed: int,
    device: torch.device,
    channels_last: bool,
) -> TrainingData:
    """The data of a job, in the process that trains or scores on it.

    `shared` is what `load_shared` returned; without it an in-memory set is read here. The
    selection split is cut from the training set by the seed. Raises DataError.
    """
    # Imported here: torch costs seconds, and the driver does not need it for this.
    if isinstance(section, (ArraySetData, ArraysData)):
        from raytrain_opt.data.arrays import ArrayData, load_arrays

        arrays = shared if shared is not None else load_arrays(section)
        return ArrayData(arrays, section, seed=seed, device=device, channels_last=channels_last)
    from raytrain_opt.data.datasets import LoaderData

    return LoaderData(section, seed=seed, device=device, channels_last=channels_last)
