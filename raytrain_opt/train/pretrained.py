"""Start from weights of a file, a run or torchvision, which the driver reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

from raytrain_opt.config.error_messages import nearest
from raytrain_opt.config.schema import ModelSection
from raytrain_opt.data.base import DataInfo
from raytrain_opt.errors import CheckpointError, JobError, Problem, listed
from raytrain_opt.models import build_model
from raytrain_opt.storage import is_remote, local_path
from raytrain_opt.train.checkpoint import WEIGHTS, read_weights
from raytrain_opt.train.state import PackedTensor, TrainingState
from raytrain_opt.train.trained_model import find_weights

if TYPE_CHECKING:
    from torch import Tensor

_PATH = "model.weights"
# Where training code keeps a network's tensors in a larger file.
_KEYS = ("state_dict", "model_state_dict", "model", "module", "network", "net", "weights")
# What timm and transformers write into a folder.
_FOLDER_FILES = ("model.safetensors", "pytorch_model.bin")
# Names in the files of torchvision's DenseNets and ViTs, and what they are now.
_OLD_NAMES = (
    (re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12]\.)"), r"\1\2"),
    (re.compile(r"mlp\.linear_1\."), "mlp.0."),
    (re.compile(r"mlp\.linear_2\."), "mlp.3."),
)
# Heads of GoogLeNet and Inception that torchvision has for training only.
_AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")


def read_pretrained(section: ModelSection) -> dict[str, Tensor]:
    """Read the tensors that `model.weights` names: a file, a run or torchvision's; or JobError."""
    if names_torchvision_weights(section):
        return _download(section)
    weights = str(section.weights)
    try:
        path = None if is_remote(weights) else local_path(weights)
        for file in () if path is None else (path, *(path / name for name in _FOLDER_FILES)):
            # Of the file of a checkpoint, the digest may be known.
            if file.is_file() and file.resolve().name != WEIGHTS:
                return _read_file(file)
        return read_weights(find_weights(weights, _PATH).folder)
    except CheckpointError as error:
        raise JobError([Problem(_PATH, str(error), repr(weights))]) from error


def names_torchvision_weights(section: ModelSection) -> bool:
    """Return whether the weights are torchvision's; raises JobError for an unknown name."""
    weights = section.weights
    if weights is None or is_remote(weights) or local_path(weights).exists():
        return False
    _torchvision_weights(section)
    return True


def fit_pretrained(
    own: Mapping[str, Tensor], pretrained: Mapping[str, Tensor], num_classes: int
) -> dict[str, Tensor]:
    """Return the pretrained tensors that the network takes; its head may be missing.

    The head is the one layer whose tensors differ in their first axis only, which is
    `num_classes` in the network. BatchNorm's counts may be missing; torchvision's old names and
    auxiliary heads fit as well. A prefix that all names have is removed where none fits with it
    (`foreign_prefix`). Tensors that are one in the network need one name. Raises JobError naming
    the tensors that do not fit.
    """
    prefix = foreign_prefix(own, pretrained)
    pretrained = {name.removeprefix(prefix): tensor for name, tensor in pretrained.items()}
    counts = {n: t for n, t in own.items() if n.endswith("num_batches_tracked")}
    pretrained = counts | {
        name if name in own else _new_name(name): tensor
        for name, tensor in pretrained.items()
        if name in own or not name.startswith(_AUXILIARY)
    }
    places = {name: (tensor.data_ptr(), tensor.shape) for name, tensor in own.items()}
    shared = {places[name]: tensor for name, tensor in pretrained.items() if name in own}
    pretrained |= {
        name: shared[place]
        for name, place in places.items()
        if name not in pretrained and own[name].numel() and place in shared
    }
    different = {n for n in own if n in pretrained and own[n].shape != pretrained[n].shape}
    heads = {name.rpartition(".")[0] for name in different}
    fits = len(heads) <= 1 and all(
        own[n].shape[1:] == pretrained[n].shape[1:] and own[n].shape[:1] == (num_classes,)
        for n in different
    )
    mismatched = set() if fits else different
    shapes = {f"{n} {list(pretrained[n].shape)} for {list(own[n].shape)}" for n in mismatched}
    common = [n for n in own if n in pretrained and own[n].is_floating_point()]
    numbers = ((n, pretrained[n]) for n in common)
    bad = {n for n, t in numbers if not (t.is_floating_point() and t.isfinite().all())}
    if problems := [
        *_problems("are missing in the weights", set(own) - set(pretrained)),
        *_problems("are not in this network", set(pretrained) - set(own)),
        *_problems("have another shape", shapes),
        *_problems("hold no finite numbers, or quantized ones", bad),
    ]:
        raise JobError(problems)
    return {name: tensor for name, tensor in pretrained.items() if name not in different}


