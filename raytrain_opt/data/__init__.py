"""Training data: small sets, .npy arrays, image folders, shards, the user's own Datasets.

Start with `base`: `TrainingData` is what the training loop needs of any data set. Two classes
implement it: `in_memory.InMemoryData` and, for samples that loader processes read one at a time
(`batch_reader`, from `image_folder`, `shards` or `user_datasets`), `loader.DataLoaderData`.
`sampling` decides which samples go into which batch, with which random numbers. A set is added in
`config/data` and `in_memory_sets`, one of a new kind also in `factory`. May import config, errors
and random_state; torch inside functions where the driver can do without it.
"""

from raytrain_opt.data.base import Batch, DataInfo, TrainingData
from raytrain_opt.data.factory import load_shared_data, open_data

__all__ = ["Batch", "DataInfo", "TrainingData", "load_shared_data", "open_data"]
