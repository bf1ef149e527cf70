"""Find functions of the user's own, written `package.module:function` in a job file."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

from raytrain_opt.config.error_messages import nearest, shown
from raytrain_opt.config.section import is_instance
from raytrain_opt.errors import JobError, Problem, origin

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
    problems = [
        Problem(field, _WAS_OBJECT, shown(name), _PASS_AGAIN)
        if is_instance(name)
        else Problem(field, rule, shown(name), hint)
        for field, name in functions
    ]
    if problems:
        raise JobError(problems, run_dir)


def _refuse_standard_library(module: str | None, path: str, name: str) -> None:
    root = (module or "").partition(".")[0]
    if root in sys.stdlib_module_names:
        rule = f"must be a function of your own, not of Python's module {root!r}"
        raise JobError([Problem(path, rule, repr(name))])


def _import_problem(module: str, error: BaseException, path: str, name: str) -> Problem:
    cause = str(error)
    hint = f"searched {os.getcwd()} and the installed packages"
    if not isinstance(error, ImportError):
        cause = f"{type(error).__name__}: {error}"
        hint = f"raised at {origin(error)}"
    return Problem(path, f"module {module!r} cannot be imported: {cause}", repr(name), hint)
