"""Errors a user can meet: what happened, the likely cause, what to change. All can be pickled."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import Any


def printable(text: str) -> str:
    """Return the text with control characters and lone surrogates as escapes.

    Names of files, messages of libraries and records of others may hold them. A terminal obeys
    the ones, and UTF-8 cannot encode the others.
    """
    return "".join(
        char.encode("unicode_escape").decode()
        if unicodedata.category(char)[0] == "C" and char not in "\n\t"
        else char
        for char in text
    )


class RaytrainOptError(Exception):
    """The root of all errors that this package raises on purpose; `str(error)` is for people.

    `arguments`: those of the constructor, with which a copy is unpickled; default: the message.
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

    @property
    def problem(self) -> Problem:
        """The same error as a line of a JobError."""
        return Problem(self.field, self.rule)


class ResourcesError(RaytrainOptError):
    """The cluster has too few resources for the job; says which are missing; exit code 2."""

    exit_code = 2


class ClusterError(RaytrainOptError):
    """A job could not be submitted, or the connection to it was lost; says what to do."""


class PoolError(RaytrainOptError):
    """A resident pool failed or did not answer in time; says which process and for how long."""


class ResidentError(RaytrainOptError):
    """Code raised inside a worker or slot; carries the process's name and its traceback."""

    def __init__(self, message: str, resident: str, remote_traceback: str = "") -> None:
        super().__init__(message, message, resident, remote_traceback)
        self.resident = resident
        self.remote_traceback = remote_traceback


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
