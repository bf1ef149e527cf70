"""A trained network as others use it: with its preprocessing and class names, without the data."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from raytrain_opt.config.load import refuse_functions
from raytrain_opt.config.schema import CheckpointSection, ModelSection, TaskSection
from raytrain_opt.config.section import is_function_name, is_instance
from raytrain_opt.data.base import DataInfo
from raytrain_opt.data.transforms import Preprocessing, make_transform
from raytrain_opt.data.user_datasets import KEPT
from raytrain_opt.errors import CheckpointError, DataError, JobError, Problem
from raytrain_opt.models import build_model
from raytrain_opt.paths import RunPaths, readable
from raytrain_opt.storage import is_remote, local_path
from raytrain_opt.train.checkpoint import (
    WEIGHTS,
    Checkpoint,
    Checkpoints,
    find_damage,
    read_index,
    read_metadata,
    read_weights,
)

_KEY = "raytrain_opt"
# Brightness of red, green and blue in a gray image (ITU-R BT.601), as in PIL.
_LUMA = (0.299, 0.587, 0.114)


@dataclass(frozen=True)
class ModelDescription:
    """What a checkpoint says about its network. `class_names`: numbers if there are no names."""

    model: ModelSection
    sample_shape: tuple[int, ...]
    class_names: tuple[str, ...]
    preprocessing: Preprocessing
    task: TaskSection = TaskSection()
    seed: int = 0  # with which the network was built


_DESCRIPTION = TypeAdapter(ModelDescription)


def model_metadata(
    model: ModelSection, task: TaskSection, info: DataInfo, seed: int = 0
) -> dict[str, str]:
    """Return the metadata of the weights of a network trained on such data."""
    assert info.preprocessing is not None  # of all data that are read
    network = model.model_copy(update={"weights": None, "freeze": []})
    description = ModelDescription(
        network, info.sample_shape, info.class_labels, info.preprocessing, task, seed
    )
    return {_KEY: _DESCRIPTION.dump_json(description).decode()}


@dataclass(frozen=True)
class SavedWeights:
    """A checkpoint folder that an argument names: a run's latest, or a single one."""

    folder: Path
    reached: str
    job_file: Path  # may be missing beside a single checkpoint
    notes: tuple[str, ...] = ()  # on later checkpoints that are damaged


def find_weights(run: str | Path, argument: str) -> SavedWeights:
    """Find a run's latest checkpoint, or a single one. Raises JobError, CheckpointError."""
    with readable(str(run), argument):
        single = None if is_remote(str(run)) else _find_single(local_path(str(run)), argument)
    if single is not None:
        return single
    paths = RunPaths.existing(str(run), argument, write=False)
    checkpoints = Checkpoints(paths.checkpoints, CheckpointSection())
    notes = tuple(f"{damage}; the one before is used" for damage in checkpoints.drop_damaged())
    if (latest := checkpoints.latest) is None:
        raise JobError([Problem(argument, "has no checkpoint yet", repr(str(run)))], "arguments")
    return SavedWeights(paths.checkpoints / latest.folder, latest.text, paths.job, notes)


