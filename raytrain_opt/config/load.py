"""From a job file to a `Job` and back, and to the functions that it names.

Every error in the file is reported at once.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast, get_type_hints

from pydantic import TypeAdapter, ValidationError

from raytrain_opt.config.error_messages import nearest, shown
from raytrain_opt.config.schema import Job
from raytrain_opt.config.section import function_name, is_instance
from raytrain_opt.config.yaml_loader import MAX_DEPTH, read_yaml, write_yaml
from raytrain_opt.errors import JobError, Problem, origin
from raytrain_opt.storage import read_file

MAX_BYTES = 2**20
# A job file may hold these as a bare name: `model: resnet8`.
_NAMED_SECTIONS = ("model", "data", "optimizer", "task", "loss")

# Checks valid sections, by name, beyond the schema; see `execution.check.check_sections`.
SectionCheck = Callable[[Mapping[str, Any]], list[Problem]]


def load_job(
    path: str | Path, overrides: Sequence[str] = (), check_sections: SectionCheck | None = None
) -> Job:
    """Return the job written in a YAML file, with each `a.b=c` of `overrides` applied.

    Raises JobError with every problem: file, YAML syntax, overrides, schema. With
    `check_sections`, a file that breaks the schema in one section is also checked beyond the
    schema in the others, so that an unknown model is reported at once.
    """
    return parse_job(_read_text(Path(path)), str(path), overrides, check_sections)


def parse_job(
    text: str,
    source: str = "job",
    overrides: Sequence[str] = (),
    check_sections: SectionCheck | None = None,
) -> Job:
    """Return the job given as YAML text; `source` names it in errors.

    Raises JobError as `load_job` does.
    """
    raw = read_yaml(text, source)
    if not isinstance(raw, dict):
        rule = "is empty" if raw is None else "must be keys and values"
        value = None if raw is None else shown(raw)
        hint = "a job needs at least model, data, epochs and global_batch_size"
        raise JobError([Problem("the file", rule, value, hint)], source)
    problems = _apply_overrides(raw, overrides)
    try:
        result = Job.model_validate(raw)
        if not problems:
            return result
    except JobError as error:
        problems += error.problems
    if check_sections is not None:
        paths = {problem.path for problem in problems}
        others = check_sections(_valid_sections(raw))
        problems += [problem for problem in others if problem.path not in paths]
    raise JobError(problems, source)


def dump_job(job: Job) -> str:
    """Return the job with every default filled in, as YAML that `parse_job` reads back equal.

    A function given from Python is written as module:qualname. Raises JobError when YAML cannot
    hold an argument.
    """
    return write_yaml(plain_job(job))


def plain_job(job: Job) -> dict[str, Any]:
    """Return the job as mappings, lists and scalars. Raises JobError as `dump_job` does."""
    return {key: _to_plain(value, key) for key, value in job.model_dump().items()}


def flatten(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return every value of a plain job by its dotted path."""
    fields: dict[str, Any] = {}
    for key, value in section.items():
        path = f"{prefix}{key}"
        fields |= flatten(value, f"{path}.") if isinstance(value, Mapping) else {path: value}
    return fields


def job_schema() -> dict[str, Any]:
    """Return the JSON schema of a job file, for editors and other programs."""
    schema = Job.model_json_schema()
    for section in (schema, *schema["$defs"].values()):
        for field in section["properties"].values():
            if "description" in field:  # of several lines where the source has several
                field["description"] = " ".join(field["description"].split())
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _read_text(path: Path) -> str:
    try:
        return read_file(path, MAX_BYTES).decode("utf-8-sig")
    except FileNotFoundError as error:
        names = [file.name for file in path.parent.glob("*.y*ml")]
        problem = Problem("the file", "does not exist", None, nearest(path.name, names))
        raise JobError([problem], str(path)) from error
    except UnicodeDecodeError as error:
        rule = f"is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}"
        raise JobError([Problem("the file", rule)], str(path)) from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        problem = Problem("the file", f"cannot be read: {reason or error}")
        raise JobError([problem], str(path)) from error


def _apply_overrides(raw: dict[str, Any], overrides: Sequence[str]) -> list[Problem]:
    """Write each `path=value` into `raw`, in order; return the problems of failed overrides.

    The value is YAML. The path enters lists by index and creates missing sections; the schema
    checks later whether its keys exist.
    """
    problems = []
    for override in overrides:
        path, equals, text = override.partition("=")
        keys = path.strip().split(".")
        if len(keys) > MAX_DEPTH or not equals or not all(keys):
            rule = f"an override has the form section.key=value, with at most {MAX_DEPTH} levels"
            problems.append(Problem("--set", rule, shown(override)))
            continue
        try:
            value = read_yaml(text, source=override)
            if "#" in text and "#" not in str(value):
                raise ValueError("a comment begins at the #: quote the text")
            _put(raw, keys, value)
        except JobError as error:
            problems += [Problem(f"--set {path}", p.rule, p.value) for p in error.problems]
        except ValueError as error:
            problems.append(Problem(f"--set {path}", str(error), repr(text)))
    return problems


