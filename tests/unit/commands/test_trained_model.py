"""A trained network as others use it: loaded, predicting image files, exported."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from PIL import Image
from safetensors import safe_open
from torch import nn

from raytrain_opt import Job, cli, load_model, run
from raytrain_opt.commands.evaluate import evaluate_runs
from raytrain_opt.commands.export import FORMATS, Run, export
from raytrain_opt.data import load_shared_data
from raytrain_opt.data.transforms import describe_input
from raytrain_opt.errors import CheckpointError, DataError, JobError, RaytrainOptError
from raytrain_opt.train.trained_model import TrainedModel
from tests.support.cli_errors import command_error
from tests.support.documents import example
from tests.support.small_jobs import small_job

pytestmark = pytest.mark.usefixtures("without_plots")


def trained(folder: Path, **changes: Any) -> str:
    values = {
        "model": {"name": "small_cnn", "args": {"width": 8}},
        "data": "digits",
        "epochs": 1,
        "global_batch_size": 64,
        "learning_rate": {"policy": "schedule", "shape": "linear", "initial": 0.2},
        "optimizer": "SGD",
        "workers": {"count": 1, "threads": 1},
        "storage_path": str(folder),
    }
    return run(Job.model_validate(values | changes), in_process=True).run_dir


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> str:
    return trained(tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image folder: bright and dark rectangles of several sizes."""
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for split, images in (("train", 16), ("val", 6)):
        for name, level in (("bright", 200), ("dark", 20)):
            (folder / split / name).mkdir(parents=True)
            for i in range(images):
                size = (int(rng.integers(20, 40)), int(rng.integers(20, 40)), 3)
                pixels = (level + rng.integers(0, 50, size)).astype(np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def photo_run(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    data = {"name": "image_folder", "root": str(photos), "image_size": 16, "loader_workers": 0}
    return trained(tmp_path_factory.mktemp("run"), data=data, global_batch_size=8, epochs=3)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, [*arguments])


def test_a_loaded_model_makes_the_errors_that_evaluate_reports(digits: str) -> None:
    model = load_model(digits, device="cpu")
    arrays = load_shared_data(small_job(Path()).data)
    assert arrays is not None
    assert model.class_names == tuple("0123456789")
    assert (model.checkpoint, model.network.training) == ("epoch 1", False)
    predicted = model.probabilities(list(arrays.test_x)).argmax(1).numpy()
    [evaluated] = evaluate_runs([digits], ensemble=False).runs
    assert (predicted != arrays.test_y).mean() == pytest.approx(evaluated.metrics["top1_error"])
    single = load_model(f"{digits}/checkpoints/epoch-0001").network.state_dict()
    assert all(torch.equal(single[name], t) for name, t in model.network.state_dict().items())


def test_a_moved_checkpoint_needs_neither_job_nor_data(digits: str, tmp_path: Path) -> None:
    folder = tmp_path / "copied"
    folder.mkdir()
    weights = Path(digits, "checkpoints/epoch-0001/weights.safetensors")
    (folder / weights.name).write_bytes(weights.read_bytes())
    assert load_model(folder).sample_shape == (1, 8, 8)


def test_image_files_get_the_classes_of_their_folders(photo_run: str, photos: Path) -> None:
    result = invoke("predict", photo_run, str(photos / "val"), "--json")
    assert result.exit_code == 0, result.output
    predictions = json.loads(result.output)["predictions"]
    assert len(predictions) == 12
    [evaluated] = evaluate_runs([photo_run], ensemble=False).runs
    wrong = [p for p in predictions if Path(p["image"]).parent.name != p["classes"][0]["name"]]
    assert len(wrong) / 12 == pytest.approx(evaluated.metrics["top1_error"])


def test_a_run_under_a_uri(photo_run: str, photos: Path) -> None:
    images = f"{photos}/val/dark/0.png"
    result = invoke("predict", f"file://{photo_run}", images)
    assert result.exit_code == 0, result.output
    assert result.output.startswith(images)
    assert "dark" in result.output
    assert "bright" in result.output


def test_a_damaged_file_does_not_hide_the_others(
    photo_run: str, photos: Path, tmp_path: Path
) -> None:
    (tmp_path / "broken.png").write_bytes(b"no image")
    good = photos / "val/dark/0.png"
    result = invoke("predict", photo_run, str(tmp_path), str(good))
    assert result.exit_code == 1
    first, second = result.output.splitlines()
    assert first.startswith(f"{tmp_path}/broken.png  cannot be read: it is not an image (JPEG, ")
    assert second.startswith(f"{good}  ")


def test_gray_images_and_other_sizes_fit_the_network(digits: str) -> None:
    model = load_model(digits, device="cpu")
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8), dtype=np.uint8)
    exact = model.preprocess([pixels[..., None]])
    assert torch.equal(model.preprocess([pixels[None]]), exact)
    assert torch.equal(model.preprocess([Image.fromarray(pixels)]), exact)
    color = Image.fromarray(np.repeat(pixels[..., None], 3, axis=2))
    assert torch.allclose(model.preprocess([color]), exact, atol=0.02)
    assert model.preprocess([Image.new("RGB", (50, 20))]).shape == (1, 1, 8, 8)
    for wrong in (pixels, pixels[..., None] / 255):
        with pytest.raises(DataError, match=r"must have shape uint8 \(8, 8, 1\), but one has"):
            model.preprocess([wrong])


