"""Who did what, when: lines of timeline.jsonl; and what went wrong: lines of events.jsonl."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Span:
    """One command as one member did it, or a commit of the driver. `at_s`: when it began, on the
    clock of whoever holds it; `parts_s`, `utilization_pct`, `memory_mib` as in `Usage`.
    """

    who: str
    doing: str
    at_s: float
    seconds: float
    parts_s: Mapping[str, float] = field(default_factory=dict)
    utilization_pct: float | None = None
    memory_mib: float | None = None


@dataclass(frozen=True)
class Event:
    """Something that a run survived, or did not: `what` is one word (restarted, lost, fewer,
    resumed, interrupted, failed). `cost_s`: seconds without a sign of life, where that is known.
    """

    what: str
    text: str
    at_s: float
    who: str | None = None
    cost_s: float | None = None
