"""Read and write YAML as job files use it: plain values only.

On top of PyYAML's safe loader: a key given twice, tags, anchors and aliases are refused with their
line; `1e-3` is a number (YAML 1.1 reads it as text), `2026-01-31` is text (YAML 1.1 reads a date).
What YAML 1.1 reads as another number than people do is refused, and so is
a key without a value. Without aliases a small file cannot stand for a large value.
"""

from __future__ import annotations

import math
import re
from typing import Any

import yaml
from yaml.composer import ComposerError
from yaml.events import AliasEvent
from yaml.nodes import MappingNode, Node, ScalarNode
from yaml.reader import ReaderError

from raytrain_opt.errors import JobError, Problem

# Far deeper than any job, and far from Python's limit of recursion.
MAX_DEPTH = 50
_FLOAT = "tag:yaml.org,2002:float"
_BOOL = "tag:yaml.org,2002:bool"
_DATE = "tag:yaml.org,2002:timestamp"
_EXPONENT = re.compile(r"^[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$")
_TRUE_OR_FALSE = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_LEADING_ZERO = re.compile(r"^[-+]?0(?:[0-9_]+(?:\.[0-9_]*)?(?:[eE][-+]?[0-9]+)?|[oO][0-9_]+)$")
# Text without quotes that stands for something else than it looks like, and what to write.
_UNCLEAR = (
    (_LEADING_ZERO, "may be octal: write the number without a leading zero, or quote the text"),
    (
        re.compile(r"^[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?$"),
        "is a number of base 60 in YAML: quote the text, or write a duration such as 1h30min",
    ),
    (
        re.compile(r"^(?i:yes|no|on|off)$"),
        "may be text or a truth value: write true or false, or quote the text",
    ),
    (re.compile(r"^<<$"), "merges sections: repeat the values, or quote the text"),
    (re.compile(r"^~$"), "is no value in YAML: write null, or quote the text"),
    (re.compile(r"^$"), "a value is missing: write null for none, or remove the key"),
)
# Characters of a wrong line that an error shows.
_MAX_SHOWN = 80


class _Loader(yaml.SafeLoader):
    """The safe loader without tags, anchors, aliases and repeated keys."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        is_shared = isinstance(event, AliasEvent) or event.anchor is not None
        rule = "anchors and aliases (&name, *name) are not allowed in a job file: repeat the value"
        _refuse_if(is_shared, rule, event)
        rule = f"tags such as {event.tag!r} are not allowed in a job file"
        _refuse_if(event.tag is not None, rule, event)
        self._depth += 1
        rule = f"a job file has at most {MAX_DEPTH} levels"
        _refuse_if(self._depth > MAX_DEPTH, rule, event)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def compose_scalar_node(self, anchor: Any) -> ScalarNode:
        node: ScalarNode = super().compose_scalar_node(anchor)
        for pattern, rule in _UNCLEAR if node.style is None else ():
            _refuse_if(pattern.match(node.value) is not None, f"{node.value} {rule}".strip(), node)
        return node

    def compose_mapping_node(self, anchor: Any) -> MappingNode:
        node: MappingNode = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key in (key for key, _ in node.value if isinstance(key, ScalarNode)):
            name, line = (key.tag, key.value), key.start_mark.line + 1
            rule = f"key {key.value!r} is given twice, first in line {lines.get(name)}"
            _refuse_if(name in lines, rule, key)
            lines[name] = line
        return node

    def construct_object(self, node: Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, float) and math.isinf(value) and "inf" not in node.value.lower():
                raise ValueError("it is too large")
            return value
        except ValueError as error:
            rule = f"this number cannot be read: {error}"
            mark: Any = node.start_mark
            raise ComposerError(None, None, rule, mark) from error


class _Dumper(yaml.SafeDumper):
    """Quotes what `_Loader` would read as another type, and writes no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(_FLOAT, _EXPONENT, list("-+.0123456789"))
_Dumper.add_implicit_resolver(_FLOAT, _LEADING_ZERO, list("-+0"))
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_DATE, _BOOL)]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_BOOL, _TRUE_OR_FALSE, list("tTfF"))


def read_yaml(text: str, source: str) -> Any:
    """Return the value written in `text`; None if it holds none.

    Raises JobError with line and column when it is not YAML, or has something refused here.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        raise JobError([_to_problem(error, text)], source) from error
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        problem = Problem(f"line {line}", "has a character YAML forbids")
        raise JobError([problem], source) from error


def write_yaml(value: Any) -> str:
    """Return `value` (mappings, lists, scalars) as YAML that `read_yaml` reads back equal."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=99)


def _refuse_if(condition: bool, rule: str, element: Any) -> None:
    """Raise with the line of `element`, an event or node, if the condition holds."""
    if condition:
        raise ComposerError(None, None, rule, element.start_mark)


def _to_problem(error: yaml.MarkedYAMLError, text: str) -> Problem:
    mark = error.problem_mark or error.context_mark
    rule = ": ".join(part for part in (error.context, error.problem) if part)
    if mark is None:
        return Problem("the file", rule)
    lines = text.splitlines()
    line = lines[mark.line].strip()[:_MAX_SHOWN] if mark.line < len(lines) else ""
    return Problem(f"line {mark.line + 1}, column {mark.column + 1}", rule, repr(line))
