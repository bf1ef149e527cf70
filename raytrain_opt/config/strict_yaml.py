"""YAML as job files use it: plain values only, nothing that runs, hides or explodes.

On top of PyYAML's safe loader: a key given twice, tags, anchors that contain themselves and
documents that grow beyond `MAX_NODES` values are refused with their line; `1e-3` is a number
(YAML 1.1 reads it as text) and `2026-01-31` is text (YAML 1.1 reads it as a date).
"""

from __future__ import annotations

import re
from typing import Any

import yaml
from yaml.composer import ComposerError
from yaml.events import AliasEvent
from yaml.nodes import CollectionNode, MappingNode, Node, ScalarNode
from yaml.reader import ReaderError

from raytrain_opt.errors import JobError, Problem

MAX_NODES = 10_000
MAX_DEPTH = 50
_FLOAT = "tag:yaml.org,2002:float"
_DATE = "tag:yaml.org,2002:timestamp"
_EXPONENT = re.compile(r"^[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$")


class _Loader(yaml.SafeLoader):
    """Measures while it composes, so that nothing large is ever built."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._nesting = 0
        self._sizes: dict[Node, tuple[int, int]] = {}

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, AliasEvent):
            alias = super().compose_node(parent, index)
            _refuse(alias not in self._sizes, "an anchor contains itself", event)
            return alias
        rule = f"tags such as {event.tag!r} are not allowed in a job file"
        _refuse(event.tag is not None, rule, event)
        self._nesting += 1
        _check_limit("levels", self._nesting, MAX_DEPTH, event)
        _check_limit("values", len(self._sizes), MAX_NODES, event)
        node = super().compose_node(parent, index)
        self._nesting -= 1
        if node is not None:
            self._measure(node, event)
        return node

    def compose_mapping_node(self, anchor: Any) -> MappingNode:
        node: MappingNode = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key in (key for key, _ in node.value if isinstance(key, ScalarNode)):
            name, line = (key.tag, key.value), key.start_mark.line + 1
            rule = f"key {key.value!r} is given twice, first in line {lines.get(name)}"
            _refuse(name in lines, rule, key)
            lines[name] = line
        return node

    def construct_object(self, node: Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except ValueError as error:
            rule = f"this number cannot be read: {error}"
            mark: Any = node.start_mark
            raise ComposerError(None, None, rule, mark) from error

    def _measure(self, node: Node, event: Any) -> None:
        """Note how many values and levels `node` has once its aliases are written out."""
        inner = [self._sizes[child] for child in _children(node)]
        size = 1 + sum(size for size, _ in inner)
        depth = 1 + max((depth for _, depth in inner), default=0)
        _check_limit("values", size, MAX_NODES, event)
        _check_limit("levels", depth, MAX_DEPTH, event)
        self._sizes[node] = (size, depth)


class _Dumper(yaml.SafeDumper):
    """Quotes what `_Loader` would read as something else, and writes no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(_FLOAT, _EXPONENT, list("-+.0123456789"))
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _DATE]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}


def read_yaml(text: str, source: str) -> Any:
    """The value written in `text`; None when there is none.

    Raises JobError with the line and column: not YAML, or one of the things refused here.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        raise JobError([_problem(error, text)], source) from error
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise JobError(
            [Problem(f"line {line}", "has a character YAML forbids")], source
        ) from error


def write_yaml(value: Any) -> str:
    """`value` (mappings, lists, plain scalars) as YAML that `read_yaml` reads back equal."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=99)


def _check_limit(what: str, count: int, limit: int, event: Any) -> None:
    rule = f"a job file has at most {limit} {what}, with anchors written out"
    _refuse(count > limit, rule, event)


def _refuse(wrong: bool, rule: str, place: Any) -> None:
    """Raises with the line of `place`, an event or node."""
    if wrong:
        raise ComposerError(None, None, rule, place.start_mark)


def _children(node: Node) -> list[Node]:
    if isinstance(node, MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, CollectionNode) else []


def _problem(error: yaml.MarkedYAMLError, text: str) -> Problem:
    mark = error.problem_mark or error.context_mark
    rule = ": ".join(part for part in (error.context, error.problem) if part)
    if mark is None:
        return Problem("the file", rule)
    lines = text.splitlines()
    given = lines[mark.line].strip()[:80] if mark.line < len(lines) else ""
    return Problem(f"line {mark.line + 1}, column {mark.column + 1}", rule, repr(given))
