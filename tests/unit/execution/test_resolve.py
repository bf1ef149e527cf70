"""Checks beyond the schema, all reported at once, and what a valid job resolves to."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from raytrain_opt.config.schema import Job
from raytrain_opt.errors import JobError, Problem
from raytrain_opt.execution.check import check_job, try_job
from raytrain_opt.search.factory import guessing_loss
from raytrain_opt.search.stpt_horizon import HorizonStpt
from tests.support.resolved import resolve_here

HERE = "on this machine (the job is checked where it starts)"


def problems(**changes: Any) -> list[Problem]:
    base = {"model": "resnet8", "data": "digits", "epochs": 2, "global_batch_size": 8}
    return check_job(Job.model_validate({**base, **changes}))


def test_a_good_job_has_no_problems() -> None:
    assert problems() == []


@pytest.mark.parametrize(
    ("workers", "parallel"), [(8, {}), (2, {"parallel": {"micro_batches": 8}})]
)
def test_a_last_update_must_have_two_samples_for_each_micro_batch(
    workers: int, parallel: dict[str, Any]
) -> None:
    """Of the 1,438 training samples of digits, 14 remain with batches of 16."""
    values = {
        "model": "small_cnn",
        "data": {"name": "digits", "drop_last": False},
        "epochs": 2,
        "global_batch_size": 16,
        "learning_rate": {"policy": "schedule"},
    }
    resolved = resolve_here(Job.model_validate({**values, "workers": {"count": 4}}))
    assert resolved.steps(1) == 90
    with pytest.raises(JobError, match=r"data\.drop_last.*split 14 samples into 8 micro-batches"):
        try_job(Job.model_validate({**values, "workers": {"count": workers}, **parallel}))


def every_sample(samples: Any, epoch: int, random: Any) -> Any:
    return samples


def test_the_usual_rate_of_the_optimizer_and_a_sampler_of_ones_own_reach_the_policy() -> None:
    base = {"model": "small_cnn", "epochs": 4, "global_batch_size": 64, "optimizer": "AdamW"}
    for sampler, own in ((every_sample, True), ("balanced", False)):
        data = {"name": "digits", "sampler": sampler}
        resolved = resolve_here(Job.model_validate({**base, "data": data}))
        assert resolved.job.learning_rate.initial is None
        assert isinstance(resolved.policy, HorizonStpt)
        assert (resolved.policy.facts.initial_lr, resolved.policy.facts.own_order) == (0.003, own)


def mlp(num_classes: int, sample_shape: tuple[int, ...]) -> nn.Module:
    """Build an MLP, whose matrices are large for the work of one sample."""
    features, width = math.prod(sample_shape), 1024
    layers = (nn.Linear(features, width), nn.Linear(width, width), nn.Linear(width, num_classes))
    return nn.Sequential(nn.Flatten(), *layers)


def small_mlp(num_classes: int, sample_shape: tuple[int, ...]) -> nn.Module:
    """Build an MLP whose matrices are soon orthogonalized."""
    features = math.prod(sample_shape)
    return nn.Sequential(nn.Flatten(), nn.Linear(features, 64), nn.Linear(64, num_classes))


def normalized(norm: nn.Module, num_classes: int) -> nn.Module:
    """Build a network for digits: a convolution, 4 channels of 8 x 8, and this layer after it."""
    head = nn.Linear(4 * 64, num_classes)
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), norm, nn.Flatten(), head)


def recurrent(num_classes: int, sample_shape: tuple[int, ...]) -> nn.Module:
    """Build an LSTM over the rows of an image."""

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(sample_shape[2], 512, batch_first=True)
            self.last = nn.Linear(512, num_classes)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.last(self.lstm(x.flatten(1, 2))[0][:, -1])
            return output

    return Rows()


def complex_net(num_classes: int, sample_shape: tuple[int, ...]) -> nn.Module:
    """Build a network that filters by complex weights in the frequency domain."""

    class Filter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(sample_shape, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.ifft2(torch.fft.fft2(x) * self.weight).real

    return nn.Sequential(Filter(), small_mlp(num_classes, sample_shape))


LONG: dict[str, Any] = {"epochs": 10_000}  # a step of few operations, 35 times those of its batch


@pytest.mark.parametrize(
    ("model", "batch", "changes", "has_muon"),
    [
        (mlp, 8, {}, False),
        (mlp, 1250, {}, True),
        (small_mlp, 8, {}, True),
        (small_mlp, 8, LONG, False),
        (small_mlp, 8, {"epochs": None, "train_for": "1h"}, False),
        (mlp, 8, {"optimizer": {"name": "auto", "candidates": ["Muon", "SGD"]}}, True),
        (mlp, 8, {"optimizer": "Muon"}, True),
        ("small_cnn", 8, {}, True),
        (recurrent, 8, {}, True),  # its operations are not known
        (complex_net, 8, {}, False),  # which Muon cannot train
    ],
)
def test_muon_is_left_out_where_it_takes_several_times_the_operations_of_a_batch(
    model: Any, batch: int, changes: dict[str, Any], *, has_muon: bool
) -> None:
    values = {"model": model, "data": "digits", "epochs": 2, "global_batch_size": batch}
    resolved = resolve_here(Job.model_validate({**values, "optimizer": "auto", **changes}))
    names = [section.name for section in resolved.learner.optimizers]
    assert ("Muon" in names) is has_muon
    assert (resolved.note is None) is has_muon


@pytest.mark.parametrize(
    ("model", "normalizes"),
    [
        ("resnet8", True),
        (lambda **sizes: normalized(nn.GroupNorm(2, 4), **sizes), True),
        (lambda **sizes: normalized(nn.InstanceNorm2d(4), **sizes), True),
        (lambda **sizes: normalized(nn.LayerNorm(8), **sizes), False),
        (small_mlp, False),
    ],
)
def test_the_network_decides_the_order_of_optimizers_and_whether_channels_are_normalized(
    model: Any, *, normalizes: bool
) -> None:
    values = {"model": model, "data": "digits", "epochs": 2, "global_batch_size": 8}
    resolved = resolve_here(Job.model_validate(values))
    assert isinstance(resolved.policy, HorizonStpt)
    assert resolved.policy.facts.channel_norm is normalizes
    assert resolved.policy.optimizers == resolved.learner.optimizers
    names = [section.name for section in resolved.learner.optimizers]
    others = ["SGD", "ScheduleFreeSGD"]
    assert names == (["Muon", *others, "AdamW"] if normalizes else ["Muon", "AdamW", *others])
    assert resolved.policy.facts.step_flops < 1e8  # so the search may take one training


@pytest.mark.parametrize(("sampler", "counts"), [("random", ()), ("balanced", (90, 10))])
def test_a_guess_counts_classes_of_unknown_frequency_alike(sampler: str, counts: Any) -> None:
    data = {"name": "digits", "sampler": sampler}
    job = Job(model="resnet8", data=data, epochs=1, global_batch_size=8)
    assert guessing_loss(job, 2, counts) == pytest.approx(0.6931, abs=1e-4)


class TokensWithNorm(nn.Module):
    """Embeddings of the pixels' numbers, and BatchNorm."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(17, 4), nn.BatchNorm1d(64 * 4)
        self.head = nn.Linear(64 * 4, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.tokens(x.flatten(1).abs().long().clamp(max=16))
        return self.head(self.norm(tokens.flatten(1)))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "aux"),
    [("resnet8", {}), (small_mlp, {"aux": "adamw"}), (TokensWithNorm, {"aux": "adamw"})],
)
def test_muon_in_the_list_has_adamw_for_embeddings_and_without_channel_norm(
    model: Any, aux: dict[str, str]
) -> None:
    values = {"model": model, "data": "digits", "epochs": 2, "global_batch_size": 8}
    resolved = resolve_here(Job.model_validate(values))
    [muon] = [section for section in resolved.learner.optimizers if section.name == "Muon"]
    assert muon.args == {"weight_decay": "auto", **aux}
    assert muon.group_lr_multipliers == ({"aux": 0.05} if aux else {})


