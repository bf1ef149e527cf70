"""Read and write YAML as job files use it: plain values only.

PyYAML's safe loader with the scalars of YAML 1.2: `1e-3` is a number, `1:30` and `2026-01-31` are
text. A key given twice, tags, anchors and aliases are refused with their line: without aliases a
small file cannot stand for a large value.
"""

from __future__ import annotations

import re
from typing import Any

import yaml
from yaml.composer import ComposerError
from yaml.events import AliasEvent
from yaml.nodes import MappingNode, Node, ScalarNode
from yaml.reader import ReaderError

from raytrain_opt.config.error_messages import shown
from raytrain_opt.errors import JobError, Problem

# Far deeper than any job, and far from Python's limit of recursion.
MAX_DEPTH = 50
_INT, _UNCLEAR = "tag:yaml.org,2002:int", "tag:unclear"
_SCALARS = {
    "tag:yaml.org,2002:null": r"null|Null|NULL|~|",
    "tag:yaml.org,2002:bool": r"true|True|TRUE|false|False|FALSE",
    _UNCLEAR: r"(?i:yes|no|on|off)",
    _INT: r"[-+]?[0-9]{1,100}",
    "tag:yaml.org,2002:float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}


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

    def compose_mapping_node(self, anchor: Any) -> MappingNode:
        node: MappingNode = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key in (key for key, _ in node.value if isinstance(key, ScalarNode)):
            name, line = (key.tag, key.value), key.start_mark.line + 1
            rule = f"key {key.value!r} is given twice, first in line {lines.get(name)}"
            _refuse_if(name in lines, rule, key)
            lines[name] = line
        return node

    def construct_unclear(self, node: ScalarNode) -> None:
        rule = "may be text or a truth value: write true or false, or quote the text"
        _refuse_if(True, f"{node.value} {rule}", node)


class _Dumper(yaml.SafeDumper):
    """Quotes what `_Loader` would read as another type, and writes no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _kind in (_Loader, _Dumper):
    _kind.yaml_implicit_resolvers = {
        None: [(tag, re.compile(rf"^(?:{pattern})$")) for tag, pattern in _SCALARS.items()]
    }
_Loader.add_constructor(_INT, lambda _, node: int(node.value))  # without octal numbers
_Loader.add_constructor(_UNCLEAR, _Loader.construct_unclear)


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
    line = lines[mark.line].strip() if mark.line < len(lines) else ""
    return Problem(f"line {mark.line + 1}, column {mark.column + 1}", rule, shown(line))