def _put(raw: dict[str, Any], keys: list[str], value: Any) -> None:
    """Write `value` at the path of `keys`. Raises ValueError."""
    container: Any = raw
    for depth, key in enumerate(keys, 1):
        above, place = ".".join(keys[: depth - 1]), cast(Any, key)
        if isinstance(container, list):
            if not key.isdecimal() or int(key) >= len(container):
                last = len(container) - 1
                raise ValueError(f"{above} is a list: give an index from 0 to {last}")
            place = int(key)
        elif not isinstance(container, dict):
            raise ValueError(f"{above} is a single value, it has no {key!r}")
        if depth == len(keys):
            container[place] = value
            return
        inner = container.get(key) if isinstance(container, dict) else container[place]
        if depth == 1 and key in _NAMED_SECTIONS and not isinstance(inner, dict | list | None):
            inner = {"name": inner}
        container[place] = {} if inner is None else inner
        container = container[place]


def _valid_sections(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of a wrong job that are valid by themselves."""
    sections = {}
    kinds = get_type_hints(Job, include_extras=True)
    for name in raw.keys() & Job.model_fields.keys():
        with suppress(ValidationError):  # reported already
            sections[name] = TypeAdapter(kinds[name]).validate_python(raw[name])
    return sections


def _to_plain(value: Any, path: str) -> Any:
    """Return `value` as mappings, lists and scalars only; `path` names it in errors."""
    prefix = f"{path}." if path else ""
    if isinstance(value, Mapping):
        return {key: _to_plain(inner, f"{prefix}{key}") for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(inner, f"{prefix}{i}") for i, inner in enumerate(value)]
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):  # also of subclasses, such as numpy's float64
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "__qualname__"):  # a function or class
        return function_name(value)
    rule = "cannot be written in a job file; give a number, text, list or mapping"
    raise JobError([Problem(path, rule, shown(value))])


_WAS_OBJECT = "was an object given from Python, which a run directory does not hold"
_PASS_AGAIN = "pass it again: run(Job(…), resume=RUN), or load_model(RUN, model=…)"


def resolve_function(name: str | Callable[..., Any], path: str) -> Callable[..., Any]:
    """Import and return the function called `name`; `path` is the field that errors name.

    The current directory is searched too, as `python -m` does. Raises JobError: no such module,
    no such function (with the nearest name), not callable, or of the standard library, with which
    a job file could do anything (`os:system`).
    """
    if not isinstance(name, str):
        return name
    if is_instance(name):
        raise JobError([Problem(path, _WAS_OBJECT, shown(name), _PASS_AGAIN)])
    module_name, _, function = name.partition(":")
    if not module_name or not function or module_name.startswith("."):
        rule = "must have the form package.module:function"
        raise JobError([Problem(path, rule, repr(name))])
    _refuse_standard_library(module_name, path, name)
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        target: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's module can raise anything on import
        raise JobError([_import_problem(module_name, error, path, name)]) from error
    for part in function.split("."):
        if not hasattr(target, part):
            rule, hint = f"{module_name!r} has no {part!r}", nearest(part, dir(target))
            if module_name == "__main__":
                rule = "was defined in the script that trained"
                hint = "put it into a module, or load the run from that script"
            raise JobError([Problem(path, rule, repr(name), hint)])
        target = getattr(target, part)
        if inspect.ismodule(target) or inspect.isroutine(target) or inspect.isclass(target):
            _refuse_standard_library(getattr(target, "__module__", target.__name__), path, name)
    if not callable(target):
        raise JobError([Problem(path, "must be a function or class", repr(name))])
    return target  # type: ignore[no-any-return]


def refuse_functions(functions: Iterable[tuple[str, object]], run_dir: str) -> None:
    """Raise JobError naming each function, by (field, name), that a run directory would run.

    Anybody may have made that directory, and chosen any function that is installed here.
    """
    rule = "names a function, and anybody may have written this run directory"
    hint = "add --trust (in Python trust=True) if you know that it is yours, or who made it"
    if problems := [
        Problem(field, _WAS_OBJECT, shown(name), _PASS_AGAIN)
        if is_instance(name)
        else Problem(field, rule, shown(name), hint)
        for field, name in functions
    ]:
        raise JobError(problems, run_dir)


def _refuse_standard_library(module: str | None, path: str, name: str) -> None:
    if (root := (module or "").partition(".")[0]) in sys.stdlib_module_names:
        rule = f"must be a function of your own, not of Python's module {root!r}"
        raise JobError([Problem(path, rule, repr(name))])


def _import_problem(module: str, error: BaseException, path: str, name: str) -> Problem:
    cause = str(error)
    hint = f"searched {os.getcwd()} and the installed packages"
    if not isinstance(error, ImportError):
        cause = f"{type(error).__name__}: {error}"
        hint = f"raised at {origin(error)}"
    return Problem(path, f"module {module!r} cannot be imported: {cause}", repr(name), hint)
