"""Find the user's own functions, written `package.module:function` in a job file."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from raytrain_opt.errors import JobError, Problem


def is_function_name(name: object) -> bool:
    """True for a function itself and for text of the form `package.module:function`."""
    return callable(name) or (isinstance(name, str) and ":" in name)


def resolve_function(name: str | Callable[..., Any], path: str) -> Callable[..., Any]:
    """The function that `name` stands for; `path` is the YAML path named in the error.

    The current directory is searched too, as `python -m` does.
    Raises JobError: no such module, no such function (with the nearest), or not callable.
    """
    if not isinstance(name, str):
        return name
    module_name, _, function = name.partition(":")
    if not module_name or not function or module_name.startswith("."):
        rule = "must have the form package.module:function"
        raise JobError([Problem(path, rule, repr(name))])
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        target: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever the module does when it is imported
        raise JobError([_not_imported(module_name, error, path, name)]) from error
    for part in function.split("."):
        if not hasattr(target, part):
            near = get_close_matches(part, dir(target), n=1)
            hint = f"did you mean {near[0]!r}?" if near else None
            rule = f"{module_name!r} has no {part!r}"
            raise JobError([Problem(path, rule, repr(name), hint)])
        target = getattr(target, part)
    if not callable(target):
        raise JobError([Problem(path, "must be a function or class", repr(name))])
    return target  # type: ignore[no-any-return]


def _not_imported(module: str, error: BaseException, path: str, name: str) -> Problem:
    hint = f"searched {os.getcwd()} and the installed packages"
    what = str(error)
    if not isinstance(error, ImportError):
        frame = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__}: {error}"
        hint = f"raised at {frame.filename}:{frame.lineno}"
    return Problem(path, f"module {module!r} cannot be imported: {what}", repr(name), hint)
