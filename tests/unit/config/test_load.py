"""Job files from disk, text and mappings; dumped jobs; overrides; the schema."""

from __future__ import annotations

import json
import os
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from raytrain_opt.config.data import ArraySetData, HoldOut
from raytrain_opt.config.learning_rate import HorizonPolicy, SchedulePolicy, Warmup
from raytrain_opt.config.load import dump_job, job_schema, load_job, parse_job, resolve_function
from raytrain_opt.config.schema import Job
from raytrain_opt.config.section import Instance
from raytrain_opt.errors import JobError

BASE: dict[str, Any] = {"model": "resnet8", "data": "digits", "epochs": 2, "global_batch_size": 8}


def a_function() -> None:
    """Stands for a user's model, data set or loss."""


def paths_of(error: JobError) -> list[str]:
    return [problem.path for problem in error.problems]


def test_a_short_file_becomes_a_job_with_defaults(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("model: resnet8\ndata: digits\nepochs: 2\nglobal_batch_size: 8\n")
    job = load_job(file)
    assert job.model.name == "resnet8"
    assert isinstance(job.data, ArraySetData)
    assert job.learning_rate == HorizonPolicy(policy="stpt_horizon")
    assert job == Job.model_validate(BASE) == load_job(str(file))


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, ["Muon", "SGD", "ScheduleFreeSGD", "AdamW"]),
        ({"learning_rate": {"policy": "stpt_horizon", "initial": 1}}, None),
        ({"parallel": {"mode": "async"}}, ["SGD"]),
        ({"learning_rate": {"policy": "schedule"}}, ["SGD"]),
        ({"learning_rate": {"policy": "stpt"}}, ["SGD"]),
        ({"optimizer": {"args": {"momentum": 0.5}}}, ["SGD"]),
        ({"optimizer": {"name": "auto", "candidates": ["SGD", "AdamW"]}}, ["SGD", "AdamW"]),
    ],
)
def test_without_an_optimizer_the_search_chooses_one_where_it_can(
    changes: dict[str, Any], names: list[str] | None
) -> None:
    job = Job.model_validate({**BASE, **changes})
    usual = ["Muon", "SGD", "ScheduleFreeSGD", "AdamW"]
    assert [optimizer.name for optimizer in job.optimizers] == (names or usual)
    assert parse_job(dump_job(job)) == job


@pytest.mark.parametrize(
    ("changes", "averages"),
    [
        ({}, True),
        ({"optimizer": "SGD"}, True),
        ({"optimizer": "ScheduleFreeSGD"}, False),
        ({"average": None}, False),
        ({"learning_rate": {"policy": "stpt"}}, False),
        ({"learning_rate": {"policy": "schedule"}}, False),
        ({"learning_rate": {"policy": "schedule"}, "average": "auto"}, True),
        ({"optimizer": "SGD", "parallel": {"mode": "async"}}, False),
    ],
)
def test_weights_are_averaged_by_default_where_the_policy_lets_the_rate_fall(
    changes: dict[str, Any], averages: bool
) -> None:
    job = Job.model_validate({**BASE, **changes})
    assert (job.average is not None) == averages
    assert parse_job(dump_job(job)) == job


@pytest.mark.parametrize(
    ("section", "given", "expected"),
    [
        ({"policy": "stpt_horizon"}, None, HoldOut(0.1, only_in_search=True)),
        ({"policy": "stpt_horizon"}, 0.3, HoldOut(0.3, only_in_search=True)),
        ({"policy": "stpt"}, None, HoldOut(0.1)),
        ({"policy": "schedule"}, None, HoldOut(0.0)),
        ({"policy": "schedule"}, 0.1, HoldOut(0.1)),
        ({"policy": "schedule", "shape": "plateau"}, None, HoldOut(0.1)),
    ],
)
def test_a_validation_split_is_held_out_where_candidates_are_scored_or_a_plateau_follows_it(
    section: dict[str, Any], given: float | None, expected: HoldOut
) -> None:
    data = {"name": "digits", "validation_fraction": given}
    job = Job.model_validate({**BASE, "data": data, "learning_rate": section})
    assert job.hold_out == expected


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"learning_rate": {"policy": "stpt", "alpha": 200, "candidates": [2.0, 1.0]}},
        {"learning_rate": {"policy": "schedule", "shape": "multistep", "milestones": [1]}},
        {"learning_rate": {"policy": "replay", "schedule": "schedule.jsonl"}},
        {"data": {"name": "cifar10", "normalize": [[0.5], [0.25]], "augment": {"flip": True}}},
        {"data": {"name": "my.data:sets", "args": {"size": 3, "split": [1e-3, "1e-3"]}}},
        {"optimizer": "Adam", "loss": "my.losses:focal", "checkpoint": {"keep": "all"}},
        {"parallel": {"mode": "async", "staleness_bound": None, "compression": "bf16"}},
        {"workers": {"count": 2, "use_gpu": False, "resources": {"CPU": 0.5}}, "name": "1e3"},
    ],
)
def test_a_dumped_job_is_read_back_equal(changes: dict[str, Any]) -> None:
    job = Job.model_validate({**BASE, **changes})
    text = dump_job(job)
    assert parse_job(text) == job
    assert dump_job(parse_job(text)) == text


