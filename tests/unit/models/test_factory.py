"""build_model builds the named network, the same for the same seed, and explains errors."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from raytrain_opt.config.schema import ModelSection
from raytrain_opt.errors import JobError
from raytrain_opt.models import build_model

RGB = (3, 32, 32)
DIGIT = (1, 8, 8)


def build(name: Any, sample_shape: tuple[int, ...] = RGB, seed: int = 0, **args: Any) -> nn.Module:
    section = ModelSection(name=name, args=args)
    return build_model(section, num_classes=10, sample_shape=sample_shape, seed=seed)


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", ["resnet8", "small_cnn", "cifar_resnet18"])
@pytest.mark.parametrize("sample_shape", [RGB, DIGIT, (1, 28, 28), (5, 7, 9)])
def test_built_in_models_take_any_channels_and_size(
    name: str, sample_shape: tuple[int, ...]
) -> None:
    model = build(name, sample_shape, width=4)
    assert model(torch.randn(2, *sample_shape)).shape == (2, 10)
    assert model.training


def with_numbers_of(draw: Callable[[], float]) -> Callable[[], nn.Module]:
    def model() -> nn.Module:
        linear = nn.Linear(2, 2)
        nn.init.constant_(linear.weight, draw())
        nn.init.zeros_(linear.bias)
        return linear

    return model


@pytest.mark.parametrize(
    "name",
    ["resnet8", "squeezenet1_1", with_numbers_of(np.random.rand), with_numbers_of(random.random)],
)
def test_equal_seeds_give_equal_weights_and_preserve_the_random_state(name: Any) -> None:
    before, others = torch.get_rng_state(), (random.getstate(), np.random.get_state()[1].tolist())
    first, second, third = build(name, seed=7), build(name, seed=7), build(name, seed=2**40 + 8)
    assert torch.equal(torch.get_rng_state(), before)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == others
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    pairs = zip(first.parameters(), third.parameters(), strict=True)
    assert not all(torch.equal(a, b) for a, b in pairs)


def test_convolutions_start_by_hes_rule_and_norms_as_the_identity() -> None:
    model = build("cifar_resnet18")
    weight = model.get_parameter("layer4.0.conv1.weight")  # 256 channels to 512
    assert weight.std().item() == pytest.approx((2 / (512 * 9)) ** 0.5, rel=0.01)
    assert torch.equal(model.get_parameter("bn1.weight"), torch.ones(64))
    assert torch.equal(model.get_parameter("bn1.bias"), torch.zeros(64))
    assert model.get_parameter("fc.weight").abs().max().item() <= 512**-0.5


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("resnet8", 78_042),
        ("resnet20", 272_474),
        ("cifar_resnet18", 11_173_962),
        ("cifar_resnet45", 22_403_658),
        ("resnet45", 22_411_338),
        ("cifar_resnet50", 23_520_842),
        ("vgg16_bn", 14_987_722),
        ("vgg16_one_bn", 14_983_498),
    ],
)
def test_models_have_the_documented_number_of_parameters(name: str, parameters: int) -> None:
    assert parameter_count(build(name)) == parameters


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_resnets_equal_torchvisions_with_a_3x3_stem(name: str) -> None:
    torchvision = pytest.importorskip("torchvision")
    reference = torchvision.models.get_model(name, weights=None, num_classes=10)
    reference.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
    reference.maxpool = nn.Identity()
    model = build(f"cifar_{name}")
    assert [(k, v.shape) for k, v in model.state_dict().items()] == [
        (k, v.shape) for k, v in reference.state_dict().items()
    ]
    reference.load_state_dict(model.state_dict())
    images = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(model(images), reference(images))


@pytest.mark.parametrize("name", ["cifar_resnet45", "resnet45"])
def test_the_papers_resnet_has_45_convolutions_in_blocks_of_three(name: str) -> None:
    names = [n for n, m in build(name).named_modules() if isinstance(m, nn.Conv2d)]
    assert len([name for name in names if ".conv" in name]) == 45


@pytest.mark.parametrize(("name", "norms"), [("vgg16_bn", 14), ("vgg16_one_bn", 1)])
def test_vgg16_has_the_layers_of_the_paper(name: str, norms: int) -> None:
    modules = list(build(name).modules())
    convolutions = [m for m in modules if isinstance(m, nn.Conv2d)]
    assert len(convolutions) == 13
    assert {m.kernel_size for m in convolutions} == {(3, 3)}
    assert sum(isinstance(m, nn.MaxPool2d) for m in modules) == 5
    assert sum(isinstance(m, nn.Linear) for m in modules) == 2
    assert sum(isinstance(m, nn.BatchNorm2d | nn.BatchNorm1d) for m in modules) == norms


@pytest.mark.parametrize("sample_shape", [RGB, (1, 40, 70)])
def test_vgg16_sizes_its_first_linear_layer_by_the_image(sample_shape: tuple[int, ...]) -> None:
    model = build("vgg16_bn", sample_shape).eval()
    assert model(torch.randn(2, *sample_shape)).shape == (2, 10)


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("resnet8", {"width": -1}, r"model\.args\.width: .*negative dimension"),
        ("squeezenet1_1", {"dropuot": 0.1}, r"model\.args\.dropuot: .*dropuot"),
        (
            "resnet18",
            {"replace_stride_with_dilation": [True, False, False]},
            r"model\.args\.replace_stride_with_dilation: .*Dilation",
        ),
    ],
)
def test_arguments_that_a_model_rejects_are_named(name: str, args: Any, message: str) -> None:
    with pytest.raises(JobError, match=message):
        build(name, **args)


def test_a_users_function_gets_the_arguments_in_its_signature() -> None:
    def takes_both(num_classes: int, sample_shape: tuple[int, ...], depth: int) -> nn.Module:
        received.update(num_classes=num_classes, sample_shape=sample_shape, depth=depth)
        return nn.Linear(2, num_classes)

    def takes_any(**kwargs: Any) -> nn.Module:
        received.update(kwargs)
        return nn.Linear(2, 2)

    def takes_none() -> nn.Module:
        return nn.Linear(2, 2)

    received: dict[str, Any] = {}
    build(takes_both, depth=3)
    assert received == {"num_classes": 10, "sample_shape": RGB, "depth": 3}
    received.clear()
    build(takes_any, num_classes=4)
    assert received == {"num_classes": 4}
    assert build("torchvision.models:resnet18").fc.out_features == 10
    assert isinstance(build(takes_none), nn.Linear)


def broken() -> nn.Module:
    raise KeyError("no such table")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: 3, "must be or return a torch.nn.Module, not int"),
        (broken, r"raised KeyError: 'no such table'.*test_factory.py:\d+"),
        (lambda: nn.LazyLinear(3), "lazy layers"),
        (nn.Flatten, "nothing to train"),
        (lambda depth: nn.Linear(depth, 2), "model.args.depth: is required"),
    ],
)
def test_a_users_function_without_a_usable_model_is_an_error(function: Any, message: str) -> None:
    with pytest.raises(JobError, match=message):
        build(function)


def test_torchvision_models_with_an_auxiliary_head_return_one_tensor() -> None:
    model = build("googlenet", (3, 64, 64))
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 10)
