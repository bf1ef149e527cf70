"""Classification with cross entropy or a loss of the user's, and tasks of the user's own."""

from __future__ import annotations

import math
import re
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from raytrain_opt.config.schema import LossSection, TaskSection
from raytrain_opt.data.base import Batch, DataInfo
from raytrain_opt.errors import DataError, JobError, problems_of
from raytrain_opt.results import Metric
from raytrain_opt.train.evaluation import evaluate
from raytrain_opt.train.step_check import check_steps
from raytrain_opt.train.task import (
    Classification,
    Task,
    build_task,
    check_loss,
    check_task,
    count_flops,
    find_metric_names,
    keep_outputs,
    metric_of,
)

OUTPUT = torch.tensor([[2.0, 0.0, -1.0], [0.5, 1.5, 1.0]])
LABELS, ONES = torch.tensor([0, 2]), torch.ones(3)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_cross_entropy_follows_its_definition(smoothing: float) -> None:
    """The target puts 1 - s on the label and spreads s evenly over all classes."""
    target = nn.functional.one_hot(LABELS, 3) * (1 - smoothing) + smoothing / 3
    expected = -(target * OUTPUT.log_softmax(1)).sum(1).mean()
    loss = Classification(LossSection(label_smoothing=smoothing)).loss
    torch.testing.assert_close(loss(OUTPUT, LABELS), expected)


def mean_error(output: Tensor, labels: Tensor) -> Tensor:
    return (output.argmax(1) != labels).float().mean()


def test_users_function_by_name(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "def loss(output, labels, factor=2.0): return factor * output.mean()\n"
    (tmp_path / "loss_of_a_user.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    loss = Classification(LossSection(name="loss_of_a_user:loss")).loss
    torch.testing.assert_close(loss(OUTPUT, LABELS), 2 * OUTPUT.mean())


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda output, labels: nn.functional.cross_entropy(output, labels, reduction="none"),
         r"returned a tensor of shape \[2\]"),
        (lambda output, labels: 0.5, "returned float"),
    ],
)  # fmt: skip
def test_users_function_must_return_the_mean(function: Any, message: str) -> None:
    loss = Classification(LossSection(name=function)).loss
    with pytest.raises(JobError, match=message):
        loss(OUTPUT, LABELS)


@pytest.mark.parametrize("wrong", [{"weight": ONES}, {"reduction": "sum"}, {"ignore_index": 0}])
def test_a_loss_whose_mean_depends_on_the_micro_batches_is_refused(wrong: dict[str, Any]) -> None:
    [problem] = check_loss(LossSection.model_validate({"name": nn.CrossEntropyLoss(**wrong)}))
    assert "must be the mean over samples that count alike" in str(problem)


def test_of_equal_outputs_the_lower_class_is_predicted() -> None:
    task, labels = Classification(LossSection()), torch.arange(20) % 10
    metrics = task.validation_metrics(nn.Identity(), (torch.zeros(20, 10), labels))
    assert metrics["accuracy"].tolist() == [True, *[False] * 9] * 2


def test_the_mean_of_all_samples_is_that_of_the_batch() -> None:
    torch.manual_seed(0)
    x, labels = torch.randn(40, 7), torch.randint(7, (40,))
    for section in (
        LossSection(label_smoothing=0.1),
        LossSection(name=nn.functional.cross_entropy),
    ):
        task = Classification(section)
        values = task.validation_metrics(nn.Identity(), (x, labels))
        assert {name: tuple(value.shape) for name, value in values.items()} == {
            "loss": (40,), "accuracy": (40,), "top5": (40,),
        }  # fmt: skip
        loss = task.training_loss(nn.Identity(), (x, labels))
        torch.testing.assert_close(values["loss"].mean(), loss)


def test_mixed_samples_have_the_loss_of_both_labels() -> None:
    task, other = Classification(LossSection()), torch.tensor([1, 1])
    mixed = task.training_loss(nn.Identity(), (OUTPUT, LABELS, other, 0.25))
    losses = [task.training_loss(nn.Identity(), (OUTPUT, y)) for y in (LABELS, other)]
    torch.testing.assert_close(mixed, 0.25 * losses[0] + 0.75 * losses[1])