def _new_name(name: str) -> str:
    return next((p.sub(new, name) for p, new in _OLD_NAMES if p.search(name)), name)


def foreign_prefix(own: Mapping[str, Tensor], pretrained: Mapping[str, Tensor]) -> str:
    """Return what DDP (`module.`), torch.compile or a wrapper put before every name, or ""."""
    prefix, names = "", set(pretrained)
    while names and names.isdisjoint(own):
        first = {name.partition(".")[0] for name in names}
        if len(first) > 1 or not all("." in name for name in names):
            return ""
        prefix += f"{first.pop()}."
        names = {name.partition(".")[2] for name in names}
    return prefix


def start_from_pretrained(
    state: TrainingState, section: ModelSection, info: DataInfo
) -> tuple[TrainingState, str]:
    """Return the initial state with pretrained weights, and what happened."""
    network = build_model(
        section, num_classes=info.num_classes, sample_shape=info.sample_shape, seed=0
    )
    own, pretrained = network.state_dict(), read_pretrained(section)
    taken = fit_pretrained(own, pretrained, info.num_classes)
    packed = {
        f"model.{n}": PackedTensor.from_tensor(t.to(own[n].dtype), copy=False)
        for n, t in taken.items()
    }
    text = f"starting from the weights of {section.weights}"
    if prefix := foreign_prefix(own, pretrained):
        text += f", without the prefix {prefix!r} of their names"
    if head := sorted(set(own) - set(taken)):
        text += f"; new for {info.num_classes} classes: {', '.join(head)}"
    return replace(state, tensors={**state.tensors, **packed}), text


def _problems(what: str, names: set[str]) -> list[Problem]:
    return [Problem(_PATH, f"tensors {what}: {listed(sorted(names))}")] if names else []


def _read_file(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file, or a `state_dict` saved by torch; runs no code in it."""
    import torch
    from safetensors.torch import load_file

    try:
        with path.open("rb") as file:  # torch.load would judge a path by its suffix
            head = file.read(9)
            if head.endswith(b"{"):  # of safetensors
                return load_file(path)
            if not head.startswith((b"PK", b"\x80")):  # an archive, or a pickle
                raise ValueError(f"it begins with {head!r}, unlike files of torch or safetensors")
            file.seek(0)
            content = torch.load(file, weights_only=True, map_location="cpu")
    except Exception as error:  # damage can look like anything to an unpickler
        reason, hint = str(error).partition("\n")[0], None
        rule = f"cannot be read as tensors ({type(error).__name__}: {reason})"
        if isinstance(error, UnpicklingError) or "TorchScript" in reason:
            rule = "holds other objects than tensors, perhaps a network, and would run their code"
            hint = "save the tensors alone: torch.save(network.state_dict(), PATH)"
        raise JobError([Problem(_PATH, rule, repr(str(path)), hint)]) from error
    nested = [content[key] for key in _KEYS if key in content] if isinstance(content, dict) else []
    for tensors in (content, *nested):
        pairs = tensors.items() if isinstance(tensors, dict) else ()
        if pairs and all(isinstance(name, str) and torch.is_tensor(t) for name, t in pairs):
            return dict(pairs)
    rule = "must be a state_dict, a dictionary of tensors by name, or hold one as 'state_dict'"
    raise JobError([Problem(_PATH, rule, repr(str(path)))])


def _torchvision_weights(section: ModelSection) -> Any:
    from torchvision import models

    weights = str(section.weights)
    rule = "is no file, no run directory and no weights of torchvision for this network"
    try:
        available = models.get_model_weights(str(section.name))
    except ValueError:
        raise JobError([Problem(_PATH, rule, repr(weights))]) from None
    name = weights.removeprefix(f"{available.__name__}.")
    if name not in available.__members__:
        valid = sorted(available.__members__)
        hint = nearest(name, valid) or f"torchvision has {', '.join(valid)}"
        raise JobError([Problem(_PATH, rule, repr(weights), hint)])
    return available[name]


def _download(section: ModelSection) -> dict[str, Tensor]:
    weights = _torchvision_weights(section)
    try:
        tensors: dict[str, Tensor] = weights.get_state_dict(progress=False, check_hash=True)
    except (OSError, RuntimeError) as error:
        rule = f"could not be downloaded: {error}"
        raise JobError([Problem(_PATH, rule, repr(section.weights))]) from error
    return tensors
