"""Starting from trained weights, and training only a part of the network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from raytrain_opt import Job, run
from raytrain_opt.config.schema import ModelSection
from raytrain_opt.data import load_shared_data
from raytrain_opt.data.in_memory_sets import DatasetArrays
from raytrain_opt.errors import JobError
from raytrain_opt.execution.check import try_job, try_local_job
from raytrain_opt.models import build_model
from raytrain_opt.results import Steps
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.learner_config import LearnerConfig
from raytrain_opt.train.micro_batches import MicroBatches
from raytrain_opt.train.pretrained import fit_pretrained, foreign_prefix, read_pretrained
from tests.support.small_jobs import small_job

pytestmark = pytest.mark.usefixtures("without_plots")

CLASSES = 5


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The digits 0 to 4, as arrays: another number of classes than the pretraining has."""
    folder, arrays = tmp_path_factory.mktemp("data"), load_shared_data(small_job(Path()).data)
    assert isinstance(arrays, DatasetArrays)
    paths = {}
    for split in ("train", "test"):
        x, y = getattr(arrays, f"{split}_x"), getattr(arrays, f"{split}_y")
        paths[split] = [str(folder / f"{split}_{name}.npy") for name in "xy"]
        for path, array in zip(paths[split], (x[y < CLASSES], y[y < CLASSES]), strict=True):
            np.save(path, array)
    return paths


def job(folder: Path, model: dict[str, Any], **changes: Any) -> Job:
    values = {
        "model": {"name": "small_cnn", "args": {"width": 8}, **model},
        "epochs": 1,
        "learning_rate": {"policy": "schedule", "shape": "linear", "initial": 0.05},
        "optimizer": {"name": "SGD", "lr_multipliers": {"11.*": 4}},
        "workers": {"count": 1, "threads": 1},
        "average": None,
    }
    return small_job(folder, **(values | changes))