def test_class_weights_are_factors_of_samples() -> None:
    section = LossSection(class_weights=[1, 2, 4], label_smoothing=0.1)
    task = build_task(TaskSection(), section, DataInfo(3, (3,), 8, 8, 0, 4))
    plain = Classification(LossSection(label_smoothing=0.1))
    expected = plain.validation_metrics(nn.Identity(), (OUTPUT, LABELS))["loss"]
    expected = expected * torch.tensor([1.0, 4.0])
    values = task.validation_metrics(nn.Identity(), (OUTPUT, LABELS))
    torch.testing.assert_close(values["loss"], expected)
    loss = task.training_loss(nn.Identity(), (OUTPUT, LABELS))  # type: ignore[arg-type]
    torch.testing.assert_close(loss, expected.mean())


def test_balanced_weights_give_each_class_the_same_part_of_the_loss() -> None:
    info = DataInfo(3, (3,), 8, 8, 0, 4, class_counts=(5, 2, 1))
    labels = torch.tensor([0] * 5 + [1] * 2 + [2])
    task = build_task(TaskSection(), LossSection(class_weights="balanced"), info)
    values = task.validation_metrics(nn.Identity(), (torch.zeros(8, 3), labels))  # type: ignore[arg-type]
    sums = [values["loss"][labels == label].sum() for label in range(3)]
    torch.testing.assert_close(sums[1:], sums[:-1])
    plain = Classification(LossSection()).loss(torch.zeros(8, 3), labels)
    torch.testing.assert_close(values["loss"].mean(), plain)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1, 2], "has 2 weights, but the data have 3 classes"),
        ("balanced", "needs the class of each sample: `targets`"),
    ],
)
def test_class_weights_must_fit_the_data(weights: Any, message: str) -> None:
    section = LossSection(class_weights=weights)
    with pytest.raises(JobError, match=rf"loss\.class_weights: {message}"):
        build_task(TaskSection(), section, DataInfo(3, (3,), 8, 8, 0, 4))


class Regression:
    """A task with one metric beside the loss."""

    metric, higher_is_better = "error", False

    def __init__(self, power: int = 2) -> None:
        self.power = power

    def training_loss(self, model: nn.Module, batch: Any) -> Tensor:
        return self.errors(model, batch).mean()

    def validation_metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        errors = self.errors(model, batch)
        return {"loss": errors, "error": errors.sqrt()}

    def errors(self, model: nn.Module, batch: Any) -> Tensor:
        error: Tensor = (model(batch["x"])[:, 0] - batch["y"]).abs() ** self.power
        return error


class Wrong(Regression):
    """A task whose methods return what `metrics` says."""

    metrics: Any = None

    def validation_metrics(self, model: nn.Module, batch: Any) -> Any:
        return self.metrics


INFO = DataInfo(1, (3,), 8, 8, 0, 4)
BATCH = Batch({"x": torch.ones(2, 3), "y": torch.ones(2)}, None)


def test_a_task_of_a_user_says_its_metrics() -> None:
    section = TaskSection(name=Regression, args={"power": 1})
    assert check_task(section) == []
    task = build_task(section, LossSection(), INFO)
    assert metric_of(task) == Metric("error", higher_is_better=False)
    assert find_metric_names(task, nn.Linear(3, 1), BATCH) == ("loss", "error")


class GradientPenalty(Regression):
    def training_loss(self, model: nn.Module, batch: Any) -> Tensor:
        x = batch["x"].clone().requires_grad_()
        [slope] = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return super().training_loss(model, batch) + slope.square().mean()


def test_a_loss_may_use_derivatives() -> None:
    model = nn.Linear(3, 1)
    check_steps(GradientPenalty(), model, BATCH, BATCH, 1)
    assert count_flops(GradientPenalty(), model, BATCH) == math.inf
    assert count_flops(Regression(), model, BATCH) == 3 * 2 * 3


class Parts(Regression):
    """Uses more than the call of the network, which is wrapped where several workers train it."""

    def training_loss(self, model: nn.Module, batch: Any) -> Tensor:
        shape = [p.shape for p in model.parameters()][0]
        part = getattr(model, "module", model).part if self.power else model.part
        return super().training_loss(model, batch) + len(shape) * part(batch["x"]).sum()

    def validation_metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        assert model.part is not None  # not wrapped
        return super().validation_metrics(model, batch)


