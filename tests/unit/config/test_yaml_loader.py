"""Plain YAML is read as people mean it; tags, anchors and repeated keys are refused by line."""

from __future__ import annotations

from typing import Any

import pytest

from raytrain_opt.config.yaml_loader import MAX_DEPTH, read_yaml, write_yaml
from raytrain_opt.errors import JobError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("-1.5e-3", -1.5e-3),
        (".5e1", 5.0),
        ("1_0e1", 100.0),
        ("e3", "e3"),
        ("1e", "1e"),
        ("2026-01-31", "2026-01-31"),
        ("true", True),
        ("null", None),
        ("1_000", 1000),
        ("0x10", 16),
        ("1.10", 1.1),
        ("'010'", "010"),
        ("host:80", "host:80"),
        ("'1e-3'", "1e-3"),
        ("", None),
        ("\ufeffa: 1", {"a": 1}),
    ],
)
def test_plain_values(text: str, value: Any) -> None:
    read = read_yaml(text, "job")
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("a: 1\nb: 2\na: 3", "line 3, column 1", "'a' is given twice, first in line 1"),
        ("a:\n  b: 1\n  'b': 2", "line 3, column 3", "'b' is given twice, first in line 2"),
        ("a: !!python/object/apply:os.getcwd []", "line 1, column 4", "tags"),
        ("a: !!str 3", "line 1, column 4", "tags"),
        ("a: &a [*a]", "line 1, column 4", "anchors and aliases"),
        ("a: *b", "line 1, column 4", "anchors and aliases"),
        ("a: 1\n<<: {b: 2}", "line 2, column 1", "repeat the value"),
        ("[" * 5000, f"line 1, column {MAX_DEPTH + 1}", f"at most {MAX_DEPTH} levels"),
        ("a: [1\nb: 2", "line 2, column 2", "expected ',' or ']'"),
        ("a: 1\n\tb: 2", "line 2, column 1", "cannot start any token"),
        ("a: 1\n---\nb: 2", "line 2, column 1", "single document"),
        ("? [a]\n: b", "line 1", "unhashable key"),
        ("a: 0x_", "line 1, column 4", "this number cannot be read"),
        ("a: 1\nb: \x07", "line 2", "character YAML forbids"),
        ("a: 010", "line 1, column 4", "without a leading zero"),
        ("a: [1, 08]", "line 1, column 8", "without a leading zero"),
        ("a: 00e3", "line 1, column 4", "without a leading zero"),
        ("a: 0o17", "line 1, column 4", "without a leading zero"),
        ("a: 1:30", "line 1, column 4", "base 60"),
        ("a:\n- 22:22:10.5", "line 2, column 3", "base 60"),
        ("a: ~", "line 1, column 4", "write null"),
        ("a: [1, No]", "line 1, column 8", "No may be text or a truth value: write true"),
        ("off: 1", "line 1, column 1", "off may be text or a truth value"),
        ("a: 1\nb:\nc: 2", "line 2, column 3", "a value is missing"),
        ("a:\n- # none", "line 2", "a value is missing"),
        ("a: 1e999", "line 1, column 4", "too large"),
    ],
)
def test_refused_with_line_and_reason(text: str, place: str, words: str) -> None:
    with pytest.raises(JobError) as caught:
        read_yaml(text, "bad.yaml")
    (problem,) = caught.value.problems
    assert problem.path.startswith(place)
    assert words in problem.rule
    assert str(caught.value).startswith("bad.yaml: 1 problem\n")


@pytest.mark.parametrize(
    "value",
    [
        {"text": "1e-3", "number": 1e-3, "small": 1e-300, "whole": 3.0},
        {"date": "2026-01-31", "yes": "yes", "none": None, "null": "null", "empty": ""},
        ["010", "08", "0o10", "007.5", "1:30", "~", "<<", "no", "NO", "1e999", "1_0"],
        [[0.1, 0.2], [], {}, "a: b", "ü", "line\nline", float("inf")],
    ],
)
def test_written_values_are_read_back_equal(value: Any) -> None:
    assert read_yaml(write_yaml(value), "job") == value


def test_shared_values_are_written_out_without_anchors() -> None:
    shared = [1, 2]
    assert "&" not in write_yaml({"a": shared, "b": shared})
