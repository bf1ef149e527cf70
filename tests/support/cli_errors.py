"""A valid job to break, and the message of the command line about it."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from raytrain_opt import cli

GOOD = {
    "model": "model: resnet8",
    "data": "data: digits",
    "epochs": "epochs: 2",
    "global_batch_size": "global_batch_size: 8",
}
# A valid model for the points of `broken_parts`.
LINEAR = "model: {name: 'tests.support.broken_parts:linear', args: {outputs: 3}}"


def write_job(folder: Path, *lines: str) -> str:
    """Write a valid job in which these lines replace or join its own; return its awkward path."""
    storage = {"storage_path": f"storage_path: '{folder}/runs'"}
    job = GOOD | storage | {line.partition(":")[0]: line for line in lines}
    file = folder / "a job – ジョブ.yaml"
    file.write_text("\n".join(job.values()), encoding="utf-8")
    return str(file)


def command_error(*arguments: str) -> str:
    """Return the message of a command that must refuse these arguments."""
    result = CliRunner().invoke(cli.main, arguments)
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    return result.stderr.removeprefix("error: ").rstrip("\n")