def weights_of(run_dir: str) -> dict[str, Tensor]:
    return load_file(max(Path(run_dir).glob("checkpoints/epoch-*/weights.safetensors")))


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run on all ten digits."""
    return run(job(tmp_path_factory.mktemp("runs"), {}), in_process=True).run_dir


@pytest.mark.parametrize("policy", ["schedule", "stpt"])
def test_frozen_layers_keep_the_weights_of_the_run_and_the_rest_is_trained(
    pretrained: str,
    halves: dict[str, list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    policy: str,
) -> None:
    changes = {} if policy == "schedule" else {"learning_rate": {"policy": "stpt", "alpha": 5}}
    # The first two convolutions with their BatchNorm layers: modules 0, 1 and 3, 4.
    model = {"weights": pretrained, "freeze": ["[0134].*"]}
    tuned = run(
        job(tmp_path, model, data={"name": "arrays", **halves}, **changes), in_process=True
    )
    before, after = weights_of(pretrained), weights_of(tuned.run_dir)
    frozen = {name for name in before if name.partition(".")[0] in ("0", "1", "3", "4")}
    assert {"0.weight", "1.running_mean", "4.running_var"} <= frozen
    assert all(torch.equal(before[name], after[name]) for name in frozen)
    for name in ("6.weight", "7.running_mean"):
        assert not torch.equal(before[name], after[name])
    assert after["11.weight"].shape[0] == CLASSES
    out = capsys.readouterr()
    assert "new for 5 classes: 11.bias, 11.weight" in out.out + out.err


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "Muon", "LARS", "ScheduleFreeSGD"])
def test_no_optimizer_moves_frozen_weights(tmp_path: Path, optimizer: str) -> None:
    """Not even by weight decay or an average."""
    changes: dict[str, Any] = {"learning_rate": {"policy": "stpt_horizon"}, "optimizer": optimizer}
    if optimizer != "ScheduleFreeSGD":
        changes["average"] = "auto"
    settings = job(tmp_path, {"freeze": ["[0134].*"]}, **changes)
    arrays = load_shared_data(settings.data)
    learner = Learner(LearnerConfig.from_job(settings), arrays, torch.device("cpu"))
    before = {name: t.clone() for name, t in learner.model.state_dict().items()}
    learner.train(1, Steps(0, (0.1,) * 3), MicroBatches(range(2), 2))
    learner.finish_phase(fresh=True)
    moved = {n for n, t in learner.model.state_dict().items() if not torch.equal(t, before[n])}
    assert {name.partition(".")[0] for name in moved} == {"6", "7", "11"}


def test_a_run_starts_from_the_weights_of_a_file(pretrained: str, tmp_path: Path) -> None:
    """A rate of almost nothing leaves them as they are, the head of equal size included."""
    for name in ("weights.safetensors", "weights.pt"):
        file = tmp_path / name
        tensors = weights_of(pretrained)
        save_file(tensors, file) if file.suffix != ".pt" else torch.save(tensors, file)
        rate = {"policy": "schedule", "shape": "constant", "initial": 1e-30}
        tuned = run(job(tmp_path, {"weights": str(file)}, learning_rate=rate), in_process=True)
        after = weights_of(tuned.run_dir)
        assert torch.equal(after["11.weight"], tensors["11.weight"])


def test_a_resumed_run_needs_no_weights_any_more(tmp_path: Path) -> None:
    missing = job(tmp_path, {"weights": str(tmp_path / "gone.safetensors")})
    try_job(missing, resumed=True)
    with pytest.raises(JobError, match=r"model\.weights: is no file, no run directory"):
        try_job(missing)


def linear(outputs: int, **extra: Tensor) -> dict[str, Tensor]:
    return {"body": torch.ones(4), "head.weight": torch.ones(outputs, 4), **extra}


def test_only_a_head_for_other_classes_may_differ() -> None:
    assert set(fit_pretrained(linear(5), linear(5), 5)) == {"body", "head.weight"}
    assert set(fit_pretrained(linear(5), linear(10), 5)) == {"body"}
    own = linear(5, new=torch.ones(1))
    with pytest.raises(JobError, match=r"tensors are missing in the weights: 1 .new.") as caught:
        fit_pretrained(own, linear(10, old=torch.ones(1)), 5)
    assert "tensors are not in this network: 1 (old)" in str(caught.value)
    for other in (linear(10) | {"head.weight": torch.ones(10, 3)}, linear(10, body=torch.ones(5))):
        with pytest.raises(JobError, match="have another shape"):
            fit_pretrained(linear(5), other, 5)


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.model.", "net."])
@pytest.mark.parametrize("key", [None, "state_dict", "model"])
def test_weights_of_other_tools_fit(tmp_path: Path, key: str | None, prefix: str) -> None:
    """Nested in a dictionary, with a prefix, and without the second name of a tied tensor."""
    network = nn.ModuleDict({"body": nn.Linear(4, 4), "copy": nn.Linear(4, 4)})
    network["copy"].weight = network["body"].weight
    own = network.state_dict()
    tensors = {f"{prefix}{n}": t + 1 for n, t in own.items() if n != "copy.weight"}
    torch.save(tensors if key is None else {key: tensors, "epoch": 3}, tmp_path / "w.pt")
    read = read_pretrained(ModelSection(name="resnet8", weights=str(tmp_path / "w.pt")))
    taken = fit_pretrained(own, read, 4)
    assert foreign_prefix(own, read) == prefix
    assert taken.keys() == own.keys()
    assert all(torch.equal(taken[name], own[name] + 1) for name in own)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensor: (10 * tensor).to(torch.int8),
            "tensors hold no finite numbers, or quantized ones: 1 .weight",
        ),
        (lambda tensor: tensor.to(torch.complex64), "hold no finite numbers"),
        (lambda tensor: tensor / 0, "hold no finite numbers"),
    ],
)
def test_numbers_that_no_training_starts_from_are_refused(change: Any, message: str) -> None:
    own = {"weight": torch.ones(2, 3), "count": torch.ones((), dtype=torch.int64)}
    assert fit_pretrained(own, {**own, "weight": own["weight"].half()}, 2)
    with pytest.raises(JobError, match=message):
        fit_pretrained(own, {**own, "weight": change(own["weight"])}, 2)


def test_a_folder_of_transformers(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    network = BertForSequenceClassification(BertConfig(**sizes, num_hidden_layers=1, num_labels=3))
    own = network.state_dict()
    network.save_pretrained(tmp_path)
    read = read_pretrained(ModelSection(name="resnet8", weights=str(tmp_path)))
    taken = fit_pretrained(own, read, 3)
    assert all(torch.equal(taken[name], tensor) for name, tensor in own.items())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<html>404", "cannot be read as tensors .*begins with b'<html>404'"),
        (b"", "cannot be read as tensors .*begins with b''"),
        (b"\x80damaged", "cannot be read as tensors|holds other objects"),
        ({1: torch.ones(2)}, "must be a state_dict"),
        ([1, 2], "must be a state_dict"),
        ({"state_dict": [1]}, "must be a state_dict"),
        (nn.Linear(1, 1), r"holds other objects .*network\.state_dict\(\)"),
    ],
)
def test_files_without_tensors_are_refused(tmp_path: Path, content: Any, message: str) -> None:
    file = tmp_path / "weights.pt"
    file.write_bytes(content) if isinstance(content, bytes) else torch.save(content, file)
    with pytest.raises(JobError, match=message) as caught:
        read_pretrained(ModelSection(name="resnet8", weights=str(file)))
    assert "\x1b" not in str(caught.value)


def test_weights_of_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From torch's cache, as after a download; `validate` downloads nothing."""
    from torchvision.models import ShuffleNet_V2_X0_5_Weights, shufflenet_v2_x0_5

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    name = ShuffleNet_V2_X0_5_Weights.DEFAULT.url.rpartition("/")[2]
    torch.save(shufflenet_v2_x0_5(weights=None).state_dict(), folder / name)
    section = ModelSection(name="shufflenet_v2_x0_5", weights="IMAGENET1K_V1")
    model = build_model(section, num_classes=7, sample_shape=(3, 32, 32), seed=0)
    taken = fit_pretrained(model.state_dict(), read_pretrained(section), 7)
    assert set(model.state_dict()) - set(taken) == {"fc.weight", "fc.bias"}
    with pytest.raises(JobError, match="did you mean 'IMAGENET1K_V1'"):
        read_pretrained(ModelSection(name="shufflenet_v2_x0_5", weights="IMAGENET1K_V2"))
    (folder / name).unlink()
    color = np.zeros((20, 32, 32, 3), np.uint8)
    for split in ("train", "test"):
        np.save(tmp_path / f"{split}_x.npy", color)
        np.save(tmp_path / f"{split}_y.npy", np.arange(20) % 2)
    data = {s: [str(tmp_path / f"{s}_{n}.npy") for n in "xy"] for s in ("train", "test")}
    model_section = {"args": {}, "name": "shufflenet_v2_x0_5", "weights": "IMAGENET1K_V1"}
    changes = {"data": {"name": "arrays", **data}, "global_batch_size": 10, "optimizer": "SGD"}
    assert try_local_job(job(tmp_path, model_section, **changes), "job") is not None


