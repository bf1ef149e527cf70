"""What a run has around it: terminal, signals, run directory and its lock. Imports no torch."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TextIO

from raytrain_opt.clock import utc_now
from raytrain_opt.config.load import dump_job
from raytrain_opt.config.schema import Job
from raytrain_opt.data.base import DataInfo
from raytrain_opt.errors import CheckpointError, DataError, JobError, Problem, StorageError
from raytrain_opt.execution.progress import RunProgress, Startup
from raytrain_opt.execution.resume import check_continues, resume_command
from raytrain_opt.execution.signals import StopRequest, stop_on_signals
from raytrain_opt.paths import RunPaths
from raytrain_opt.recording.recorder import check_records
from raytrain_opt.storage import open_plain, remove_tree, write_text
from raytrain_opt.temporary import remove_abandoned
from raytrain_opt.terminal import Terminal
from raytrain_opt.train.checkpoint import Checkpoints, read_checkpoint, read_index

_LOCK = ".lock"
# What flock raises on a file system without locks, as some network file systems are.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
# `is_locked` holds the lock for microseconds; a run that starts just then tries once more.
_RETRY_S = 0.2
_locks = set[int]()  # descriptors of those that this process holds


@dataclass(frozen=True)
class Frontend:
    """Where a run shows its progress and takes signals, and the times of its start."""

    terminal: Terminal
    stop: StopRequest
    startup: Startup


@dataclass(frozen=True)
class Workspace(Frontend):
    """A frontend and a run directory that is locked; its latest checkpoint is readable."""

    paths: RunPaths
    checkpoints: Checkpoints
    resume: str | None = None

    def write_job(self, job: Job) -> None:
        """Write job.yaml. Raises JobError if the storage cannot be written."""
        paths = self.paths
        with _writing(paths, job, self.resume):
            write_text(paths.job, dump_job(job))
            for path in (paths.result, paths.ending):  # a run with a result is not resumed
                path.unlink(missing_ok=True)
            paths.publish()


@contextmanager
def open_frontend(began_s: float) -> Iterator[Frontend]:
    """Show progress and take signals. `began_s`: monotonic time from which the start counts."""
    with Terminal() as terminal, stop_on_signals(terminal.note) as stop:
        yield Frontend(terminal, stop, Startup(began_s))


@contextmanager
def open_workspace(
    job: Job,
    frontend: Frontend,
    resume: str | None = None,
    info: DataInfo | None = None,
    options: str = "",
) -> Iterator[Workspace]:
    """Make a run directory, or open the one of an earlier run; lock it against other processes.

    What ends the block early says how to resume the run, with these `options` of the command.
    Raises JobError or CheckpointError, and DataError if data that were read (`info`) are not those
    of the latest checkpoint.
    """
    terminal, stop = frontend.terminal, frontend.stop
    paths = RunPaths.existing(resume) if resume else RunPaths.create(job.storage_path, job.name)
    with ExitStack() as stack:
        with _writing(paths, job, resume):
            remove_abandoned()
            if not resume:
                paths.begin()
            sign_lock = stack.enter_context(lock_run_directory(paths.local))
            checkpoints = Checkpoints(paths.checkpoints, job.checkpoint)
            damages = checkpoints.drop_damaged()
            _check_latest(checkpoints, paths, job, info)
            has_lock = sign_lock()
            for torn in paths.local.glob(".*.tmp"):  # of a process that was killed
                torn.unlink()
            checkpoints.remove_orphans()
        notes = [f"{'resuming' if resume else 'run directory:'} {paths.shown}"]
        notes += [f"{damage}; the one before is used" for damage in damages]
        if not has_lock:
            notes += ["this storage has no locks: do not resume this run twice at the same time"]
        for note in (*notes, *(info.notes if info else ())):
            terminal.note(note)
        stop.advice = partial(how_to_resume, paths, job, options)

        try:
            yield Workspace(terminal, stop, frontend.startup, paths, checkpoints, resume)
        except (JobError, DataError):
            if not resume and not checkpoints.saved:
                stop.advice = None
                remove_tree(paths.local)  # leave no directory of a run that could not start
            raise


@contextmanager
def _writing(paths: RunPaths, job: Job, resume: str | None) -> Iterator[None]:
    """Raise JobError for storage that cannot be written, and leave no new directory there."""
    try:
        yield
    except CheckpointError:
        raise
    except (StorageError, OSError) as error:
        if not resume:
            remove_tree(paths.local)
        field, path = ("--resume", resume) if resume else ("storage_path", job.storage_path)
        raise JobError([Problem(field, f"cannot be written: {error}", repr(path))]) from error


def _check_latest(
    checkpoints: Checkpoints, paths: RunPaths, job: Job, info: DataInfo | None
) -> None:
    """Look at all that a resume reads: one that is refused has changed nothing."""
    if checkpoints.latest is not None:
        _, plain, _ = read_checkpoint(checkpoints.folder / checkpoints.latest.folder)
        progress = RunProgress.from_json(plain)
        if info is not None and progress.data is not None:
            progress.data.require_same(info)
        if progress.job is not None:
            check_continues(job, progress.job, paths.shown, is_edited=True)
        check_records(paths.local, len(progress.history.decisions), progress.next_epoch - 1)


def how_to_resume(paths: RunPaths, job: Job, options: str = "") -> str:
    """Say how much of a run that ended early is saved, and the command that resumes it."""
    if paths.result.exists() and paths.is_published:
        return f"the training is finished: {paths.shown}"
    if not (checkpoints := read_index(paths.checkpoints)):
        return f"no checkpoint was saved yet in {paths.shown}"
    run_dir = paths.shown if paths.is_published else str(paths.local)
    reached = checkpoints[-1].text
    return f"saved through {reached}; resume with: {resume_command(run_dir, job, options)}"


@contextmanager
def lock_run_directory(run_dir: Path) -> Iterator[Callable[[], bool]]:
    """Hold the lock of a run directory against every other process that sees this folder.

    Yields a function that writes this process into the lock, and returns whether it is held: False
    on a file system without locks. Until it is called, nothing is changed, and a new lock is
    removed again. Raises JobError when another process holds the lock, and OSError when its file
    cannot be made.
    """
    held, path = True, run_dir / _LOCK
    is_new = not path.exists()
    with open(path, "a+", encoding="utf-8", opener=open_plain) as file:
        try:
            _lock_exclusively(file)
        except BlockingIOError as error:
            holder = Path(file.name).read_text(encoding="utf-8")
            rule = (
                "another run is writing to this directory, or begins to; its lock was signed by "
                f"{holder or 'nobody'}; wait for it, or stop it"
            )
            raise JobError([Problem("--resume", rule, repr(str(run_dir)))], "arguments") from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            held = False

        def sign() -> bool:
            nonlocal is_new
            is_new = False
            if held:
                holder = f"process {os.getpid()} on {socket.gethostname()} since {utc_now()}"
                os.ftruncate(file.fileno(), 0)
                content = holder.encode()
                while content:  # a buffer would be written at the end; full storage takes a part
                    content = content[os.write(file.fileno(), content) :]
            return held

        _locks.add(file.fileno())
        try:
            yield sign
        finally:
            _locks.discard(file.fileno())
            if is_new:
                path.unlink(missing_ok=True)


def _leave_locks() -> None:
    """Hold no lock in a fork, such as a loader process, which may outlive a killed run."""
    for descriptor in _locks:
        os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
    _locks.clear()


os.register_at_fork(after_in_child=_leave_locks)


def _lock_exclusively(file: TextIO) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        time.sleep(_RETRY_S)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_locked(run_dir: Path) -> bool:
    try:
        with open(run_dir / _LOCK, "rb", opener=open_plain) as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no such file, or no locks
        return False
    return False