def test_wrong_arguments_of_predict(digits: str, tmp_path: Path) -> None:
    for images in (tmp_path, tmp_path / "missing.png"):
        assert "neither a file nor a folder with" in command_error("predict", digits, str(images))
    assert "RUN" in command_error("predict", str(tmp_path), str(tmp_path))


def test_networks_of_other_data_take_arrays(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).normal(size=(64, 3)), np.arange(64) % 2
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    files = [str(tmp_path / "x.npy"), str(tmp_path / "y.npy")]
    run_dir = trained(
        tmp_path / "runs",
        model="tests.unit.commands.test_trained_model:linear",
        data={"name": "arrays", "train": files, "test": files, "normalize": [[1.0], [2.0]]},
        global_batch_size=16,
        seed=1,
    )
    with pytest.raises(JobError, match="trust=True"):
        load_model(run_dir)
    model = load_model(run_dir, device="cpu", trust=True)
    assert model.class_names == ("0", "1")
    assert len(SLOPES) == 1, "the seed is that of the run"
    expected = model.network((torch.from_numpy(x[:5]).float() - 1) / 2).softmax(1)
    assert torch.allclose(model.probabilities(list(x[:5])), expected, atol=1e-6)
    assert "not images" in command_error("predict", run_dir, str(tmp_path), "--trust")


SLOPES = set[float]()


def linear(num_classes: int, sample_shape: tuple[int, ...]) -> nn.Module:
    SLOPES.add(slope := torch.rand(()).item())  # no part of the weights
    return nn.Sequential(nn.Linear(sample_shape[0], num_classes), nn.LeakyReLU(slope))


def test_a_network_of_a_script_is_found_by_that_script_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    network.__module__, network.__qualname__ = "__main__", "network"
    run_dir = trained(tmp_path, model=network)
    with pytest.raises(JobError, match="defined in the script that trained.*into a module, or"):
        load_model(run_dir, trust=True)
    monkeypatch.setattr("__main__.network", network, raising=False)
    assert load_model(run_dir, trust=True).class_names[0] == "0"


def test_weights_of_other_tools_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointError, match="was not written by a run"):
        load_model(tmp_path)


class TiedNetwork(nn.Sequential):
    """Two layers with one weight."""

    def __init__(self) -> None:
        layers = [nn.Linear(64, 64) for _ in range(2)]
        super().__init__(nn.Flatten(), *layers, nn.Linear(64, 10))
        layers[1].weight = layers[0].weight


def test_tied_weights_are_exported_as_safetensors(tmp_path: Path) -> None:
    run_dir = trained(tmp_path, model=f"{__name__}:TiedNetwork")
    model = load_model(run_dir, device="cpu", trust=True)
    vars(model)["sample_shape"] = (1, 9, 9)  # weights alone need no input that fits
    assert export(model, "safetensors", f"{tmp_path}/tied") == (None, None)
    with safe_open(f"{tmp_path}/tied", "pt") as file:
        assert torch.equal(file.get_tensor("1.weight"), file.get_tensor("2.weight"))


