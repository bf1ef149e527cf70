"""The command line: `raytrain-opt COMMAND`; `raytrain-opt --help` lists the commands.

Heavy imports stand inside the commands, so that help and checks answer at once.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from raytrain_opt import clock
from raytrain_opt.errors import JobError, RaytrainOptError
from raytrain_opt.stopping import Terminated

if TYPE_CHECKING:
    from raytrain_opt.config.schema import Job

# 128 and the number of the signal, as shells have it.
EXIT_INTERRUPTED, EXIT_TERMINATED = 130, 143

_job_file = click.argument("job_file", metavar="JOB.yaml")
_overrides = click.option(
    "--set",
    "overrides",
    metavar="a.b=c",
    multiple=True,
    help="Replace a value of the job file; may be given several times.",
)


_fresh = click.option("--fresh", is_flag=True, help="Search the batch size again.")
_address = click.option(
    "--address", metavar="ADDR", help="Ray cluster; default: RAY_ADDRESS, else local."
)
_verbose = click.option("--verbose", is_flag=True, help="Show tracebacks.")
_dashboard = click.option(
    "--address", metavar="URL", help="The head's dashboard; default: http://localhost:8265."
)
_verbose_ray = click.option(
    "--verbose", is_flag=True, help="Show Ray's own messages and tracebacks."
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="raytrain_opt", prog_name="raytrain-opt")
def main() -> None:
    """Data-parallel training on Ray that finds its learning rate while it trains."""


@main.command()
@click.argument("job_file", metavar="JOB.yaml", required=False)
@_overrides
@click.option("--resume", metavar="RUN_DIR", help="Go on from the last commit of this run.")
@_fresh
@_address
@_verbose_ray
def run(
    job_file: str | None,
    overrides: tuple[str, ...],
    resume: str | None,
    fresh: bool,
    address: str | None,
    verbose: bool,
) -> None:
    """Train as the job file says, or go on with a run that ended early (--resume)."""
    if (job_file is None) == (resume is None):
        raise click.UsageError("give either JOB.yaml or --resume RUN_DIR")
    with _errors_told(verbose):
        from raytrain_opt.config.load import load_job
        from raytrain_opt.paths import RunPaths

        job = load_job(job_file or RunPaths.existing(str(resume)).job, overrides)

        # Imported after the job is known to be well-formed: this loads Ray.
        from raytrain_opt.driver import run as run_job

        run_job(
            job,
            address=address,
            verbose=verbose,
            resume=resume,
            fresh=fresh,
            started_s=clock.PROCESS_STARTED_S,
        )


@main.command("batch-size")
@_job_file
@_overrides
@_fresh
@click.option("--trace", is_flag=True, help="Write a Chrome trace of the chosen size.")
@_address
@_verbose_ray
def batch_size(
    job_file: str,
    overrides: tuple[str, ...],
    fresh: bool,
    trace: bool,
    address: str | None,
    verbose: bool,
) -> None:
    """Choose the batch size by probes, without training."""
    with _errors_told(verbose):
        from raytrain_opt.config.load import load_job

        job = load_job(job_file, overrides)

        from raytrain_opt.batch_size import find_batch_size

        found = find_batch_size(job, address=address, verbose=verbose, fresh=fresh, trace=trace)
        click.echo(f"train with it: raytrain-opt run {found.run_dir}/job.yaml")


@main.command()
@click.argument("run_dirs", metavar="RUN_DIR...", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print the verdict instead, for scripts.")
@_verbose
def report(run_dirs: tuple[str, ...], as_json: bool, verbose: bool) -> None:
    """Write RUN_DIR/report.html and its plots; of several runs, a comparison into the first."""
    with _errors_told(verbose):
        from raytrain_opt.report import verdicts, write_report

        if as_json:
            click.echo(json.dumps(verdicts(run_dirs), indent=2))
        else:
            click.echo(f"report  {write_report(run_dirs)}")


@main.command()
@click.argument("run_dir", metavar="RUN_DIR")
@_verbose
def watch(run_dir: str, verbose: bool) -> None:
    """Follow a run in the terminal from its records, here or under a URI, until it ends."""
    with _errors_told(verbose):
        from raytrain_opt.report.watch import watch as follow

        follow(run_dir)


@main.command()
@_job_file
@_overrides
@_dashboard
@_verbose
def submit(job_file: str, overrides: tuple[str, ...], address: str | None, verbose: bool) -> None:
    """Run a job of this folder on a cluster, wait, and take its results home."""
    with _errors_told(verbose):
        from raytrain_opt.submit import submit as submit_job

        raise SystemExit(submit_job(job_file, overrides, address))


@main.command()
@click.argument("job_file", metavar="JOB.yaml", required=False)
@_overrides
@click.option(
    "--address",
    metavar="ADDR",
    help="Ray cluster, or the URL of its dashboard; default: RAY_ADDRESS, else local.",
)
@_verbose
def doctor(
    job_file: str | None, overrides: tuple[str, ...], address: str | None, verbose: bool
) -> None:
    """Check a cluster, for a job if one is given, before a run is paid for."""
    with _errors_told(verbose):
        from raytrain_opt.config.load import load_job

        job = load_job(job_file, overrides) if job_file is not None else None
        if address is not None and address.startswith("http"):
            from raytrain_opt.submit import examine_there

            raise SystemExit(examine_there(job_file, overrides, address))

        from raytrain_opt.doctor.examine import examine

        raise SystemExit(examine(job, address))


@main.command()
@_job_file
@_overrides
@_verbose
def validate(job_file: str, overrides: tuple[str, ...], verbose: bool) -> None:
    """Check a job file and the data it names, without training or fetching anything."""
    with _errors_told(verbose):
        from raytrain_opt.check import check_job
        from raytrain_opt.config.load import load_job

        job = load_job(job_file, overrides)
        problems = check_job(job)
        if problems:
            raise JobError(problems, job_file)

        from raytrain_opt.fit import data_if_here

        unseen = data_if_here(job, job_file) is None
        click.echo(f"{job_file}: valid\n{_summary(job)}")
        if unseen:
            click.echo("  not checked    whether it fits the data: a run has to fetch them first")


@main.command()
@click.argument("run_dirs", metavar="RUN_DIR...", nargs=-1, required=True)
@click.option("--ensemble", is_flag=True, help="Also average the probabilities of all of them.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--verbose", is_flag=True, help="Show tracebacks.")
def evaluate(run_dirs: tuple[str, ...], ensemble: bool, as_json: bool, verbose: bool) -> None:
    """Top-1 and top-5 error of finished runs, or of single commits (RUN_DIR/checkpoints/...)."""
    with _errors_told(verbose):
        from raytrain_opt.evaluate import evaluate_runs

        found = evaluate_runs(run_dirs, ensemble=ensemble)
        for note in found.notes:
            click.echo(note, err=True)
        text = json.dumps(found.to_json()) if as_json else "\n".join(found.lines())
        click.echo(text)


@main.command()
def schema() -> None:
    """Print the JSON schema of job files."""
    from raytrain_opt.config.load import job_schema

    click.echo(json.dumps(job_schema(), indent=2))


@contextmanager
def _errors_told(verbose: bool) -> Iterator[None]:
    """Our errors become a message and an exit code; anything else is a bug and stays loud."""
    try:
        yield
    except RaytrainOptError as error:
        if verbose:
            click.echo(traceback.format_exc(), err=True)
        click.echo(f"error: {error}", err=True)
        raise SystemExit(error.exit_code) from error
    except KeyboardInterrupt as stop:
        terminated = isinstance(stop, Terminated)
        raise SystemExit(EXIT_TERMINATED if terminated else EXIT_INTERRUPTED) from stop


def _summary(job: Job) -> str:
    """The choices that matter most, with defaults filled in, one a line."""
    sections = job.model_dump()
    slots = job.slots.count or "as many as fit"
    lines = {
        "model": sections["model"]["name"],
        "data": sections["data"]["name"],
        "learning rate": _learning_rate(job),
        "optimizer": job.optimizer.name,
        "training": f"{job.epochs} epochs, {job.precision}, seed {job.seed}",
        "global batch": f"{job.global_batch_size} = {job.workers.count} workers x "
        f"{job.batch_size_per_worker}"
        + (f", before {search.strategy}" if (search := job.batch_size_search) else ""),
        "slots": slots if job.learning_rate.policy in ("stpt", "stpt_horizon") else "none",
        "results": job.storage_path,
    }
    return "\n".join(f"  {name:14} {text}" for name, text in lines.items())


def _learning_rate(job: Job) -> str:
    policy = job.learning_rate
    if policy.policy == "replay":
        return f"replay of {policy.schedule}"
    if policy.policy == "schedule":
        return f"{policy.shape} from {policy.initial:g}"
    if policy.policy == "stpt_horizon":
        return f"{policy.shape} decay; its peak is searched, from {policy.initial:g} on"
    return f"stpt from {policy.initial:g}, candidates {policy.candidates}, alpha {policy.alpha:g}"
