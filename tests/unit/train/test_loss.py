"""build_loss and check_loss: cross entropy by its definition, and the user's own function."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raytrain_opt.config.schema import LossSection
from raytrain_opt.errors import JobError
from raytrain_opt.train.loss import build_loss, check_loss

OUTPUT = torch.tensor([[2.0, 0.0, -1.0], [0.5, 1.5, 1.0]])
LABELS = torch.tensor([0, 2])


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_cross_entropy_follows_its_definition(smoothing: float) -> None:
    """The target puts 1 - s on the label and spreads s evenly over all classes."""
    target = nn.functional.one_hot(LABELS, 3) * (1 - smoothing) + smoothing / 3
    expected = -(target * OUTPUT.log_softmax(1)).sum(1).mean()
    loss = build_loss(LossSection(label_smoothing=smoothing))
    torch.testing.assert_close(loss(OUTPUT, LABELS), expected)


def mean_error(output: Tensor, labels: Tensor) -> Tensor:
    return (output.argmax(1) != labels).float().mean()


def test_users_function_is_called() -> None:
    section = LossSection(name=mean_error)
    assert check_loss(section) == []
    assert build_loss(section)(OUTPUT, LABELS).item() == 0.5


def test_users_function_by_name(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "def loss(output, labels, factor=2.0): return factor * output.mean()\n"
    (tmp_path / "loss_of_a_user.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    loss = build_loss(LossSection(name="loss_of_a_user:loss"))
    torch.testing.assert_close(loss(OUTPUT, LABELS), 2 * OUTPUT.mean())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("crossentropy", "did you mean 'cross_entropy'"),
        ("mse", r"must be cross_entropy or package\.module:function"),
        ("no_such_module_of_mine:loss", "cannot be imported"),
        (lambda output: output, r"callable as \(output, labels\)"),
        (nn.CrossEntropyLoss, "must be a function, not a class"),
    ],
)
def test_wrong_names_and_signatures_are_refused(name: Any, message: str) -> None:
    section = LossSection(name=name)
    assert [problem.path for problem in check_loss(section)] == ["loss.name"]
    with pytest.raises(JobError, match=message):
        build_loss(section)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda output, labels: nn.functional.cross_entropy(output, labels, reduction="none"),
         r"returned shape \[2\]"),
        (lambda output, labels: 0.5, "returned float"),
    ],
)  # fmt: skip
def test_users_function_must_return_the_mean(function: Any, message: str) -> None:
    loss = build_loss(LossSection(name=function))
    with pytest.raises(JobError, match=message):
        loss(OUTPUT, LABELS)


def test_checking_does_not_import_torch() -> None:
    code = (
        "import sys; from raytrain_opt.train.loss import check_loss\n"
        "from raytrain_opt.config.schema import LossSection\n"
        "assert check_loss(LossSection()) == [] and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
