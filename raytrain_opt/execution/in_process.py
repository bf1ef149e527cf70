"""The backend of a run in this process, without Ray: for debuggers, tests and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from raytrain_opt.config.schema import Job
from raytrain_opt.errors import JobError, Problem
from raytrain_opt.execution.check import ChooseThreads, check_job, try_job
from raytrain_opt.execution.resolve import Facts, Placement, Resolved
from raytrain_opt.execution.workspace import Frontend, Workspace
from raytrain_opt.pools.interface import Pools
from raytrain_opt.threads import choose_threads

if TYPE_CHECKING:
    from raytrain_opt.data.factory import SharedData


@contextmanager
def open_in_process(
    job: Job, frontend: Frontend, *, resumed: bool = False
) -> Iterator[InProcessBackend]:
    """Open the backend; end code that hangs as `timeouts` say."""
    limits = job.timeouts
    with frontend.stop.limit_silence(limits.no_progress_s, limits.stop_s):
        yield InProcessBackend(job, frontend, resumed=resumed)


class InProcessBackend:
    """Trains in this process, one candidate after the other. Implements `Backend`."""

    options = "--in-process"

    def __init__(self, job: Job, frontend: Frontend, *, resumed: bool = False) -> None:
        self._job, self._frontend, self._resumed = job, frontend, resumed
        self._shared: SharedData = None
        self._choose_threads: ChooseThreads | None = None  # until the placement

    def read(self) -> Facts:
        if problems := check_job(self._job) + _problems_of_one_process(self._job):
            raise JobError(problems)
        facts, self._shared, self._choose_threads = try_job(self._job, resumed=self._resumed)
        self._frontend.startup.mark("data_read_s")
        self._frontend.stop.progress(self._job.timeouts.start_s)
        return facts

    def place(self, facts: Facts, *, search: bool = True) -> Placement:
        from torch.cuda import is_available  # not at the top: it loads torch

        note, threads = self._frontend.terminal.note, self._job.workers.threads
        note("training in one process, without Ray: for debugging, not for speed")
        if threads is None:
            on_gpu = is_available() and self._job.workers.uses_gpu(available=True)
            choose, batch_size = self._choose_threads, self._job.batch_size_per_worker
            fastest = None if on_gpu or choose is None else partial(choose, batch_size)
            threads = choose_threads(1, note, fastest)
        self._choose_threads = None
        return Placement(self._job.workers.size, threads)

    def find_batch_size(self, facts: Facts, placement: Placement, workspace: Workspace) -> int:
        return self._job.global_batch_size  # `read` refuses a search

    @contextmanager
    def start(self, resolved: Resolved, workspace: Workspace) -> Iterator[Pools]:
        # Not at the top: it loads torch.
        from raytrain_opt.pools.in_process import in_process_pools, open_learner

        job = resolved.job
        shared, self._shared = self._shared, None  # the learner has them
        with open_learner(resolved.learner, job.workers, shared) as learner:
            del shared
            yield in_process_pools(
                learner,
                with_slots=job.slot_candidates > 0,
                candidate_batch=job.learning_rate.candidate_batch,
            )


def _problems_of_one_process(job: Job) -> list[Problem]:
    """Return what of a job needs several processes."""
    problems = []
    if not job.parallel.common_steps:
        rule = "asynchronous training needs several processes, and --in-process has one"
        hint = "use sync, or leave --in-process out"
        problems.append(Problem("parallel.mode", rule, job.parallel.mode, hint))
    if job.batch_size_search is not None:
        rule = "probes of a batch-size search run in processes of their own"
        hint = "remove the section and set global_batch_size, or leave --in-process out"
        problems.append(Problem("batch_size_search", rule, hint=hint))
    return problems