def test_a_loss_that_several_workers_could_not_train_is_refused() -> None:
    model = nn.Linear(3, 1)
    model.part = nn.Linear(3, 1)
    check_steps(Parts(), model, BATCH, BATCH, 1)
    with pytest.raises(DataError, match=r"no attribute 'part'.*call it as model\(…\)"):
        check_steps(Parts(power=0), model, BATCH, BATCH, 1)
    assert model.training


def test_without_a_metric_the_loss_decides_and_less_is_better() -> None:
    assert metric_of(cast("Task", object())) == Metric("loss", higher_is_better=False)


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (3, "must return a dict with loss and error, not int"),
        ({"error": torch.zeros(2)}, r"a dict with loss and error, not \['error'\]"),
        ({"loss": torch.zeros(2), "error": torch.tensor(0.5)}, r"value per sample.* error is"),
        ({"loss": torch.zeros(2), "error": torch.zeros(2), 3: torch.zeros(2)}, "not .*error', 3"),
    ],
)  # fmt: skip
def test_wrong_metrics_are_refused(metrics: Any, message: str) -> None:
    task = Wrong()
    task.metrics = metrics
    with pytest.raises(DataError, match=message):
        find_metric_names(task, nn.Linear(3, 1), BATCH)


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"loss": torch.zeros(4)}, "return a dict with loss and error"),
        ({"loss": torch.zeros(4), "error": torch.zeros(2)}, "for 4 samples error is a tensor"),
        ({"loss": torch.zeros(()), "error": torch.zeros(4)}, "for 4 samples loss is a tensor"),
    ],
)
def test_wrong_metrics_of_a_later_batch_are_refused(metrics: Any, message: str) -> None:
    task, batch = Wrong(), Batch({"x": torch.ones(4, 3), "y": torch.ones(4)}, None)
    task.metrics = metrics
    info = SimpleNamespace(test_size=4, final_size=0, validation_size=0)
    data = SimpleNamespace(info=info, skipped=0, eval_batches=lambda *_: iter([batch]))
    learner: Any = SimpleNamespace(
        model=nn.Linear(3, 1), task=task, data=data, metric_names=("loss", "error"), device="cpu",
        config=SimpleNamespace(eval_batch_size=4), seed=lambda _: None,
        attempt=nullcontext, autocast=nullcontext,
    )  # fmt: skip
    with pytest.raises(DataError, match=message):
        evaluate(learner, "test", 0, 1, lambda *_: None)


def test_outputs_of_16_bits_are_kept_as_float32() -> None:
    outputs: dict[str, list[Any]] = {}
    keep_outputs(outputs, {"score": OUTPUT.bfloat16()})
    assert outputs["score"][0].dtype == torch.float32


@pytest.mark.parametrize("wrong", [{"metric": 3}, {"higher_is_better": "max"}])
def test_a_metric_is_named_and_has_a_direction(wrong: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="metric must be the name of a metric, and higher_is"):
        metric_of(cast("Task", SimpleNamespace(**wrong)))
    assert metric_of(cast("Task", SimpleNamespace(metric=None))).name == "loss"


def test_what_a_task_raises_is_told_with_the_shapes_of_its_batch() -> None:
    with pytest.raises(DataError, match=r"training_loss raised RuntimeError.*\[2, 3\]"):
        check_steps(Regression(), nn.Linear(4, 1), BATCH, BATCH, 1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "clasification"}, "did you mean 'classification'"),
        ({"name": "regression"}, r"must be classification or package\.module:Class"),
        ({"name": nn.Linear}, "training_loss and validation_metrics"),
        ({"name": mean_error}, "must be a class or object with the methods training_loss and"),
        ({"name": Regression, "args": {"powr": 1}}, "raised TypeError"),
        ({"args": {"power": 1}}, "classification has none"),
    ],
)
def test_wrong_tasks_are_refused(values: dict[str, Any], message: str) -> None:
    section = TaskSection(**values)
    problems = check_task(section)
    problems += problems_of(lambda: problems or build_task(section, LossSection(), INFO))
    assert re.search(message, str(JobError(problems)))
