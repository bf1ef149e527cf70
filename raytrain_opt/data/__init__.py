"""Training data: small sets, .npy arrays, image folders, shards, the user's own Datasets.

Start with `base`: `TrainingData` is what the training loop needs of any data set. Two classes
implement it: `in_memory.InMemoryData` (arrays, read by `in_memory_sets`) and
`loader.DataLoaderData` (samples read one at a time by loader processes: `batch_reader` loads a
batch, `image_folder`, `shards` and `user_datasets` are its sources).
`sampling` decides which samples go into which batch, with which random numbers; `images` decodes
files; `transforms` crops, mirrors, normalizes and augments.
May import config, errors and random_state; torch inside functions where the driver can do
without it.
"""

from raytrain_opt.data.base import Batch, DataInfo, TrainingData
from raytrain_opt.data.factory import load_shared_data, open_data

__all__ = ["Batch", "DataInfo", "TrainingData", "load_shared_data", "open_data"]
