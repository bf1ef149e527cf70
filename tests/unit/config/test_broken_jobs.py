"""What the schema refuses, one by one, and that all errors of a job file are reported at once."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from raytrain_opt.config.error_messages import SectionError
from raytrain_opt.config.load import parse_job
from raytrain_opt.config.schema import Job
from raytrain_opt.errors import JobError, Problem
from raytrain_opt.execution.check import check_sections

GOOD = {
    "model": "model: resnet8",
    "data": "data: digits",
    "epochs": "epochs: 2",
    "global_batch_size": "global_batch_size: 8",
}
STPT = "learning_rate: {policy: stpt, "
SCHEDULE = "learning_rate: {policy: schedule, "
HORIZON = "learning_rate: {policy: stpt_horizon}"
CIFAR = "data: {name: cifar10, "
FOLDER = "data: {name: image_folder, root: x, "

# Lines that replace or join those of the good job, the path of the one problem, words about it.
BROKEN = [
    # missing and unknown keys
    ("model: null", "model", "must be a section"),
    ("data: {root: x}", "data.name", "is required; one of digits"),
    ("data: {name: arrays, train: [a], test: [a, b]}", "data.train.1", "is required"),
    ("epoch: 3", "epoch", "did you mean 'epochs'?"),
    (SCHEDULE + "warmup: {steps: 9, epochs: 1}}", "learning_rate.warmup.steps", "in place of ep"),
    (STPT + "warmup: {steps: 9}}", "learning_rate.warmup.steps", "is for policy schedule"),
    ("gpus: 3", "gpus", "valid here: name, model, data"),
    (CIFAR + "augment: {flips: true}}", "data.augment.flips", "did you mean 'flip'?"),
    ("3: 4", "3", "its key must be text"),
    # kinds of values
    ("epochs: 1.5", "epochs", "must be a valid integer (given: 1.5)"),
    ("epochs: true", "epochs", "must be a number (given: True)"),
    ("model: {name: 3}", "model.name", "must be a valid string or callable"),
    ("workers: 4", "workers", "must be a section (keys and values) (given: 4)"),
    ("workers: {count: many}", "workers.count", "must be a valid integer or 'auto' or a section"),
    ("checkpoint: {every: 5x}", "checkpoint.every", "must be a time such as 90s, 45min or 1h30"),
    ("channels_last: perhaps", "channels_last", "must be a valid boolean (given: 'perhaps')"),
    ("compile: true", "compile", "must be 'auto', 'none', 'default' or 'max-autotune'"),
    ("learning_rate: stpt", "learning_rate", "must be a section (keys and values)"),
    # ranges
    ("epochs: 0", "epochs", "must be greater than 0 (given: 0)"),
    (f"seed: '{'9' * 5000}'", "seed", "exceeded maximum size"),
    ("loss: {label_smoothing: .nan}", "loss.label_smoothing", "(given: nan)"),
    ("loss: {class_weights: balance}", "loss.class_weights", "must be 'balanced' or a valid list"),
    ("loss: {class_weights: [1, 0]}", "loss.class_weights.1", "must be greater than 0"),
    (STPT + "initial: .inf}", "learning_rate.initial", "must be a finite number"),
    (
        "data: {name: arrays, train: [a, b, c], test: [a, b]}",
        "data.train",
        "should have at most 2 items",
    ),
    ("name: a b", "name", "should match pattern '^[A-Za-z0-9]"),
    # impossible sizes, some of which would take hours or all memory to find out
    ("epochs: 1000000000000", "epochs", "must be less than or equal to 100000"),
    ("workers: {threads: 1000000}", "workers.threads", "must be less than or equal to 1024"),
    (FOLDER + "image_size: 1000000}", "data.image_size", "must be less than or equal to 4096"),
    (
        FOLDER + "loader_workers: 100000}",
        "data.loader_workers",
        "must be 'auto' or less than or equal to 256",
    ),
    # choices
    (
        "precision: fp8",
        "precision",
        "must be 'auto', 'fp32', 'fp32_strict', 'bf16' or 'fp16' (given: 'fp8')",
    ),
    ("learning_rate: {policy: stp}", "learning_rate.policy", "did you mean 'stpt'?"),
    (
        "learning_rate: {policy: schedule, initial: 0}",
        "learning_rate.initial",
        "must be greater than 0",
    ),
    ("data: cifar11", "data.name", "did you mean 'cifar10'?"),
    # unions: one problem, whichever alternative was meant
    (
        STPT + "alpha: 1.5}",
        "learning_rate.alpha",
        "integer or less than or equal to 1 (given: 1.5)",
    ),
    (STPT + "alpha: -3}", "learning_rate.alpha", "must be greater than 0 (given: -3)"),
    (STPT + "candidates: narow}", "learning_rate.candidates", "list (given: 'narow'); did you"),
    ("workers: {resources: {GPU: 1.5}}", "workers.resources", "GPU must be an integer above 1"),
    (STPT + "candidates: []}", "learning_rate.candidates", "give at least one multiplier"),
    (CIFAR + "normalize: atuo}", "data.normalize", "did you mean 'auto'?"),
    (CIFAR + "normalize: [[1], [a]]}", "data.normalize.1.0", "must be a valid number"),
    ("checkpoint: {keep: al}", "checkpoint.keep", "integer or 'all' (given: 'al'); did you"),
    # rules over several fields
    ("workers: {count: 3}", "global_batch_size", "does not split evenly over 3 workers"),
    (STPT + "warmup: {epochs: 3}}", "learning_rate.warmup.epochs", "more than the 2 epochs"),
    ("data: {name: digits, validation_fraction: 0}", "data.validation_fraction", "(given: 0)"),
    (SCHEDULE + "shape: multistep}", "learning_rate.milestones", "are required"),
    (SCHEDULE + "patience: 2}", "learning_rate.patience", "not for shape cosine, but for plateau"),
    (SCHEDULE + "shape: multistep, milestones: [2, 1]}", "learning_rate.milestones", "increase"),
    (
        "loss: {name: 'a:b', label_smoothing: 0.1}",
        "loss.label_smoothing",
        "applies to cross_entropy only",
    ),
    ("workers: {count: {min: 3, max: 2}}", "workers.count.min", "is more than max, 2"),
    ("stop: {target: 93}", "stop.target", "above 1, which no accuracy reaches; 93 % is 0.93"),
    (
        "loss: {class_weights: balanced}\ndata: {name: digits, sampler: balanced}",
        "loss.class_weights",
        "data.sampler: balanced does the same; remove one",
    ),
    *(
        (f"optimizer: ScheduleFreeAdamW\nlearning_rate: {{policy: {policy}}}", *needs_constant)
        for policy in ("stpt", "schedule")
        for needs_constant in [("learning_rate", "needs a constant rate after the warm-up; write")]
    ),
    ("optimizer: {name: auto, args: {momentum: 0.9}}", "optimizer.args", "optimizer.candidates"),
    ("optimizer: {name: auto, candidates: [SGD, auto]}", "optimizer.candidates", "cannot contain"),
    (
        "optimizer: {name: SGD, candidates: [AdamW]}",
        "optimizer.candidates",
        "SGD is one optimizer",
    ),
    (
        f"optimizer: {{name: SGD, args: {{weight_decay: auto}}}}\n{HORIZON}",
        "optimizer.args.weight_decay",
        "number",
    ),
    (
        "optimizer: {name: Muon, args: {weight_decay: auto}}\nlearning_rate: {policy: schedule}",
        "optimizer.args.weight_decay",
        "number",
    ),
    (
        STPT + "search_on: workers, candidate_batch: local}",
        "learning_rate.search_on",
        "need slots",
    ),
    (
        "learning_rate: {policy: stpt_horizon, search_on: workers}\nparallel: {mode: async}",
        "learning_rate.search_on",
        "need slots",
    ),
    ("learning_rate: {policy: schedule}\noptimizer: auto", "optimizer", "stpt_horizon"),
    (
        "batch_size_search: {strategy: throughput_knee}\ndata: {name: digits, drop_last: false}",
        "data.drop_last",
        "must be true",
    ),
    (
        SCHEDULE + "shape: plateau}\ndata: {name: digits, validation_fraction: 0}",
        "data.validation_fraction",
        "set it above 0",
    ),
]


def problems(*lines: str) -> list[Problem]:
    """Return the problems of a good job after these lines replaced or joined its own."""
    changes = {line.partition(":")[0]: line for line in lines}
    with pytest.raises(JobError) as caught:
        parse_job("\n".join({**GOOD, **changes}.values()))
    return caught.value.problems


@pytest.mark.parametrize(("lines", "path", "words"), BROKEN)
def test_a_broken_job_is_refused_with_the_place_and_the_rule(
    lines: str, path: str, words: str
) -> None:
    [problem] = problems(*lines.split("\n"))
    assert problem.path == path
    assert words in str(problem)


@pytest.mark.parametrize("key", GOOD)
def test_a_missing_key_is_named(key: str) -> None:
    lines = [line for name, line in GOOD.items() if name != key]
    with pytest.raises(JobError) as caught:
        parse_job("\n".join(lines))
    instead = ", or train_for in its place" if key == "epochs" else ""
    expected = [f"{key}: is required{instead}"]
    assert [str(problem) for problem in caught.value.problems] == expected


def test_all_errors_are_reported_at_once() -> None:
    reported = problems(
        "epochs: 0",
        "data: {name: cifar10, rot: x, normalize: atuo}",
        STPT + "alpha: 2.5, candidates: narow}",
        "workers: {count: none, use_gpu: maybe}",
        "sead: 1",
    )
    assert {problem.path for problem in reported} == {
        "epochs",
        "data.rot",
        "data.normalize",
        "learning_rate.alpha",
        "learning_rate.candidates",
        "workers.count",
        "workers.use_gpu",
        "sead",
    }
    assert len(reported) == 8


@pytest.mark.parametrize(
    "policy",
    [
        "{policy: schedule, shape: constant, warmup: {epochs: 1}}",
        "{policy: replay, schedule: runs/it/schedule.jsonl}",
        "{policy: stpt_horizon}",
    ],
)
def test_a_schedule_free_optimizer_averages_by_itself(policy: str) -> None:
    lines = ["optimizer: ScheduleFreeSGD", f"learning_rate: {policy}"]
    assert parse_job("\n".join([*GOOD.values(), *lines])).average is None
    [problem] = problems(*lines, "average: 0.9")
    assert problem.path == "average"


@pytest.mark.parametrize(
    ("changes", "search_on"),
    [
        ({}, "workers"),
        ({"parallel": {"mode": "async"}}, "slots"),
        ({"learning_rate": {"policy": "stpt"}}, "slots"),
        ({"learning_rate": {"policy": "stpt", "search_on": "workers"}}, "workers"),
    ],
)
def test_where_candidates_may_train(changes: dict[str, Any], search_on: str) -> None:
    good = {"model": "small_cnn", "data": "digits", "epochs": 1, "global_batch_size": 8}
    assert Job.model_validate(good | changes).search_on == search_on


def test_all_broken_rules_between_sections_are_reported_at_once() -> None:
    reported = problems(
        "workers: {count: 3}",
        STPT + "warmup: {epochs: 3}}",
        "data: {name: digits, validation_fraction: 0}",
        "batch_ramp: [{epoch: 3, factor: 2}, {epoch: 2, factor: 4}]",
    )
    assert [problem.path for problem in reported] == [
        "learning_rate.warmup.epochs",
        "batch_ramp",
        "batch_ramp",
        "batch_ramp",
        "data.validation_fraction",
        "global_batch_size",
    ]


def test_long_values_are_cut() -> None:
    (problem,) = problems(f"precision: {'x' * 500}")
    assert problem.value is not None
    assert len(problem.value) == 80


def test_the_message_counts_and_names_the_source() -> None:
    with pytest.raises(JobError) as caught:
        parse_job("model: resnet8", source="my.yaml")
    assert str(caught.value).startswith("my.yaml: 2 problems\n  data: is required\n")
    assert caught.value.exit_code == 2


def test_a_broken_rule_reaches_another_process() -> None:
    """Pickled, as pools of processes hand errors on."""
    error = SectionError([Problem("optimizer", "is wrong")])
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.problems) == (str(error), error.problems)


def test_other_sections_are_checked_beyond_the_schema_too() -> None:
    lines = {
        **GOOD,
        "model": "model: resnet9",
        "data": "data: 'no_such_module:data'",
        "epochs": "epochs: 0",
        "optimizer": "optimizer: SDG",
        "loss": "loss: cros_entropy",
        "learning_rate": "learning_rate: {policy: stp}",
    }
    with pytest.raises(JobError) as caught:
        parse_job("\n".join(lines.values()), check_sections=check_sections)
    assert [problem.path for problem in caught.value.problems] == [
        "epochs",
        "learning_rate.policy",
        "model.name",
        "data.name",
        "optimizer.name",
        "loss.name",
    ]


def test_a_section_that_breaks_the_schema_is_reported_once() -> None:
    text = "\n".join({**GOOD, "model": "model: {nam: resnet9}", "data": "data: cifra10"}.values())
    with pytest.raises(JobError) as caught:
        parse_job(text, check_sections=check_sections)
    assert [problem.path for problem in caught.value.problems] == [
        "model.name",
        "model.nam",
        "data.name",
    ]