def test_functions_are_dumped_by_name() -> None:
    names = {key: {"name": a_function} for key in ("model", "data", "loss")}
    job = Job.model_validate({**BASE, **names, "optimizer": {"args": {"of": a_function}}})
    assert job.model.name is a_function
    reread = parse_job(dump_job(job))
    name = f"{__name__}:a_function"
    assert (reread.model.name, reread.data.name, reread.loss.name) == (name, name, name)
    assert reread.optimizer.args == {"of": name}


@pytest.mark.parametrize("field", ["model", "data", "loss", "task", "optimizer"])
def test_a_function_without_a_name_is_refused(field: str) -> None:
    with pytest.raises(JobError, match=rf"{field}\.name: must be a function .* args"):
        Job.model_validate({**BASE, field: partial(a_function)})
    job = Job.model_validate({**BASE, "optimizer": {"args": {"of": partial(a_function)}}})
    with pytest.raises(JobError, match=r"optimizer\.args\.of: cannot be written in a job file"):
        dump_job(job)


def test_an_object_is_named_by_its_class_from_which_nobody_can_make_it() -> None:
    objects: dict[str, Any] = {"model": Fraction(1), "task": Fraction(2), "data": (Fraction(3), 4)}
    job = Job(**{**BASE, **objects})
    assert isinstance(job.model.name, Instance)
    assert job.model.name.value is objects["model"]
    for field, name in parse_job(dump_job(job)).functions:
        assert name == "instance of fractions:Fraction"
        with pytest.raises(JobError, match=rf"{field}: was an object .*; pass it again: run\("):
            resolve_function(name, field)


def test_a_wrong_job_from_python_has_the_errors_of_a_file() -> None:
    wrong = {**BASE, "data": "digit", "epochs": 0}
    with pytest.raises(JobError) as from_python:
        Job(**wrong)
    with pytest.raises(JobError) as from_file:
        parse_job(json.dumps(wrong))
    assert paths_of(from_python.value) == ["data.name", "epochs"]
    assert from_python.value.problems == from_file.value.problems


def test_arguments_yaml_cannot_hold_are_named() -> None:
    job = Job.model_validate({**BASE, "model": {"name": "resnet8", "args": {"a": [1, object()]}}})
    with pytest.raises(JobError, match=r"model\.args\.a\.1: cannot be written"):
        dump_job(job)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"- a\n- b\n", "must be keys and values (given: ['a', 'b'])"),
        (b"name: \xff\n", "is not UTF-8 text: byte 6 is 0xff"),
        (b"name: [", "line 1, column 8"),
        (b"x" * (2**20 + 1), "has more than 1,048,576 bytes"),
    ],
)
def test_files_that_hold_no_job(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_bytes(content)
    with pytest.raises(JobError) as caught:
        load_job(file)
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"{file}: 1 problem")


def test_a_missing_file_names_the_one_meant(tmp_path: Path) -> None:
    (tmp_path / "quickstart.yaml").touch()
    with pytest.raises(JobError, match=r"does not exist; did you mean 'quickstart\.yaml'"):
        load_job(tmp_path / "quikstart.yaml")


