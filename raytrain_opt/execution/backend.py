"""Where a run computes: on Ray (`on_ray`), or in one process (`in_process`)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from raytrain_opt.config.schema import Job
from raytrain_opt.execution.resolve import Facts, Placement, Resolved
from raytrain_opt.execution.workspace import Frontend, Workspace
from raytrain_opt.pools.interface import Pools


class Backend(Protocol):
    """The steps from a job to the processes that train it, in this order."""

    options: str
    """Options of the command that resumes the run here."""

    def read(self) -> Facts:
        """Check the job, read its data and try its network. Raises JobError, DataError."""

    def place(self, facts: Facts, *, search: bool = True) -> Placement:
        """Find room for workers, and for slots if there is a `search`. Raises ResourcesError."""

    def find_batch_size(self, facts: Facts, placement: Placement, workspace: Workspace) -> int:
        """Return the global batch size, searched by probes where the job says so."""

    def start(self, resolved: Resolved, workspace: Workspace) -> AbstractContextManager[Pools]:
        """Start workers and slots; end them when the block is left."""


def open_backend(
    job: Job,
    frontend: Frontend,
    in_process: bool = False,
    address: str | None = None,
    verbose: bool = False,
    resumed: bool = False,
) -> AbstractContextManager[Backend]:
    """Open the backend of a job: connect to Ray at `address`, or stay in this process."""
    if in_process:
        from raytrain_opt.execution.in_process import open_in_process

        return open_in_process(job, frontend, resumed=resumed)
    from raytrain_opt.execution.on_ray import open_on_ray

    return open_on_ray(job, frontend, address=address, verbose=verbose, resumed=resumed)
