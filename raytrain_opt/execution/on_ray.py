"""The backend of a run on Ray. Imports no torch: it is imported while Ray starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib import import_module
from shlex import quote
from shutil import copytree
from typing import TYPE_CHECKING, Any, cast

import ray
from ray import cloudpickle

from raytrain_opt.cluster.connection import check_address, ray_session, watch_preemption
from raytrain_opt.cluster.ray_private import log_folder
from raytrain_opt.cluster.resources import PoolPlan, plan_when_there_is_room
from raytrain_opt.config.schema import Job
from raytrain_opt.errors import (
    DataError,
    JobError,
    PoolError,
    Problem,
    ResidentError,
    StorageError,
)
from raytrain_opt.execution.batch_size import search_batch_size
from raytrain_opt.execution.check import ChooseThreads, check_job, try_job
from raytrain_opt.execution.resolve import Facts, Placement, Resolved
from raytrain_opt.execution.workspace import Frontend, Workspace
from raytrain_opt.pools.interface import Pools
from raytrain_opt.pools.launcher import environment
from raytrain_opt.storage import join
from raytrain_opt.threads import choose_threads, start_thread
from raytrain_opt.train.learner_config import OBJECT_SECTIONS

if TYPE_CHECKING:
    from raytrain_opt.data.factory import SharedData

# Ray ends its processes within a second, and kills each kind that has not ended after ten.
_RAY_END_S = 30.0


@contextmanager
def open_on_ray(
    job: Job,
    frontend: Frontend,
    *,
    address: str | None = None,
    verbose: bool = False,
    resumed: bool = False,
) -> Iterator[RayBackend]:
    """Connect to Ray, and read the data meanwhile. A Ray that was started here is shut down.

    Raises RaytrainOptError.
    """
    check_address(address)
    limits, terminal, stop = job.timeouts, frontend.terminal, frontend.stop
    backend = RayBackend(job, frontend, address, resumed=resumed)
    variables = environment(local=True, start_s=limits.start_s)
    session = ray_session(address, verbose=verbose, environment=variables)
    with ExitStack() as stack:
        stack.callback(wait, [backend.reading], limits.stop_s)
        terminal.phase("starting Ray")

        def on_notice(text: str) -> None:
            terminal.note(text)
            stop.saves = True

        try:
            # Half a Ray cannot be shut down: its processes end with this one.
            with stop.deferred(limits.start_s), stop.ended_within(limits.stop_s):
                backend.owns_ray = stack.enter_context(session)
            if not backend.owns_ray:
                stack.enter_context(watch_preemption(on_notice))
            frontend.startup.mark("ray_connected_s")
            yield backend
        finally:
            with stop.ended_within(_RAY_END_S + limits.stop_s):
                stack.close()


class RayBackend:
    """Trains in processes of a Ray cluster. Implements `Backend`.

    Created before Ray starts: it reads the data in a thread meanwhile. `owns_ray`: Ray was started
    for this run. `plan`: after `place`.
    """

    owns_ray = False
    plan: PoolPlan

    def __init__(
        self, job: Job, frontend: Frontend, address: str | None, *, resumed: bool
    ) -> None:
        self.options = f"--address {quote(address)}" if address else ""
        self._job, self._frontend, self._resumed = job, frontend, resumed
        self._unshared: tuple[bytes, SharedData] | None = None  # until in Ray's object store
        self._shared_refs: list[Any] | None = None
        self._choose_threads: ChooseThreads | None = None  # until the placement
        self.reading = start_thread(self._read)

    def _read(self) -> Facts:
        """Check the job, read its data, and import what the run needs next."""
        sections = _pickle_sections(self._job)  # before the objects in them have done anything
        if problems := check_job(self._job):
            raise JobError(problems)
        facts, shared, self._choose_threads = try_job(self._job, resumed=self._resumed)
        self._unshared = sections, shared
        import_module("raytrain_opt.execution.start")
        return facts

    def read(self) -> Facts:
        self._frontend.terminal.phase("reading data")
        limit_s = self._job.timeouts.no_progress_s
        if not wait([self.reading], limit_s).done:
            rule = f"not read within {limit_s:g} s (timeouts.no_progress_s)"
            raise DataError("data", f"{rule}; check that the storage responds")
        facts = self.reading.result(timeout=0)
        self._frontend.startup.mark("data_read_s")
        return facts

    def place(self, facts: Facts, *, search: bool = True) -> Placement:
        """Plan the pools when there is room; report where the plan differs from the job."""
        job, note = self._job, self._frontend.terminal.note
        candidates = job.slot_candidates if search else 0
        self.plan = plan = plan_when_there_is_room(job, candidates, note)
        threads = job.workers.threads
        if threads is None and self.owns_ray and not plan.use_gpu:
            fastest, batch_size = None, job.global_batch_size // plan.workers
            # A batch that is to be searched is measured with these threads.
            if self._choose_threads is not None and job.batch_size_search is None:
                fastest = partial(self._choose_threads, max(1, batch_size))
            threads = choose_threads(plan.workers_per_node, note, fastest)
        self._choose_threads = None
        return Placement(plan.workers, threads)

    def find_batch_size(self, facts: Facts, placement: Placement, workspace: Workspace) -> int:
        job, paths = self._job, workspace.paths
        if job.batch_size_search is None:
            return job.global_batch_size
        # Not at the top: it loads torch, which a job without a search never needs here.
        from raytrain_opt.execution.start import start_prober

        plan, shared = self.plan, self._share()
        open_prober = partial(start_prober, job, plan, placement, paths, shared, self.owns_ray)
        with _keeping_ray_logs(workspace):
            return search_batch_size(job, facts.info, placement, workspace, open_prober)

    @contextmanager
    def start(self, resolved: Resolved, workspace: Workspace) -> Iterator[Pools]:
        from raytrain_opt.execution.start import start_pools

        with (
            _keeping_ray_logs(workspace),
            start_pools(resolved, self.plan, workspace, self._share(), self.owns_ray) as pools,
        ):
            yield pools

    def _share(self) -> list[Any]:
        """Return the reference to what all processes share; keep no copy here."""
        if self._shared_refs is None:
            self._shared_refs = [ray.put(self._unshared)]  # Ray would fetch a bare one on the way
            self._unshared = None
        return self._shared_refs


_pickle = cast("Callable[[object], bytes]", cloudpickle.dumps)


def _pickle_sections(job: Job) -> bytes:
    """Pickle what may hold objects of the user's own, for the processes that train.

    As bytes: arrays in Ray's object store could not be written. Raises JobError.
    """
    sections = {name: getattr(job, name) for name in OBJECT_SECTIONS}
    try:
        return _pickle(sections)
    except Exception as error:
        path = next((name for name in sections if not _is_picklable(sections[name])), "job")
        rule = f"cannot be sent to the workers: {error}"
        hint = "create it where it is used, for example at the first call, or leave it out of the "
        hint += "object's state by __getstate__"
        raise JobError([Problem(path, rule, hint=hint)]) from error


def _is_picklable(value: object) -> bool:
    try:
        return bool(_pickle(value))
    except Exception:  # noqa: BLE001 - any, of the objects' own code
        return False


@contextmanager
def _keeping_ray_logs(workspace: Workspace) -> Iterator[None]:
    """Copy Ray's logs, which messages name and which end with Ray, when processes fail."""
    try:
        yield
    except (PoolError, ResidentError) as error:
        with suppress(OSError, StorageError):
            paths = workspace.paths
            copytree(log_folder(), paths.local / "ray_logs", dirs_exist_ok=True)
            error.message += f"\nRay's session logs: {join(paths.shown, 'ray_logs')}"
            paths.publish()
        raise