def test_a_folder_or_a_fifo_is_no_job_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "job.yaml")
    for path, reason in (
        (tmp_path, "is not a plain file"),
        (tmp_path / "job.yaml", "is not a plain file"),
        (tmp_path / "job.yaml" / "job.yaml", "Not a directory"),
        (Path("n" * 5000), "File name too long"),
    ):
        with pytest.raises(JobError, match=f"the file: cannot be read: {reason}"):
            load_job(path)


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("epochs=3", lambda job: job.epochs == 3),
        ("model.args={width: 8}", lambda job: job.model.args == {"width": 8}),
        ("data.validation_fraction=.2", lambda job: job.data.validation_fraction == 0.2),
        ("learning_rate.candidates.1=3", lambda job: job.learning_rate.candidates == [2, 3]),
        ("learning_rate.candidates=wide", lambda job: job.learning_rate.candidates == "wide"),
        (
            "learning_rate.warmup.epochs=1",
            lambda job: job.learning_rate.warmup == Warmup(epochs=1),
        ),
        ("slots.count=", lambda job: job.slots.count is None),
        (
            "learning_rate={policy: schedule, shape: linear}",
            lambda job: job.learning_rate == SchedulePolicy(policy="schedule", shape="linear"),
        ),
    ],
)
def test_overrides(override: str, read: Any) -> None:
    text = json.dumps({**BASE, "learning_rate": {"policy": "stpt", "candidates": [2, 1]}})
    assert read(parse_job(text, overrides=[override]))


@pytest.mark.parametrize("section", ["model", "data", "optimizer", "task", "loss"])
def test_an_override_enters_a_section_that_is_a_bare_name(section: str) -> None:
    text = json.dumps({**BASE, section: "my.code:thing"})
    job = parse_job(text, overrides=[f"{section}.name=my.code:other"])
    assert getattr(job, section).name == "my.code:other"


def test_later_overrides_win() -> None:
    text = json.dumps({**BASE, "workers": {"count": 1}})
    assert parse_job(text, overrides=["workers.count=2", "workers.count=4"]).workers.count == 4


@pytest.mark.parametrize(
    ("override", "path", "words"),
    [
        ("epochs", "--set", "the form section.key=value"),
        ("=3", "--set", "the form section.key=value"),
        ("a." * 9999 + "b=3", "--set", "with at most 50 levels"),
        ("name=x=y", "name", "(given: 'x=y')"),
        ("epochs=[", "--set epochs", "expected the node content"),
        ("epochs.count=3", "--set epochs.count", "epochs is a single value"),
        ("learning_rate.candidates.2=3", "--set learning_rate.candidates.2", "from 0 to 1"),
        ("learning_rate.candidates.x=3", "--set learning_rate.candidates.x", "is a list"),
        ("epochs=010", "--set epochs", "without a leading zero"),
        ("name=a #1", "--set name", "a comment begins"),
        ("storage_path=$HOME/runs", "storage_path", "$HOME is not replaced"),
        ("data={name: image_folder, root: $D/x}", "data.root", "$D is not replaced"),
        ("data={name: arrays, train: [a, b], test: [c, $D]}", "data.test.1", "$D is not"),
        ("model.args={a: [no]}", "--set model.args", "no may be text or a truth value"),
    ],
)
def test_wrong_overrides(override: str, path: str, words: str) -> None:
    text = json.dumps({**BASE, "learning_rate": {"policy": "stpt", "candidates": [2, 1]}})
    with pytest.raises(JobError) as caught:
        parse_job(text, overrides=[override])
    assert paths_of(caught.value) == [path]
    assert words in str(caught.value)


def test_quoted_words_are_text_or_truth_values() -> None:
    values = ["name='NO'", "channels_last='no'", "model.args={a: 'no', b: [null]}"]
    job = parse_job(json.dumps(BASE), overrides=values)
    assert (job.name, job.channels_last, job.model.args) == ("NO", False, {"a": "no", "b": [None]})
    assert parse_job(dump_job(job)) == job


def test_a_list_of_candidates_is_of_a_size_that_can_be_tried() -> None:
    numbers = [1 + i / 1000 for i in range(100_001)]
    with pytest.raises(JobError, match="candidates: list should have at most 100 items"):
        Job.model_validate({**BASE, "learning_rate": {"policy": "stpt", "candidates": numbers}})


def test_the_schema_names_every_field_with_its_meaning() -> None:
    schema = job_schema()
    assert set(schema["properties"]) == set(Job.model_fields)
    for field in schema["properties"].values():
        section = field.get("$ref", "#/$defs/").removeprefix("#/$defs/")
        assert "description" in field or "description" in schema["$defs"][section]
    assert schema["required"] == ["model", "data", "global_batch_size"]
    assert schema["additionalProperties"] is False
