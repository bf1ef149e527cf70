"""A good job to spoil, and what the command line says of it then."""

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
# A model for the points of `broken_parts`, where it is not what is wrong.
LINEAR = "model: {name: 'broken_parts:linear', args: {outputs: 3}}"


def written(folder: Path, *lines: str) -> str:
    """A good job of which these lines replace or join its own; its place is awkward."""
    storage = {"storage_path": f"storage_path: '{folder}/runs'"}
    job = GOOD | storage | {line.partition(":")[0]: line for line in lines}
    file = folder / "a job – ジョブ.yaml"
    file.write_text("\n".join(job.values()), encoding="utf-8")
    return str(file)


def refused(*arguments: str) -> str:
    """The one message of a command that must refuse these arguments."""
    result = CliRunner().invoke(cli.main, arguments)
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    return result.stderr.removeprefix("error: ").rstrip("\n")
