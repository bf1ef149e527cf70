"""The probes of a batch-size search, as lines and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO

from rich.console import Console
from rich.table import Table

from raytrain_opt.recording.records import BatchSizeProbeRecord


def probe_text(record: BatchSizeProbeRecord) -> str:
    """Return one probe as one line."""
    check = " (check)" if record.check else ""
    start = f"probe {record.probe}{check}: batch size {record.batch_size}"
    if record.status == "out_of_memory":
        return f"{start}  out of memory  ({record.error})"
    speed = f"{record.samples_per_s or 0:,.0f} samples/s"
    return f"{start}  {speed} ± {_error_pct(record)} %  ({record.reason})"


def probes_table(records: Sequence[BatchSizeProbeRecord]) -> str:
    """Return a table with a row per probe: speed, fraction of each part of a step, device."""
    table = Table(
        "probe", "batch size", "samples/s", "± %", "wait %", "copy %", "forward %", "backward %",
        "update %", "busy %", "MiB",
    )  # fmt: skip
    for record in records:
        name = f"{record.probe}{' check' if record.check else ''}"
        table.add_row(name, str(record.batch_size), *_cells(record))
    output = StringIO()
    Console(file=output, width=120).print(table)
    return output.getvalue().rstrip()


def _cells(record: BatchSizeProbeRecord) -> list[str]:
    if record.status == "out_of_memory":
        return ["out of memory"]
    timings_s = [duration_s or 0.0 for duration_s in record.timings_s.values()]
    total_s = sum(timings_s)
    busy, memory = record.utilization_pct, record.peak_memory_mib
    return [
        f"{record.samples_per_s or 0:,.0f}",
        _error_pct(record),
        *(f"{100 * duration_s / total_s:.0f}" for duration_s in timings_s),
        "-" if busy is None else f"{busy:.0f}",
        "-" if memory is None else f"{memory:,.0f}",
    ]


def _error_pct(record: BatchSizeProbeRecord) -> str:
    """Return the standard error in percent of the speed; `?` when it is not known."""
    speed, error = record.samples_per_s, record.samples_per_s_error
    return "?" if not speed or error is None else f"{100 * error / speed:.1f}"
