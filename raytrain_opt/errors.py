"""Errors a user can meet. Each says what happened, the likely cause and what to change.

All are picklable (they cross process borders) and share one root, so that a driver
script can catch `RaytrainOptError` and nothing else of ours escapes it.
"""

from __future__ import annotations

from dataclasses import dataclass


class RaytrainOptError(Exception):
    """Root of every error raised on purpose by this package. `str(error)` is for people."""

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a job file: where, what was given, which rule, what is near."""

    path: str
    rule: str
    value: str | None = None
    hint: str | None = None

    def __str__(self) -> str:
        given = "" if self.value is None else f" (given: {self.value})"
        hint = "" if self.hint is None else f"; {self.hint}"
        return f"{self.path}: {self.rule}{given}{hint}"


class JobError(RaytrainOptError):
    """The job file or an argument is wrong. Carries every problem at once; exit code 2."""

    exit_code = 2

    def __init__(self, problems: list[Problem], source: str = "job") -> None:
        self.problems = problems
        self.source = source
        lines = "\n".join(f"  {problem}" for problem in problems)
        count = f"{len(problems)} problem" + ("s" if len(problems) != 1 else "")
        super().__init__(f"{source}: {count}\n{lines}")

    def __reduce__(self) -> tuple[type[JobError], tuple[list[Problem], str]]:
        return type(self), (self.problems, self.source)


class DataError(RaytrainOptError):
    """Data are missing, empty, corrupt, or do not fit the model; names the file or field."""

    exit_code = 2

    @property
    def problem(self) -> Problem:
        """The same as a line of a JobError: the message begins with the field."""
        path, _, rule = self.message.partition(": ")
        return Problem(path, rule)


class ResourcesError(RaytrainOptError):
    """The cluster cannot hold what the job asks for; says what is missing."""

    exit_code = 2


class ClusterError(RaytrainOptError):
    """A job that was submitted to a cluster was lost sight of; says how to find it again."""


class PoolError(RaytrainOptError):
    """A resident pool failed or did not answer in time; says who, since when, and the log."""


class MemberError(RaytrainOptError):
    """Code inside a worker or slot raised; carries who and the remote traceback."""

    def __init__(self, message: str, member: str, remote_traceback: str = "") -> None:
        super().__init__(message)
        self.member = member
        self.remote_traceback = remote_traceback

    def __reduce__(self) -> tuple[type[MemberError], tuple[str, str, str]]:
        return type(self), (self.message, self.member, self.remote_traceback)


class DivergedError(RaytrainOptError):
    """The loss is not finite and the search could not recover; lists what was tried."""


class CommitError(RaytrainOptError):
    """A commit or record could not be written; names the path and the cause."""


class CheckpointError(CommitError):
    """A commit cannot be read: damaged, or not made by this package; names the file."""

    exit_code = 2


class RecordError(RaytrainOptError):
    """A record of a run cannot be read; names the file and the line."""

    exit_code = 2
