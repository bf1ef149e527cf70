"""What a check found, and the table of all that were found."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table

Level = Literal["ok", "warning", "error"]
_STYLES = {"ok": "green", "warning": "yellow", "error": "red"}
_LOG_WIDTH = 120  # columns, where there is no terminal to ask


@dataclass(frozen=True)
class Finding:
    """One line: about what, how bad, what was seen, and what to do about it."""

    about: str
    level: Level
    what: str
    remedy: str = ""


def ok(about: str, what: str) -> Finding:
    """Nothing to do."""
    return Finding(about, "ok", what)


def print_findings(findings: Iterable[Finding]) -> None:
    """One table on standard output."""
    console = Console(file=sys.stdout)
    if not console.is_terminal:
        console = Console(file=sys.stdout, width=_LOG_WIDTH)
    table = Table("", "check", "found", "what to do")
    for finding in findings:
        style = _STYLES[finding.level]
        table.add_row(f"[{style}]{finding.level}[/]", *map(_plain, _texts(finding)))
    console.print(table)


def _texts(finding: Finding) -> tuple[str, str, str]:
    return finding.about, finding.what, finding.remedy


def _plain(text: str) -> str:
    """Square brackets of a message are no markup."""
    return text.replace("[", r"\[")
