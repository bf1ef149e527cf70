"""The result of one check, and the table of all results."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

Level = Literal["ok", "warning", "error"]
_STYLES = {"ok": "green", "warning": "yellow", "error": "red"}
_LOG_WIDTH = 120  # columns of the table in a log, which has no width of its own


@dataclass(frozen=True)
class Finding:
    """One line of the table: name of the check, level, result, and what to do about it."""

    check: str
    level: Level
    result: str
    remedy: str = ""


def ok(check: str, result: str) -> Finding:
    """Return a finding that needs no remedy."""
    return Finding(check, "ok", result)


def print_findings(findings: Iterable[Finding]) -> None:
    """Print one table on standard output."""
    console = Console(file=sys.stdout)
    if not console.is_terminal:
        console = Console(file=sys.stdout, width=_LOG_WIDTH)
    table = Table("", "check", "result", "what to do")
    for finding in findings:
        style = _STYLES[finding.level]
        texts = (finding.check, finding.result, finding.remedy)
        table.add_row(f"[{style}]{finding.level}[/]", *map(escape, texts))
    console.print(table)
