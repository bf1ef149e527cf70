"""Write the network of a run in a format of other tools, after a check of what it computes.

Every file takes preprocessed input [batch, *sample_shape], of any size and any length of padded
samples, and returns [batch, classes]. It carries the metadata of the checkpoint.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from safetensors.torch import load, save
from torch import Tensor, nn

from raytrain_opt.commands.evaluate import find_run, trained_learner
from raytrain_opt.config.load import load_job
from raytrain_opt.data import load_shared_data
from raytrain_opt.data.nesting import leaves
from raytrain_opt.data.source import ImageSource
from raytrain_opt.data.transforms import describe_input
from raytrain_opt.errors import JobError, Problem, RaytrainOptError
from raytrain_opt.storage import local_path, write_bytes
from raytrain_opt.train.trained_model import TrainedModel, find_weights

# Sizes of the batches of the check: first the one that the network is traced with. Of sixteen
# padded samples, hardly ever the first is the longest.
_BATCH_SIZES = (2, 1, 3, 16)
# Largest difference to the network's outputs, in parts of the largest output: rounding of float32
# in another order of the same operations.
_TOLERANCE = 1e-4
# Libraries resize to values that differ by one of 255, and gray is rounded again.
_PIXEL_TOLERANCE = 2.01

Run = Callable[[Tensor], Tensor]
# Turns a model into the bytes of a file, and these into a function again; None of weights alone.
Convert = Callable[[TrainedModel, Sequence[Tensor]], tuple[bytes, Run | None]]


def export(
    model: TrainedModel,
    name: str,
    path: str,
    picture: bytes | None = None,
    batches: Sequence[Tensor] = (),
) -> tuple[float | None, float | None]:
    """Write the network as format `name`; return the largest differences that its check measured.

    Of outputs, in parts of the largest one, or None of weights alone; and of the probabilities of
    `picture`, an image file that another library prepares as the file's metadata say, to what
    `predict` returns; None without one. `model` is on the CPU. `batches`: of `_BATCH_SIZES`
    samples; default is random numbers. Raises JobError when packages for the format are missing,
    RaytrainOptError when the network cannot be exported or computes something else; then no file
    is written.
    """
    generator, shape = torch.Generator().manual_seed(0), model.sample_shape
    inputs = batches or [torch.randn(n, *shape, generator=generator) for n in _BATCH_SIZES]
    try:
        content, exported = FORMATS[name](model, inputs)
        difference = None  # of weights alone, which a network of several inputs has, too
        if exported is not None:
            difference = max(_difference(model.network, exported, x) for x in inputs)
        from_file = None
        if picture and model.preprocessing.is_image and model.task.is_classification:
            from_file = _file_difference(model, exported or model.network, picture)
    except ImportError as error:
        rule = f"needs packages that are not installed: {error}"
        hint = "pip install 'raytrain_opt[onnx]'"
        raise JobError([Problem("--format", rule, name, hint)], "arguments") from error
    except Exception as error:
        if isinstance(error, RaytrainOptError):
            raise
        raise RaytrainOptError(
            f"this network cannot be exported as {name}, called with a tensor "
            f"{inputs[0].dtype} {list(inputs[0].shape)}: {type(error).__name__}: {error}; "
            "safetensors holds the weights alone"
        ) from error
    if difference is not None and not difference <= _TOLERANCE:
        raise RaytrainOptError(
            f"the network exported as {name} computes something else: its outputs differ by "
            f"{difference:.2g} of the largest one; no file was written. Does its forward depend "
            "on values of the input, or on random numbers?"
        )
    write_bytes(local_path(path), content)
    return difference, from_file


def first_test_samples(run: str, trust: bool) -> tuple[bytes | None, list[Tensor]]:
    """Return the first image file of a run's test set, and batches of the user's own Datasets.

    Of batches with several tensors the first one. Nothing of data that are not on this machine.
    """
    job_file = find_weights(run, "RUN_DIR").job_file
    data = load_job(job_file).data if job_file.is_file() else None
    if data is None or not data.on_nodes:
        return None, []
    try:
        if trust and data.any_samples:
            with trained_learner(find_run(run, trust)) as learner:
                batches = [learner.data.first_samples("test", n) for n in _BATCH_SIZES]
                return None, [next(leaves(batch.x)).cpu() for batch in batches]
        source = load_shared_data(data)
        return source.content("test", 0) if isinstance(source, ImageSource) else None, []
    except (RaytrainOptError, OSError, ValueError):  # on another machine, or damaged
        return None, []


def _file_difference(model: TrainedModel, exported: Run, picture: bytes) -> float:
    """Return how far the probabilities of an image file differ from those of `predict`."""
    _, height, width = model.sample_shape
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(picture))).convert("RGB")
    # A decoder halves larger ones, which other libraries do not.
    factor = max(1, min(image.height // (2 * height), image.width // (2 * width)))
    small = image.reduce(factor)
    steps = json.loads(_metadata(model)["raytrain_opt"])["input"]
    x, expected = prepare(small, steps), model.preprocess([small])
    scale = 255 * torch.tensor(steps.get("then_divide_by", [1.0])).view(-1, 1, 1)
    pixels = float((scale * (x - expected)).abs().max())
    if not pixels <= _PIXEL_TOLERANCE:  # the metadata describe something else
        raise RaytrainOptError(
            "a picture prepared as the metadata say differs from what predict prepares by "
            f"{pixels:.3g} of 255; no file was written"
        )
    with torch.no_grad():
        output = exported(prepare(image, steps)).float().softmax(dim=1)
    return float((output - model.probabilities([picture])).abs().max())


def prepare(image: Image.Image, steps: Mapping[str, Any]) -> Tensor:
    """Return a batch of one RGB image, prepared with Pillow and numpy as `input` describes."""
    resize = steps["resize"]
    if side := resize.get("shorter_side"):
        scale = side / min(image.size)
        width, height = (side if n == min(image.size) else int(n * scale) for n in image.size)
    else:
        width, height = resize["width"], resize["height"]
    pixels = np.asarray(image.resize((width, height), Image.Resampling.BILINEAR))
    if crop := steps.get("center_crop"):
        top, left = ((a - b) // 2 for a, b in zip(pixels.shape, crop.values(), strict=False))
        pixels = pixels[top : top + crop["height"], left : left + crop["width"]]
    if steps["shape"][1] == 1:
        pixels = np.round(pixels @ np.array([0.299, 0.587, 0.114]))[..., None]
    x = pixels / steps["divide_by"]
    if "subtract" in steps:
        x = (x - np.array(steps["subtract"])) / np.array(steps["then_divide_by"])
    return torch.from_numpy(x).permute(2, 0, 1)[None].float().contiguous()


def _difference(network: nn.Module, exported: Run, x: Tensor) -> float:
    with torch.no_grad():
        expected, output = network(x), exported(x)
    return float((output - expected).abs().max() / expected.abs().max().clamp(min=1e-12))


def _torch_export(model: TrainedModel, inputs: Sequence[Tensor]) -> tuple[bytes, Run]:
    buffer, shapes = io.BytesIO(), _dynamic_shapes(inputs)
    program = torch.export.export(model.network, (inputs[0],), dynamic_shapes=shapes)
    metadata = {"metadata.json": _metadata(model)["raytrain_opt"]}
    torch.export.save(program, buffer, extra_files=metadata)
    buffer.seek(0)
    return buffer.getvalue(), torch.export.load(buffer).module()


def _dynamic_shapes(inputs: Sequence[Tensor]) -> tuple[dict[int, Any]]:
    """Return that a batch has any size, and padded samples any length that the network takes."""
    lengths = range(1, inputs[0].dim()) if len({x.shape[1:] for x in inputs}) > 1 else ()
    return ({0: torch.export.Dim("batch"), **dict.fromkeys(lengths, torch.export.Dim.AUTO)},)


def _onnx(model: TrainedModel, inputs: Sequence[Tensor]) -> tuple[bytes, Run]:
    import onnxruntime  # of the check: fail before the export, which takes seconds

    program = torch.onnx.export(
        model.network,
        (inputs[0],),
        dynamo=True,
        verbose=False,
        input_names=["input"],
        output_names=["output"],
        dynamic_shapes=_dynamic_shapes(inputs),
    )
    assert program is not None  # with dynamo=True
    program.model.metadata_props.update(_metadata(model))
    content: bytes = program.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return content, lambda x: torch.from_numpy(session.run(None, {"input": x.numpy()})[0])


def _safetensors(model: TrainedModel, _: Sequence[Tensor]) -> tuple[bytes, None]:
    # Copies: the format has no tensors that share memory, as tied weights do.
    state = model.network.state_dict().items()
    tensors = {name: value.clone(memory_format=torch.contiguous_format) for name, value in state}
    content: bytes = save(tensors, _metadata(model))
    deepcopy(model.network).load_state_dict(load(content))
    return content, None


def _metadata(model: TrainedModel) -> dict[str, str]:
    """Return the metadata of the weights, with how to prepare an input."""
    description = json.loads(model.metadata["raytrain_opt"])
    description["input"] = describe_input(model.preprocessing, model.sample_shape)
    return {"raytrain_opt": json.dumps(description)}


FORMATS: dict[str, Convert] = {
    "torch_export": _torch_export,
    "onnx": _onnx,
    "safetensors": _safetensors,
}