@pytest.mark.parametrize("name", ["torch_export", "safetensors"])
def test_exported_files_hold_the_network_and_its_metadata(
    digits: str, tmp_path: Path, name: str
) -> None:
    path = str(tmp_path / "model")
    result = invoke("export", digits, "--format", name, "--output", path)
    assert (result.exit_code, "outputs match" in result.output) == (0, name != "safetensors")
    model = load_model(digits, device="cpu")
    texts = {"metadata.json": ""}
    x = torch.randn(5, 1, 8, 8)
    if name == "safetensors":
        with safe_open(path, "pt") as file:
            texts["metadata.json"] = file.metadata()["raytrain_opt"]
            assert set(file.keys()) == set(model.network.state_dict())
    else:
        output = torch.export.load(path, extra_files=texts).module()(x)
        assert torch.allclose(output, model.network(x), atol=1e-5)
    assert json.loads(texts["metadata.json"])["class_names"] == list("0123456789")
    assert json.loads(texts["metadata.json"])["input"]["divide_by"] == 255


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A run of the documented classifier of texts of unequal length."""
    folder = tmp_path_factory.mktemp("texts")
    with pytest.MonkeyPatch.context() as monkeypatch:
        example("own-model-and-data.md", "pad_sequence", folder, monkeypatch, "texts")
        data = {"name": "texts:make_data", "collate": "texts:pad", "loader_workers": 0}
        yield trained(folder, model="texts:Classifier", data=data, optimizer="AdamW")


def test_without_images_the_test_set_is_predicted(texts: str, photo_run: str) -> None:
    for run_dir, sample in ((texts, "sample 0"), (photo_run, "val/bright/0.png")):
        output = invoke("predict", run_dir, "--trust", "--json").stdout
        predictions = json.loads(output)["predictions"]
        assert predictions[0]["image"].endswith(sample)
        wrong = [p for p in predictions if p["values"]["label"] != p["classes"][0]["name"]]
        [evaluated] = evaluate_runs([run_dir], ensemble=False, trust=True).runs
        assert len(predictions) == evaluated.samples
        assert len(wrong) / len(predictions) == pytest.approx(evaluated.metrics["top1_error"])
        assert invoke("predict", run_dir, "--trust").stdout.startswith(predictions[0]["image"])


@pytest.mark.parametrize("name", ["torch_export", "onnx"])
def test_an_exported_classifier_of_texts_takes_any_length(
    texts: str, tmp_path: Path, name: str
) -> None:
    if name == "onnx":
        pytest.importorskip("onnxscript")
        pytest.importorskip("onnxruntime")
    model, path = load_model(texts, device="cpu", trust=True), str(tmp_path / "model")
    result = invoke("export", texts, "--trust", "--format", name, "--output", path)
    assert "its outputs match" in result.output, result.output
    x = torch.randint(0, 6, [5, 57])
    if name == "onnx":
        session = __import__("onnxruntime").InferenceSession(path)
        output = torch.from_numpy(session.run(None, {"input": x.numpy()})[0])
    else:
        output = torch.export.load(path).module()(x)
    assert torch.allclose(output, model.network(x), atol=1e-4)
    with pytest.raises(DataError, match="your own collate function go to classify"):
        model.probabilities([x[0], x[1, :3]])


def test_a_network_that_cannot_be_exported_names_its_input(texts: str, tmp_path: Path) -> None:
    model = load_model(texts, device="cpu", trust=True)  # random numbers are no words
    with pytest.raises(RaytrainOptError, match=r"called with a tensor torch.float32 \[2, \d+\]"):
        export(model, "torch_export", str(tmp_path / "model"))


def test_onnx(digits: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    path = str(tmp_path / "model.onnx")
    result = invoke("export", digits, "--format", "onnx", "--output", path)
    assert result.exit_code == 0, result.output
    session, model = onnxruntime.InferenceSession(path), load_model(digits, device="cpu")
    x = torch.randn(5, 1, 8, 8)
    [output] = session.run(None, {"input": x.numpy()})
    assert torch.allclose(torch.from_numpy(output), model.network(x), atol=1e-4)
    metadata = session.get_modelmeta().custom_metadata_map
    assert json.loads(metadata["raytrain_opt"])["sample_shape"] == [1, 8, 8]
    assert json.loads(metadata["raytrain_opt"])["input"]["divide_by"] == 255


def test_onnx_without_its_packages_names_the_extra(
    digits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    message = command_error("export", digits, "--format", "onnx", "--output", str(tmp_path / "m"))
    assert "raytrain_opt[onnx]" in message


def test_an_export_compares_a_picture_with_predict(
    digits: str, photo_run: str, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stretched gray and cropped color images; then metadata that lack a step."""
    output = invoke("export", photo_run, "--format", "safetensors", "--output", f"{tmp_path}/a")
    assert "\na picture of the test set, prepared as" in output.stdout
    picture = next(photos.rglob("*.png")).read_bytes()
    for run_dir in (digits, photo_run):
        model = load_model(run_dir, device="cpu")
        assert (export(model, "safetensors", f"{tmp_path}/a", picture)[1] or 1) < 0.1
    (tmp_path / "a").unlink()

    def without_scaling(*arguments: Any) -> dict[str, Any]:
        return {**describe_input(*arguments), "divide_by": 250}

    monkeypatch.setattr("raytrain_opt.commands.export.describe_input", without_scaling)
    with pytest.raises(
        RaytrainOptError, match=r"differs from what predict .* no file was written"
    ):
        export(model, "safetensors", f"{tmp_path}/b", picture)
    assert not list(tmp_path.iterdir())


def test_a_network_that_exports_wrongly_writes_no_file(
    digits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(digits, device="cpu")

    def wrong(model: TrainedModel, _: Sequence[torch.Tensor]) -> tuple[bytes, Run]:
        return b"wrong", lambda x: model.network(x) + len(x)

    monkeypatch.setitem(FORMATS, "safetensors", wrong)
    with pytest.raises(RaytrainOptError, match="computes something else"):
        export(model, "safetensors", str(tmp_path / "model"))
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_that_was_not_kept_names_those_that_were(tmp_path: Path) -> None:
    checkpoints = trained(tmp_path, epochs=3, evaluate={"every_epochs": 3}) + "/checkpoints"
    with pytest.raises(JobError, match=r"complete checkpoints: epoch-0002, epoch-0003 \(given"):
        load_model(f"{checkpoints}/epoch-0001")
