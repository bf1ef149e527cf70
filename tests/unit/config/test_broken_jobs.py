"""All errors of a job file are reported at once.

The errors themselves are in tests/unit/behavior/test_bad_input.py, one by one.
"""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from raytrain_opt.config.load import parse_job
from raytrain_opt.config.schema import Job
from raytrain_opt.config.section import BrokenRulesError
from raytrain_opt.errors import JobError, Problem
from raytrain_opt.execution.preflight import check_sections

GOOD = {
    "model": "model: resnet8",
    "data": "data: digits",
    "epochs": "epochs: 2",
    "global_batch_size": "global_batch_size: 8",
}
STPT = "learning_rate: {policy: stpt, "


def problems(*lines: str) -> list[Problem]:
    """Return the problems of a good job after these lines replaced or joined its own."""
    changes = {line.partition(":")[0]: line for line in lines}
    with pytest.raises(JobError) as caught:
        parse_job("\n".join({**GOOD, **changes}.values()))
    return caught.value.problems


def test_a_minimum_above_the_number_of_workers_is_refused_where_that_is_given() -> None:
    [problem] = problems("workers: {count: {min: 3, max: 2}}")
    assert (problem.path, problem.rule) == ("workers.count.min", "is more than max, 2")
    [problem] = problems("workers: {count: {min: 1, max: 2, step: 1}}")
    assert (problem.path, problem.hint) == ("workers.count.step", "valid here: min, max")
    found = parse_job("\n".join([*GOOD.values(), "workers: {count: {min: 1, max: 2}}"]))
    assert (found.workers.size, found.workers.min_workers) == (2, 1)


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("workers: {use_gpu: false}", "needs GPUs, and workers.use_gpu is false"),
        ("batch_norm: {sync: true}", "no graph can contain the messages of batch_norm.sync"),
        ("parallel: {mode: async}", "needs workers in step; parallel.mode is async"),
    ],
)
def test_graphs_of_the_network_need_a_gpu_and_no_messages(line: str, rule: str) -> None:
    [problem] = problems("cuda_graphs: true", line, "optimizer: {name: SGD}")
    assert (problem.path, problem.rule) == ("cuda_graphs", rule)


def test_classes_are_balanced_once() -> None:
    data = "data: {name: digits, sampler: balanced}"
    [problem] = problems("loss: {class_weights: balanced}", data)
    assert problem.path == "loss.class_weights"
    assert problem.rule == "data.sampler: balanced does the same; remove one"


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
        "{policy: stpt}",
        "{policy: schedule}",
    ],
)
def test_a_schedule_free_optimizer_needs_a_constant_rate(policy: str) -> None:
    [problem] = problems("optimizer: ScheduleFreeAdamW", f"learning_rate: {policy}")
    assert problem.path == "learning_rate"
    assert "ScheduleFreeAdamW needs a constant rate after the warm-up" in problem.rule
    assert "shape: constant" in problem.rule


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
    [problem] = problems(*lines, "average: {decay: 0.9}")
    assert problem.path == "average"


HORIZON = "learning_rate: {policy: stpt_horizon}"


@pytest.mark.parametrize(
    "lines", [[HORIZON], ["learning_rate: {policy: schedule}", "parallel: {mode: async}"]]
)
def test_a_momentum_warm_up_needs_rates_known_beforehand(lines: list[str]) -> None:
    optimizer = "optimizer: {name: SGD, momentum_warmup: {epochs: 1, initial: 0.5}}"
    [problem] = problems(optimizer, *lines)
    assert problem.path == "optimizer.momentum_warmup"


def test_the_optimizers_to_choose_from_are_given_or_usual_ones() -> None:
    for written, names in [
        ("auto", ["Muon", "SGD", "ScheduleFreeSGD", "AdamW"]),
        ("{name: auto, candidates: [SGD, {name: AdamW, args: {betas: [0.9, 0.95]}}]}", None),
        ("SGD", ["SGD"]),
    ]:
        job = parse_job("\n".join([*GOOD.values(), HORIZON, f"optimizer: {written}"]))
        assert [o.name for o in job.optimizers] == (names or ["SGD", "AdamW"])
    assert job.optimizers[0].args["momentum"] == 0.9


@pytest.mark.parametrize(
    ("optimizer", "path", "words"),
    [
        ("{name: auto, args: {momentum: 0.9}}", "optimizer.args", "optimizer.candidates"),
        ("{name: auto, candidates: [SGD, auto]}", "optimizer.candidates", "cannot contain auto"),
        ("{name: SGD, candidates: [AdamW]}", "optimizer.candidates", "SGD is one optimizer"),
        (
            "{name: auto, candidates: [{name: SGD, args: {lr: 1}}]}",
            "optimizer.candidates.0.args",
            "policy",
        ),
    ],
)
def test_a_wrong_choice_of_optimizers_is_refused(optimizer: str, path: str, words: str) -> None:
    [problem] = problems(HORIZON, f"optimizer: {optimizer}")
    assert problem.path == path
    assert words in f"{problem.rule} {problem.hint}"


