"""The command line, `raytrain-opt`. Commands import what they need: help answers at once."""

from __future__ import annotations

import atexit
import json
import signal
import traceback
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from raytrain_opt import clock
from raytrain_opt.errors import RaytrainOptError, printable
from raytrain_opt.execution.signals import exit_code
from raytrain_opt.user_code import exits_as_errors

if TYPE_CHECKING:
    from raytrain_opt.config.schema import Job

_job_file = click.argument("job_file", metavar="JOB.yaml")
_optional_job_file = click.argument("job_file", metavar="[JOB.yaml]", required=False)
_overrides = click.option(
    "--set",
    "overrides",
    metavar="a.b=c",
    multiple=True,
    help="Replace a value of the job file; can be given several times.",
)
_address = click.option(
    "--address",
    metavar="ADDR",
    help="Address of a Ray cluster. Default: RAY_ADDRESS, else Ray is started on this machine.",
)
_trust = click.option(
    "--trust", is_flag=True, help="Run functions that the job.yaml of the run directory names."
)
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")


class _Command(click.Command):
    """Ends with a message and an exit code for errors of this package; bugs keep a traceback.

    A command returns an exit code other than 0, because SystemExit is an error of user code.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        text = "Show tracebacks, and the messages of Ray."
        self.params.append(click.Option(["--verbose"], is_flag=True, help=text))

    def invoke(self, ctx: click.Context) -> Any:
        ctx.meta["verbose"] = verbose = ctx.params.pop("verbose")
        try:
            with exits_as_errors():
                code = super().invoke(ctx)
        except RaytrainOptError as error:
            if verbose:
                _echo(traceback.format_exc(), err=True)
            _echo(f"error: {error}", err=True)
            raise SystemExit(error.exit_code) from error
        except KeyboardInterrupt as stop:
            raise SystemExit(exit_code(stop)) from stop
        if code:
            raise SystemExit(code)


class _Group(click.Group):
    """Lists commands in the order of this file, in which people use them."""

    command_class = _Command

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="raytrain_opt", prog_name="raytrain-opt")
def main() -> None:
    """Data-parallel PyTorch training on Ray that finds optimizer, learning rate and batch size."""


@main.command()
@click.argument("folder", default=".", type=click.Path(exists=True, file_okay=False))
@click.option("--output", default="job.yaml", show_default=True, help="The job file to write.")
@click.option(
    "--label-column", metavar="NAME", help="The column of a CSV file with the class of each image."
)
def init(folder: str, output: str, label_column: str | None) -> None:
    """Write a job file for a folder of images.

    Example: raytrain-opt init photos --output photos.yaml
    """
    from raytrain_opt.commands.init import init as write_job

    write_job(Path(folder), Path(output), _echo, label_column)


@main.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False))
@click.argument("output")
def shard(folder: str, output: str) -> None:
    """Pack an image folder into tar files.

    FOLDER/<split>/<class>/* go to files of about 256 MiB below OUTPUT, a folder or a URI.

    Example: raytrain-opt shard /data/imagenet s3://bucket/imagenet
    """
    from raytrain_opt.commands.shard import write_shards

    for pattern in write_shards(Path(folder), output, 2**28, _echo):
        _echo(pattern)


@main.command()
@_job_file
@_overrides
def validate(job_file: str, overrides: tuple[str, ...]) -> None:
    """Check a job file and its data; nothing is downloaded.

    Example: raytrain-opt validate jobs/quickstart.yaml
    """
    from raytrain_opt.commands.validate import validate as validate_job

    _echo(validate_job(_load_job(job_file, overrides), job_file))


@main.command()
@_optional_job_file
@_overrides
@_address
def doctor(job_file: str | None, overrides: tuple[str, ...], address: str | None) -> int:
    """Check a cluster, or a job on it, before paying for a run.

    Example: raytrain-opt doctor jobs/quickstart.yaml --address auto
    """
    job = _load_job(job_file, overrides) if job_file is not None else None

    from raytrain_opt.commands.doctor import diagnose

    return diagnose(job, address)


@main.command()
@_optional_job_file
@_overrides
@click.option("--resume", metavar="RUN_DIR", help="Resume this run from its latest checkpoint.")
@_trust
@_address
@click.option(
    "--in-process", is_flag=True, help="Train in one process without Ray, for a debugger."
)
def run(
    job_file: str | None,
    overrides: tuple[str, ...],
    resume: str | None,
    trust: bool,
    **options: Any,
) -> None:
    """Train a job, or resume an interrupted run.

    Example: raytrain-opt run jobs/quickstart.yaml --set epochs=4
    """
    if (job_file is None) == (resume is None):
        raise click.UsageError(
            "give either JOB.yaml or --resume RUN_DIR; `raytrain-opt init FOLDER` writes a job "
            "file for your images"
        )
    if resume is None:
        job = _load_job(str(job_file), overrides)
    else:
        from raytrain_opt.execution.resume import load_run_job

        job = load_run_job(resume, overrides, trust=trust)

    # Imported after the job is known to be well-formed: this loads Ray.
    from raytrain_opt.driver import run as run_job

    run_job(
        job, resume=resume, started_s=clock.PROCESS_STARTED_S, verbose=_is_verbose(), **options
    )
    # The training is finished, and nothing after that changes its exit code 0.
    for number in (signal.SIGTERM, signal.SIGHUP):
        atexit.register(signal.signal, number, signal.SIG_IGN)


@main.command("find-batch-size")
@_job_file
@_overrides
@click.option("--fresh", is_flag=True, hidden=True, expose_value=False)  # every search is one
@_address
def find_batch_size(job_file: str, overrides: tuple[str, ...], address: str | None) -> None:
    """Find the batch size for a job by probes.

    Example: raytrain-opt find-batch-size jobs/digits_batch_size.yaml
    """
    job = _load_job(job_file, overrides)

    from raytrain_opt.execution.batch_size import find_batch_size as find
    from raytrain_opt.storage import is_remote, join

    file = join(find(job, address=address, verbose=_is_verbose()).run_dir, "job.yaml")
    copy, name = (f"copy {file} here, then ", "job.yaml") if is_remote(file) else ("", quote(file))
    _echo(f"train with this batch size: {copy}raytrain-opt run {name}")


@main.command()
@click.argument("storage", default="runs")
def runs(storage: str) -> None:
    """List the runs of a storage, newest first.

    STORAGE is a folder or a URI; default: runs.

    Example: raytrain-opt runs s3://BUCKET/runs
    """
    from raytrain_opt.commands.runs import list_runs, print_runs

    print_runs(storage, list_runs(storage))


@main.command()
@click.argument("run_dir")
def report(run_dir: str) -> None:
    """Write the report of a run: RUN_DIR/report.html.

    Example: raytrain-opt report runs/RUN
    """
    from raytrain_opt.report import write_report

    _echo(f"report  {printable(write_report(run_dir), kept='')}")


@main.command()
@click.argument("run_dirs", metavar="RUN_DIR...", nargs=-1, required=True)
@click.option("--ensemble", is_flag=True, help="Also evaluate the mean of their probabilities.")
@_json
@_trust
def evaluate(run_dirs: tuple[str, ...], ensemble: bool, as_json: bool, trust: bool) -> None:
    """Compute the metrics of finished runs.

    RUN_DIR/checkpoints/NAME is a single checkpoint. Classification has top-1 and top-5 error.

    Example: raytrain-opt evaluate runs/quickstart-* --ensemble
    """
    from raytrain_opt.commands.evaluate import evaluate_runs

    evaluation = evaluate_runs(run_dirs, ensemble=ensemble, trust=trust)
    for note in evaluation.notes:
        _echo(note, err=True)
    _echo(json.dumps(asdict(evaluation)) if as_json else "\n".join(evaluation.lines()))


@main.command()
@click.argument("run_dir", metavar="RUN")
@click.argument("images", metavar="[IMAGE...]", nargs=-1)
@_json
@_trust
def predict(run_dir: str, images: tuple[str, ...], as_json: bool, trust: bool) -> int:
    """Print the three most probable classes of images.

    RUN is a run directory, a URI, or RUN_DIR/checkpoints/NAME; images are files or folders.
    Without them, all samples of the test set are predicted; a task prints its values. Ends with 1
    if a file is not an image.

    Example: raytrain-opt predict runs/quickstart-* photo.png scans/
    """
    from raytrain_opt.commands import predict as command
    from raytrain_opt.commands.evaluate import find_run
    from raytrain_opt.train.trained_model import load_model

    if images:
        model = load_model(run_dir, trust=trust)
        checkpoint, predictions = model.checkpoint, command.predict(model, images)
    else:
        run = find_run(run_dir, trust)
        checkpoint, predictions = run.weights.reached, command.predict_test_set(run)
    return not command.print_predictions(checkpoint, predictions, as_json=as_json)


@main.command()
@click.argument("run_dir", metavar="RUN")
@click.option(
    "--format",
    "name",
    required=True,
    type=click.Choice(["torch_export", "onnx", "safetensors"]),
    help="onnx needs the packages of raytrain_opt[onnx].",
)
@click.option("--output", metavar="FILE", help="Default: model.FORMAT in this directory.")
@_trust
def export(run_dir: str, name: str, output: str | None, trust: bool) -> None:
    """Write the network of a run as one file, and check it.

    Example: raytrain-opt export runs/quickstart-* --format torch_export --output digits.pt2
    """
    from raytrain_opt.commands.export import export as export_model
    from raytrain_opt.commands.export import first_test_samples
    from raytrain_opt.train.trained_model import load_model

    model = load_model(run_dir, device="cpu", trust=trust)
    path = output or f"model.{name}"
    picture, batches = first_test_samples(run_dir, trust)
    outputs, difference = export_model(model, name, path, picture, batches)
    error = f"largest relative difference {outputs:.1g}" if outputs else "equal bits"
    check = "the weights alone" if outputs is None else f"its outputs match ({error})"
    _echo(f"{path}: {model.checkpoint}; {check}")
    if difference is not None:
        text = "a picture of the test set, prepared as its metadata say, has the probabilities of"
        _echo(f"{text} predict (largest difference {difference:.1g})")


@main.command()
def schema() -> None:
    """Print the JSON schema of job files.

    Example: raytrain-opt schema > job.schema.json
    """
    from raytrain_opt.config.load import job_schema

    click.echo(json.dumps(job_schema(), indent=2))


def _echo(text: str, *, err: bool = False) -> None:
    click.echo(printable(text), err=err)


def _is_verbose() -> bool:
    return bool(click.get_current_context().meta["verbose"])


def _load_job(job_file: str, overrides: tuple[str, ...]) -> Job:
    """Load the job; report errors of names, files and the schema together."""
    from raytrain_opt.config.load import load_job
    from raytrain_opt.execution.check import check_sections

    return load_job(job_file, overrides, check_sections)