def tied(num_classes: int) -> nn.Module:
    layers = nn.ModuleDict({n: nn.Linear(64, num_classes) for n in ("first", "second")})
    layers["second"].weight = layers["first"].weight
    return layers


@pytest.mark.parametrize("name", ["first", "second"])
def test_a_tied_parameter_is_frozen_by_any_name(name: str) -> None:
    section = ModelSection(name=tied, freeze=[f"{name}.weight"])
    network = build_model(section, num_classes=4, sample_shape=(64,), seed=0)
    assert [n for n, p in network.named_parameters() if not p.requires_grad] == ["first.weight"]


def test_frozen_patterns_are_checked() -> None:
    arguments: dict[str, Any] = {"num_classes": 10, "sample_shape": (1, 8, 8), "seed": 0}
    with pytest.raises(JobError, match=r"model\.freeze\.0: matches no parameter of this model"):
        build_model(ModelSection(name="small_cnn", freeze=["layer9.*"]), **arguments)
    with pytest.raises(JobError, match=r"model\.freeze: no parameter .* nothing to train"):
        build_model(ModelSection(name="small_cnn", freeze=["*"]), **arguments)


def test_multipliers_of_auto_hold_for_all_its_optimizers(tmp_path: Path) -> None:
    own = {"name": "AdamW", "lr_multipliers": {"0.*": 0.5}, "clip_norm": 0.5}
    shared = {"lr_multipliers": {"11.*": 4}, "clip_norm": 1.0}
    optimizer = {"name": "auto", "candidates": ["SGD", own], **shared}
    horizon = {"learning_rate": {"policy": "stpt_horizon"}, "optimizer": optimizer}
    sgd, adamw = job(tmp_path, {}, **horizon).optimizers
    assert sgd.lr_multipliers == {"11.*": 4}
    assert adamw.lr_multipliers == {"0.*": 0.5, "11.*": 4}
    assert (sgd.clip_norm, adamw.clip_norm) == (1.0, 0.5)


def test_files_of_torchvision_differ_from_its_networks() -> None:
    """Those of VGG, DenseNet, ViT, GoogLeNet and Inception."""
    count, weight = torch.tensor(0), torch.full((3,), 2.0)
    own = linear(5, **{"denselayer1.norm1.weight": torch.ones(3), "bn.num_batches_tracked": count})
    own |= {f"layers.0.mlp.{n}.weight": torch.ones(3) for n in (0, 3)}
    old = {f"layers.0.mlp.linear_{n}.weight": weight for n in (1, 2)}
    old["denselayer1.norm.1.weight"] = weight
    heads = {f"{head}.fc.weight": torch.ones(1) for head in ("aux1", "aux2", "AuxLogits")}
    taken = fit_pretrained(own, linear(10, **old, **heads), 5)
    assert set(own) - set(taken) == {"head.weight"}
    assert torch.equal(taken["denselayer1.norm1.weight"], weight)
    assert set(fit_pretrained(heads, heads, 5)) == set(heads)