@pytest.mark.parametrize(
    "lines",
    [
        ["optimizer: {name: SGD, args: {weight_decay: auto}}", HORIZON],
        [
            "optimizer: {name: Muon, args: {weight_decay: auto}}",
            "learning_rate: {policy: schedule}",
        ],
    ],
)
def test_a_weight_decay_is_chosen_where_policy_and_optimizer_can(lines: list[str]) -> None:
    [problem] = problems(*lines)
    assert problem.path == "optimizer.args.weight_decay"
    assert "number" in problem.rule


@pytest.mark.parametrize(
    "lines",
    [
        [STPT + "search_on: workers, candidate_batch: local}"],
        ["learning_rate: {policy: stpt_horizon, search_on: workers}", "parallel: {mode: async}"],
    ],
)
def test_workers_train_candidates_on_the_global_batch_together(lines: list[str]) -> None:
    [problem] = problems(*lines)
    assert problem.path == "learning_rate.search_on"
    assert "need slots" in problem.rule


@pytest.mark.parametrize(
    ("changes", "search_on"),
    [
        ({}, "auto"),
        ({"parallel": {"mode": "async"}}, "slots"),
        ({"learning_rate": {"policy": "stpt"}}, "slots"),
        ({"learning_rate": {"policy": "stpt", "search_on": "auto"}}, "auto"),
        (
            {"learning_rate": {"policy": "stpt", "search_on": "auto", "candidate_batch": "local"}},
            "slots",
        ),
    ],
)
def test_where_candidates_may_train(changes: dict[str, Any], search_on: str) -> None:
    good = {"model": "small_cnn", "data": "digits", "epochs": 1, "global_batch_size": 8}
    assert Job.model_validate(good | changes).search_on == search_on


def test_only_the_policy_that_searches_chooses_an_optimizer() -> None:
    [problem] = problems("learning_rate: {policy: schedule}", "optimizer: auto")
    assert problem.path == "optimizer"
    assert "stpt_horizon" in problem.rule


def test_a_last_smaller_update_needs_a_given_batch_size() -> None:
    """Whether each micro-batch of it has two samples follows from the size."""
    search = "batch_size_search: {strategy: throughput_knee}"
    [problem] = problems(search, "data: {name: digits, drop_last: false}")
    assert problem.path == "data.drop_last"
    assert parse_job("\n".join([*GOOD.values(), search])).batch_size_search is not None


def test_a_plateau_of_the_validation_metric_needs_a_validation_split() -> None:
    plateau = "learning_rate: {policy: schedule, shape: plateau, plateau_on: val_metric}"
    [problem] = problems(plateau, "data: {name: digits, validation_fraction: 0}")
    assert problem.path == "data.validation_fraction"


def test_only_a_plateau_follows_a_value() -> None:
    [problem] = problems("learning_rate: {policy: schedule, plateau_on: val_metric}")
    assert problem.path == "learning_rate.plateau_on"


def test_all_broken_rules_between_sections_are_reported_at_once() -> None:
    reported = problems(
        "workers: {count: 3, use_gpu: false, resources: {GPU: 1.5}}",
        STPT + "warmup: {epochs: 3}}",
        "data: {name: digits, validation_fraction: 0}",
        "batch_ramp: {steps: [{epoch: 3, factor: 2}, {epoch: 2, factor: 4}]}",
        "batch_norm: {sync: true}",
    )
    assert [problem.path for problem in reported] == [
        "global_batch_size",
        "learning_rate.warmup.epochs",
        "data.validation_fraction",
        "batch_ramp.steps",
        "batch_ramp.steps",
        "batch_ramp.steps",
        "workers.resources.GPU",
        "batch_norm.sync",
    ]


def test_all_broken_rules_of_a_section_are_reported_at_once() -> None:
    reported = problems(
        "learning_rate: {policy: schedule, milestones: [2, 1], half_epoch: 1, warmup: {epochs: 1}}"
    )
    assert [str(problem) for problem in reported] == [
        "learning_rate.milestones: are for shape multistep only, which needs at least one "
        "(given: [2, 1])",
        "learning_rate.milestones: must increase (given: [2, 1])",
        "learning_rate.half_epoch: is within the warm-up of 1 epochs (given: 1)",
    ]


def test_an_unknown_data_set_hides_no_problem_elsewhere() -> None:
    reported = problems("data: {name: cifra10, root: x}", "epochs: 0")
    assert [problem.path for problem in reported] == ["data.name", "epochs"]


def test_every_entry_of_a_list_is_judged() -> None:
    reported = problems(STPT + "candidates: [1, -2, x, 0]}")
    assert [problem.path.rsplit(".", 1)[1] for problem in reported] == ["1", "2", "3"]


def test_long_values_are_cut() -> None:
    (problem,) = problems(f"precision: {'x' * 500}")
    assert problem.value is not None
    assert len(problem.value) == 80


def test_the_message_counts_and_names_the_source() -> None:
    with pytest.raises(JobError) as caught:
        parse_job({"model": "resnet8"}, source="my.yaml")
    assert str(caught.value).startswith("my.yaml: 2 problems\n  data: is required\n")
    assert caught.value.exit_code == 2


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
        "model.name",
        "data.name",
        "epochs",
        "learning_rate.policy",
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


def test_a_broken_rule_reaches_another_process() -> None:
    """Pickled, as pools of processes hand errors on."""
    error = BrokenRulesError([("optimizer", "is wrong")])
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.rules) == (str(error), error.rules)
