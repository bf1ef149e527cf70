"""check_model returns every problem of the section with its path, without building anything."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from torch import nn

from raytrain_opt.config.schema import ModelSection
from raytrain_opt.models import check_model, model_names


def check(name: Any, **args: Any) -> dict[str, str]:
    """Return path -> message without the path."""
    problems = check_model(ModelSection(name=name, args=args))
    return {problem.path: str(problem).partition(": ")[2] for problem in problems}


def user_model(num_classes: int, depth: int, width: int = 8) -> nn.Module:
    raise AssertionError("check_model must not call the function")


@pytest.mark.parametrize("name", ["resnet18", "squeezenet1_1", *model_names()])
def test_valid_names_have_no_problem(name: str) -> None:
    assert check(name) == {}


@pytest.mark.parametrize(
    ("name", "args", "path", "message"),
    [
        ("resnet8", {"widht": 8}, "model.args.widht", "did you mean 'width'"),
        ("resnet8", {"xyzzy": 8}, "model.args.xyzzy", "valid arguments: width"),
        ("resnet8", {"num_classes": 7}, "model.args.num_classes", "comes from the data"),
        ("squeezenet1_1", {"pretrained": True}, "model.args.pretrained", "write model.weights"),
        ("resnet18", {"weights": "DEFAULT"}, "model.args.weights", "write model.weights"),
        (user_model, {"depth": 2, "widht": 8}, "model.args.widht", "did you mean 'width'"),
        (user_model, {}, "model.args.depth", "required"),
        ("no_such_module_of_mine:net", {}, "model.name", "cannot be imported"),
        ("resnet19", {}, "model.name", "did you mean 'resnet18'"),
        ("xyzzy", {}, "model.name", "built in: cifar_resnet18"),
    ],
)
def test_a_wrong_name_or_argument_is_explained_at_its_path(
    name: Any, args: Any, path: str, message: str
) -> None:
    problems = check(name, **args)
    assert list(problems) == [path]
    assert message in problems[path]


def test_built_in_names_are_checked_without_importing_torchvision() -> None:
    code = (
        "import sys; from raytrain_opt.models import check_model, model_names\n"
        "from raytrain_opt.config.schema import ModelSection\n"
        "assert check_model(ModelSection(name='resnet8')) == [] and model_names()\n"
        "assert 'torchvision' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