def _find_single(path: Path, argument: str) -> SavedWeights | None:
    """Return the checkpoint whose folder, or whose weights in it, the path is; check the index."""
    path = path.resolve()
    folder = path.parent if path.name == WEIGHTS else path
    is_moved, saved = folder.parent.name != "checkpoints", dict[str, Checkpoint]()
    try:
        saved = {checkpoint.folder: checkpoint for checkpoint in read_index(folder.parent)}
    except CheckpointError:
        if not is_moved:  # else the index is of something else
            raise
    if folder.name in saved:
        if damage := find_damage(folder.parent, saved[folder.name], [WEIGHTS]):
            rule = f"restore it from a backup, or use another one of {', '.join(saved)}"
            raise CheckpointError(f"{argument}: {damage}; {rule}")
    elif saved and not is_moved:
        rule = f"is not among the complete checkpoints: {', '.join(saved)}"
        raise JobError([Problem(argument, rule, repr(str(path)))], "arguments")
    elif not (folder / WEIGHTS).is_file():
        return None
    return SavedWeights(folder, folder.name, folder.parents[1] / "job.yaml")


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainedModel(ModelDescription):
    """A network in eval mode with its description, and that as text (`metadata`)."""

    network: nn.Module
    device: torch.device
    checkpoint: str
    metadata: dict[str, str]

    def preprocess(self, samples: Sequence[Any]) -> Tensor:
        """Return a batch for the network, on its device.

        Samples are arrays as the training data had them (images: uint8, channels last or first),
        or images of any size: PIL's, paths of files, or their bytes. Raises DataError for an array
        of another shape, OSError or ImageError for a file that cannot be read.
        """
        is_image, shape = self.preprocessing.is_image, self.sample_shape
        if is_image:
            shape = (*shape[1:], shape[0])
        arrays = [self._image(sample) if is_image else np.asarray(sample) for sample in samples]
        if is_image:  # channels first, where that can be told
            arrays = [
                a.transpose(1, 2, 0) if shape != a.shape == self.sample_shape else a
                for a in arrays
            ]
        for array in arrays:
            if array.shape != shape or (is_image and array.dtype != np.uint8):
                kind = "uint8 " if is_image else ""
                rule = f"must have shape {kind}{shape}, but one has {array.dtype} {array.shape}; "
                rule += "batches of your own collate function go to classify(x)"
                raise DataError("samples", rule)
        batch = torch.from_numpy(np.stack(arrays)).to(self.device)
        if not is_image and batch.dtype not in KEPT:
            batch = batch.float()
        return make_transform(self.preprocessing, self.sample_shape, self.device, False)(batch)

    def probabilities(self, samples: Sequence[Any]) -> Tensor:
        """Return the probability of each class, [samples, classes], on the CPU."""
        if not len(samples):
            return torch.empty(0, len(self.class_names))
        return self.classify(self.preprocess(samples))

    def classify(self, batch: Tensor) -> Tensor:
        """Return probabilities [samples, classes] of preprocessed samples. Raises JobError."""
        self.task.require_classification("a prediction")
        with torch.no_grad():
            output: Tensor = self.network(batch)
        return output.float().softmax(dim=1).cpu()

    def _image(self, sample: Any) -> Any:
        from raytrain_opt.data.images import center_crop, read_image_file, stretch

        if isinstance(sample, Image.Image):
            sample = ImageOps.exif_transpose(sample)
            is_gray = sample.mode[0] in "IF"  # of 16 bits or more, which the decoder judges
            image = sample if is_gray else sample.convert("RGB")
            image.save(file := BytesIO(), "TIFF", compression="raw")  # whatever its file has
            sample = file.getvalue()
        elif isinstance(sample, (str, Path)):
            sample = read_image_file(sample)
        if not isinstance(sample, bytes):
            return np.asarray(sample)
        channels, height, width = self.sample_shape
        crop = self.preprocessing.center_crop
        pixels = center_crop(sample, height) if crop else stretch(sample, height, width)
        if channels != 1:
            return pixels.numpy()
        return (pixels.float() @ torch.tensor(_LUMA))[..., None].round().byte().numpy()


def load_model(
    run: str | Path,
    *,
    model: nn.Module | None = None,
    device: str | torch.device | None = None,
    trust: bool = False,
) -> TrainedModel:
    """Load the network of a run or of a checkpoint; needs neither its data nor a GPU.

    run: run directory or URI (its latest checkpoint), or the folder of one checkpoint.
    model: the module that the job was given, which gets the weights in a copy.
    device: default is a GPU if torch sees one, else the CPU.
    trust: run the function of your own that the run names as its model.

    Warns of damaged later checkpoints. Raises JobError, CheckpointError.
    """
    saved = find_weights(run, "RUN")
    for note in saved.notes:
        warnings.warn(note, stacklevel=2)
    metadata = read_metadata(saved.folder)
    description = read_description(saved.folder, metadata)
    name = description.model.name
    if model is not None:
        description = replace(description, model=ModelSection(name=model))
    elif is_function_name(name) and (not trust or is_instance(name)):
        refuse_functions([("model.name", name)], str(run))
    network = build_model(
        description.model,
        num_classes=len(description.class_names),
        sample_shape=description.sample_shape,
        seed=description.seed,
    )
    try:
        network.load_state_dict(read_weights(saved.folder))
    except RuntimeError as error:
        rule = f"the weights do not match the network {description.model.name}: {error}"
        raise JobError([Problem("RUN", rule, repr(str(run)))], "arguments") from error
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return TrainedModel(
        **vars(description),
        network=network.to(target).eval(),
        device=target,
        checkpoint=saved.reached,
        metadata=metadata,
    )


def read_description(folder: Path, metadata: dict[str, str]) -> ModelDescription:
    """Parse the metadata of the weights in a checkpoint. Raises CheckpointError."""
    try:
        return _DESCRIPTION.validate_json(metadata[_KEY])
    except (KeyError, ValidationError) as error:
        raise CheckpointError(
            f"{folder}/weights.safetensors does not say how to build its network (metadata "
            f"{_KEY!r}): it was not written by a run of this package"
        ) from error
