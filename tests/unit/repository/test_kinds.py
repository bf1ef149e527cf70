"""Below `config` nobody asks a section for its kind: sections say what their kinds can do."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import raytrain_opt
import raytrain_opt.config.schema  # noqa: F401  every section
from raytrain_opt.config.section import Section
from raytrain_opt.config.updates import OPTIMIZERS

_PACKAGE = Path(raytrain_opt.__file__).parent
# Where kinds are told apart: the sections themselves, and the one function that resolves them.
_ALLOWED = ("config/", "execution/resolve.py")


def _classes(section: type[Section] = Section) -> set[type[Section]]:
    return {section, *(kind for below in section.__subclasses__() for kind in _classes(below))}


def _names(field: str) -> set[str]:
    """Return the names of the policies or strategies, which select a section."""
    modules = ("config.learning_rate", "config.batch_size")
    sections = (s for s in _classes() if s.__module__.endswith(modules))
    sections = (s for s in sections if field in s.model_fields)
    return {name for s in sections for name in get_args(s.model_fields[field].annotation)}


_SECTIONS = {section.__name__ for section in _classes()}
_KINDS = {"sync", "async", *_names("policy"), *_names("strategy"), *OPTIMIZERS} - {"none"}


def _questions(code: str) -> Iterator[str]:
    """Yield each question for a kind: by the class of a section, or by the name of a kind."""
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Call(ast.Name("isinstance"), [_, asked]) | ast.MatchClass(cls=asked):
                names = {getattr(part, "id", "") for part in ast.walk(asked)}
                is_asked = names & _SECTIONS
            case ast.Compare(ast.Name("key")):  # of a dictionary
                continue
            case ast.Compare() | ast.MatchValue():
                values = {getattr(part, "value", None) for part in ast.walk(node)}
                is_asked = {value for value in values if isinstance(value, str)} & _KINDS
            case _:
                continue
        if is_asked:
            yield f"line {node.lineno}: {ast.unparse(node)}"


def test_kinds_say_what_they_can_do() -> None:
    files = {path.relative_to(_PACKAGE).as_posix(): path for path in _PACKAGE.rglob("*.py")}
    found = [
        f"{name}, {question}"
        for name, path in files.items()
        if not name.startswith(_ALLOWED)
        for question in _questions(path.read_text())
    ]
    assert len(files) > 50
    assert not found
