"""Errors a user can meet: what happened, the likely cause, what to change. All can be pickled."""

from __future__ import annotations

import os
import site
import sysconfig
import traceback
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# Controls, formats such as a change of direction, private use, surrogates, ends of lines.
_ESCAPED = ("Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp")
# Folders of code that is not the user's.
_LIBRARIES = [sysconfig.get_path(name) for name in ("stdlib", "scripts")]
_PACKAGES = [*site.getsitepackages(), site.getusersitepackages(), os.path.dirname(__file__)]
_FOREIGN = ("<frozen", *(f"{path}/" for path in (*_LIBRARIES, *_PACKAGES)))


def printable(text: str, kept: str = "\n\t") -> str:
    """Return the text with control characters and lone surrogates, but the `kept`, as escapes.

    Names of files, messages of libraries and records of others may hold them. A terminal obeys
    the ones, and UTF-8 cannot encode the others.
    """
    escaped = [c for c in set(text) if unicodedata.category(c) in _ESCAPED and c not in kept]
    return text.translate({ord(char): char.encode("unicode_escape").decode() for char in escaped})


def origin(error: BaseException) -> str:
    """Return file, line and function of the user's code that raised, else of the last frame."""
    return user_frame(traceback.extract_tb(error.__traceback__))


def user_frame(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return file, line and function of the innermost code of the user, else of any code."""
    user = [f for f in frames if not f.filename.startswith(_FOREIGN)]
    return "".join(f"{f.filename}:{f.lineno} in {f.name}" for f in (user or frames)[-1:])


class RaytrainOptError(Exception):
    """The root of all errors that this package raises on purpose; `str(error)` is for people.

    `arguments`: of the constructor, for unpickling; default: the message.
    """

    exit_code = 1

    def __init__(self, message: str, *arguments: Any) -> None:
        super().__init__(*(arguments or (message,)))
        self.message = message

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class Problem:
    """One error in a job file: path of the field, broken rule, value as given, and a hint."""

    path: str
    rule: str
    value: str | None = None
    hint: str | None = None

    def __str__(self) -> str:
        value = "" if self.value is None else f" (given: {self.value})"
        hint = "" if self.hint is None else f"; {self.hint}"
        return f"{self.path}: {self.rule}{value}{hint}"


class JobError(RaytrainOptError):
    """A job file or an argument is wrong. Carries all problems at once; exit code 2."""

    exit_code = 2

    def __init__(self, problems: list[Problem], source: str = "job") -> None:
        self.problems = problems
        self.source = source
        lines = "\n".join(f"  {problem}" for problem in problems)
        count = f"{len(problems)} problem" + ("s" if len(problems) != 1 else "")
        super().__init__(f"{source}: {count}\n{lines}", problems, source)


class DataError(RaytrainOptError):
    """Data are missing, empty, damaged, or do not match the model; exit code 2.

    `field` is the field of the job that names the data, `rule` what is wrong with them.
    """

    exit_code = 2

    def __init__(self, field: str, rule: str) -> None:
        self.field = field
        self.rule = rule
        super().__init__(f"{field}: {rule}", field, rule)


def problems_of(check: Callable[[], object]) -> list[Problem]:
    """Return the problems that a check of a job raises; none if it returns."""
    try:
        check()
    except JobError as error:
        return error.problems
    except DataError as error:
        return [Problem(error.field, error.rule)]
    return []


class ResourcesError(RaytrainOptError):
    """The cluster has too few resources for the job; says which are missing; exit code 2."""

    exit_code = 2


class PoolError(RaytrainOptError):
    """A resident pool failed or did not answer in time; says which process and for how long."""


class ResidentError(RaytrainOptError):
    """Code raised inside a worker or slot, which the message names; a note has its traceback."""


def first_of(names: Sequence[str]) -> str:
    """Return the first five names, for a message."""
    return ", ".join([*names[:5], *(["…"] if len(names) > 5 else [])])


def listed(names: Sequence[str]) -> str:
    """Return the number of these things and the first of their names, for a message."""
    return f"{len(names)} ({first_of(names)})"


# Two ranks on one GPU, a GPU that is full, and a wrong NCCL_SOCKET_IFNAME.
_NCCL_REFUSALS = ("Duplicate GPU", "out of memory", "invalid usage")


def is_lost_connection(error: BaseException) -> bool:
    """Return whether a collective lost its peer; gloo's errors have no class, NCCL's one.

    NCCL raises it as well for what a new start of the workers does not mend.
    """
    text = str(error)
    is_nccl = type(error).__name__ == "DistBackendError"
    return "gloo/transport" in text or (is_nccl and not any(t in text for t in _NCCL_REFUSALS))


class UserCodeError(RaytrainOptError):
    """Code of the user tried to end the process, or hangs; names its function."""


class DivergedError(RaytrainOptError):
    """The loss is not finite and the search could not recover; lists what was tried."""


class StorageError(RaytrainOptError):
    """A checkpoint or record could not be read or written; names the path and the cause."""


class TakenOverError(StorageError):
    """Another process has resumed this run; it must not be written by this one any more."""


class CheckpointError(StorageError):
    """A checkpoint is damaged or was not made by this package; names the file; exit code 2."""

    exit_code = 2


class RecordError(RaytrainOptError):
    """A record of a run cannot be read; names the file and the line; exit code 2."""

    exit_code = 2
