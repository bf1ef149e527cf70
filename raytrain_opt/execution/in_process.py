"""A run in this process, without Ray: `raytrain-opt run --in-process`, for a debugger."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from raytrain_opt.config.schema import Job
from raytrain_opt.errors import JobError, Problem
from raytrain_opt.execution.preflight import check_job, run_preflight
from raytrain_opt.execution.progress import Startup
from raytrain_opt.execution.rescale import resolve_lr_scaling, set_workers
from raytrain_opt.execution.result import open_training_run
from raytrain_opt.execution.resume import keep_workers
from raytrain_opt.execution.session import Workspace, open_run_directory
from raytrain_opt.execution.signals import stop_on_signals
from raytrain_opt.execution.training_run import TrainingRun
from raytrain_opt.pools.in_process import in_process_backend, open_learner
from raytrain_opt.search.factory import max_candidates
from raytrain_opt.terminal.progress import open_terminal
from raytrain_opt.threads import Cores


@contextmanager
def start_in_process(job: Job, *, began_s: float, resume: str | None) -> Iterator[TrainingRun]:
    """Check the job, make its run directory, build both pools here. Raises JobError, DataError."""
    startup, limits = Startup(began_s), job.timeouts
    with (
        open_terminal() as terminal,
        stop_on_signals(terminal.note) as stop,
        stop.limit_silence(limits.no_progress_s, limits.stop_s),
    ):
        problems = check_job(job)
        if problems:
            raise JobError(problems)
        _check_in_process(job)
        job = resolve_lr_scaling(keep_workers(job, resume))
        cores = Cores.measure() if job.workers.threads is None else None
        threads = job.workers.threads if cores is None else cores.threads()
        job = set_workers(job, count=job.workers.size, threads=threads)
        preflight = run_preflight(job, resumed=resume is not None)
        startup.mark("data_read_s")
        resolved = preflight.resolved
        assert resolved is not None  # no batch size is to be searched
        stop.progress(limits.start_s)
        with (
            open_run_directory(job, resume, terminal, stop, preflight.info, "--in-process") as (
                paths,
                checkpoints,
            ),
            open_learner(resolved.learner, job.workers, preflight.take_shared()) as learner,
        ):
            terminal.note("training in one process, without Ray: for debugging, not for speed")
            if cores is not None:
                cores.tell(cores.threads(), 1, terminal.note)
            for note in preflight.info.notes:
                terminal.note(note)
            backend = in_process_backend(
                learner,
                with_slots=max_candidates(job) > 0 and job.search_on == "slots",
                candidate_batch=job.learning_rate.candidate_batch,
            )
            workspace = Workspace(paths, checkpoints, terminal, startup, stop)
            with open_training_run(resolved, backend, workspace) as run:
                yield run


def _check_in_process(job: Job) -> None:
    """Raise JobError for what needs several processes."""
    problems = []
    if job.parallel.mode == "async":
        rule = "asynchronous training needs several processes, and --in-process has one"
        problems.append(
            Problem("parallel.mode", rule, "async", "use sync, or leave --in-process out")
        )
    if job.batch_size_search is not None:
        rule = "probes of a batch-size search run in processes of their own"
        hint = "remove the section and set global_batch_size, or leave --in-process out"
        problems.append(Problem("batch_size_search", rule, hint=hint))
    if problems:
        raise JobError(problems)
