"""What the user sees of a batch-size search. Lines are those of batch_size.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import StringIO
from typing import Any

from rich.console import Console
from rich.table import Table


def probe_text(line: Mapping[str, Any]) -> str:
    """One probe in one line."""
    start = f"probe {line['probe']}{' (check)' if line['check'] else ''}: batch size "
    if line["status"] != "ok":
        return f"{start}{line['batch_size']}  out of memory  ({line['why']})"
    return (
        f"{start}{line['batch_size']}  {line['samples_per_s']:,.0f} samples/s "
        f"{_error(line)}  ({line['reason']})"
    )


def probes_table(lines: Sequence[Mapping[str, Any]]) -> str:
    """A row for each probe, in their order: speed, share of each part of a step, device."""
    table = Table(
        "probe", "batch size", "samples/s", "± %", "wait %", "copy %", "forward %", "backward %",
        "update %", "busy %", "MiB",
    )  # fmt: skip
    for line in lines:
        name = f"{line['probe']}{' check' if line['check'] else ''}"
        table.add_row(name, str(line["batch_size"]), *_cells(line))
    console = Console(file=StringIO(), width=120)
    console.print(table)
    return str(console.file.getvalue()).rstrip()  # type: ignore[attr-defined]


def _cells(line: Mapping[str, Any]) -> list[str]:
    if line["status"] != "ok":
        return ["out of memory"]
    parts = line["parts_s"]
    total_s = sum(parts.values())
    shares = [f"{100 * seconds / total_s:.0f}" for seconds in parts.values()]
    busy = line["utilization_pct"]
    return [
        f"{line['samples_per_s']:,.0f}",
        _error(line).strip("± %"),
        *shares,
        "-" if busy is None else f"{busy:.0f}",
        f"{line['peak_memory_mib']:,.0f}",
    ]


def _error(line: Mapping[str, Any]) -> str:
    error = line["samples_per_s_error"]
    return "" if error is None else f"± {100 * error / line['samples_per_s']:.1f} %"