def with_extra_state(num_classes: int) -> nn.Module:
    class Counting(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"calls": 1}

    return nn.Sequential(nn.Flatten(), Counting(64, num_classes))


def test_a_model_whose_state_is_more_than_tensors_is_refused() -> None:
    values = {"model": with_extra_state, "data": "digits", "epochs": 2, "global_batch_size": 8}
    message = r"model\.name: state_dict\(\) .* 1\._extra_state is a dict.*buffer"
    with pytest.raises(JobError, match=message):
        try_job(Job.model_validate(values))


def floats(shape: list[int]) -> Any:
    data = TensorDataset(torch.zeros(12, *shape), torch.arange(12) % 2)
    return data, data


@pytest.mark.parametrize(
    ("model", "shape", "is_refused"),
    [
        ("resnet8", (16, 20, 3), True),
        ("resnet8", (16, 20, 1), True),
        ("resnet8", (3, 16, 20), False),
        ("resnet8", (3, 16, 3), False),
        ("resnet8", (2, 16, 20), False),
        (small_mlp, (16, 20, 3), False),  # a network of one's own may take them last
    ],
)
def test_floats_with_channels_last_are_no_input_of_a_named_network(
    model: Any, shape: tuple[int, ...], is_refused: bool
) -> None:
    data = {"name": floats, "args": {"shape": [*shape]}, "num_classes": 2, "loader_workers": 0}
    values = {"model": model, "data": data, "epochs": 2, "global_batch_size": 4}
    values |= {"optimizer": "SGD", "learning_rate": {"policy": "schedule"}}
    if not is_refused:
        assert try_job(Job.model_validate(values))[0].info.sample_shape == shape
        return
    with pytest.raises(
        JobError, match=r"data: has samples \[16, 20, .\], which look like channels"
    ):
        try_job(Job.model_validate(values))


def test_a_missing_image_folder_is_one_problem(tmp_path: Path) -> None:
    reported = problems(data={"name": "image_folder", "root": str(tmp_path / "none")})
    assert [(problem.path, problem.rule) for problem in reported] == [
        ("data.root", f"no such file or folder {HERE}")
    ]


@pytest.mark.parametrize("content", ["{", "[]", "3", '{"segments": 3}'])
def test_a_replayed_schedule_must_be_valid(tmp_path: Path, content: str) -> None:
    file = tmp_path / "schedule.jsonl"
    file.write_text(content)
    reported = problems(learning_rate={"policy": "replay", "schedule": str(file)})
    assert [problem.path for problem in reported] == ["learning_rate.schedule"]
