"""Phase 1 of a run: choose the batch size by probes; `find_batch_size` does only that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from raytrain_opt.clock import monotonic_s
from raytrain_opt.config.batch_size import BatchSizeSection, ThroughputKneeSearch
from raytrain_opt.config.schema import Job
from raytrain_opt.data.base import DataInfo
from raytrain_opt.errors import PoolError
from raytrain_opt.execution.backend import open_backend
from raytrain_opt.execution.resolve import Placement, scaled_lr, scaling_of, settle
from raytrain_opt.execution.workspace import Workspace, open_frontend, open_workspace
from raytrain_opt.optim.epoch_steps import length_of
from raytrain_opt.recording.reader import read_record
from raytrain_opt.recording.recorder import append, write_record
from raytrain_opt.recording.records import BatchSizeProbeRecord, BatchSizeRecord
from raytrain_opt.report import try_write_report
from raytrain_opt.results import Probe
from raytrain_opt.search.batch_size.strategy import (
    LARGEST_LR_FACTOR,
    BatchSizeChoice,
    SizeBounds,
    Strategy,
    Updates,
    largest_size,
)
from raytrain_opt.search.factory import build_strategy
from raytrain_opt.terminal import probe_text

if TYPE_CHECKING:
    from raytrain_opt.pools.ray_pool import ProbingSlot

# Of train_for, the part in which updates are made; start, search and evaluations take the rest.
_TRAINING_FRACTION = 0.8
_CHECK_REASON = "check of the choice in a new process"


@dataclass(frozen=True)
class BatchSizeResult:
    """The outcome of a batch-size search."""

    batch_size: int  # samples per worker
    job: Job  # with the chosen size, the rescaled learning rate and no further search
    run_dir: str


def find_batch_size(
    job: Job, *, address: str | None = None, verbose: bool = False
) -> BatchSizeResult:
    """Search the batch size without training. A job without a search gets `throughput_knee`.

    Raises RaytrainOptError.
    """
    section = job.batch_size_search or ThroughputKneeSearch(strategy="throughput_knee")
    job = Job(**{**dict(job), "batch_size_search": section})  # which also checks the rules
    with (
        open_frontend(monotonic_s()) as frontend,
        open_backend(job, frontend, address=address, verbose=verbose) as backend,
    ):
        facts = backend.read()
        with open_workspace(job, frontend, info=facts.info, options=backend.options) as workspace:
            placement = backend.place(facts, search=False)
            settled = settle(job, placement, backend.find_batch_size(facts, placement, workspace))
            workspace.write_job(settled)
            run_dir = workspace.paths.shown
            report = try_write_report(str(workspace.paths.local), run_dir)
            workspace.terminal.note(f"report  {report}")
            workspace.paths.publish()
            return BatchSizeResult(settled.batch_size_per_worker, settled, run_dir)


def search_batch_size(
    job: Job,
    info: DataInfo,
    placement: Placement,
    workspace: Workspace,
    open_prober: Callable[[], AbstractContextManager[ProbingSlot]],
) -> int:
    """Return the global batch size that probes choose, or that they chose in a resumed run.

    Records every probe as soon as it is measured, and what the choice leads to.
    """
    started_s, section, paths = monotonic_s(), job.batch_size_search, workspace.paths
    note = workspace.terminal.note
    assert section is not None
    record = read_record(str(paths.local), BatchSizeRecord)
    if record is not None:  # a resumed run does not repeat a finished search
        return record.batch_size_per_worker * placement.workers
    probes: list[BatchSizeProbeRecord] = []

    def record_probe(record: BatchSizeProbeRecord) -> None:
        probes.append(record)
        append(paths.local, record)
        note(probe_text(record))

    bounds = _bounds(job, section, info.train_size, placement.workers)
    note(
        f"batch sizes of 1 to {bounds.largest} per worker are allowed, by the training set, "
        "min_updates_per_epoch, min_updates and max_batch_size of batch_size_search (without it, "
        f"the rate grows {LARGEST_LR_FACTOR}-fold at most)"
    )
    workspace.terminal.phase("searching the batch size")
    with open_prober() as prober:
        strategy = build_strategy(section, bounds)
        choice = run_probes(strategy, prober, job.max_restarts, record_probe)
    samples_per_s = next(p.samples_per_s for p in reversed(probes) if p.check)
    assert samples_per_s is not None  # of the last check, which fitted
    record = BatchSizeRecord(
        batch_size_per_worker=choice.batch_size,
        global_batch_size=choice.batch_size * placement.workers,
        samples_per_s=samples_per_s,
        reason=choice.reason,
        duration_s=monotonic_s() - started_s,
        probes=len(probes),
    )
    write_record(paths.local, record)
    for line in _summary(record, job, info.train_size):
        note(line)
    return record.global_batch_size


def run_probes(
    strategy: Strategy,
    prober: ProbingSlot,
    max_restarts: int,
    on_probe: Callable[[BatchSizeProbeRecord], None],
) -> BatchSizeChoice:
    """Search, check the choice in a new process, and continue the search if the check fails.

    The check may also show that probes differ by more than the strategy knew, and lead it to
    another choice. Raises what a probe raised, ResourcesError when nothing fits, PoolError when
    probing processes keep dying or do not answer.
    """
    probes: list[Probe] = []
    checked: set[int] = set()
    deaths, number = 0, 0
    while True:
        proposal = strategy.propose(probes)
        size, is_check = proposal.batch_size, isinstance(proposal, BatchSizeChoice)
        if isinstance(proposal, BatchSizeChoice):
            if size in checked:
                return proposal
            prober.end()
        probe = prober.measure(size, check=is_check)
        if probe.status == "died" and not is_check:
            deaths += 1
            if deaths > max_restarts:
                raise PoolError(
                    f"probing processes died {deaths} times without an answer "
                    f"(max_restarts: {max_restarts}): {probe.why}"
                )
            continue
        if probe.status == "died":  # this size is too large to train with
            probe = replace(probe, status="out_of_memory", why=f"its process ended: {probe.why}")
        if is_check or probe.status != "ok":
            prober.end()
        if is_check and probe.fits:
            checked.add(size)
        if strategy.weighs_checks or not (is_check and probe.fits):
            probes.append(probe)
        number += 1
        reason = _CHECK_REASON if is_check else proposal.reason
        values = {"probe": number, "check": is_check, "reason": reason, "error": probe.why}
        on_probe(BatchSizeProbeRecord.from_values(vars(probe) | values))


def _summary(record: BatchSizeRecord, job: Job, train_size: int) -> Iterator[str]:
    sizes = job.global_batch_size, record.global_batch_size
    before, after = (
        Updates.count(train_size, size, length_of(job), job.batch_ramp) for size in sizes
    )
    lr_before, lr_after = (scaled_lr(job, size) for size in sizes)
    yield (
        f"batch size {record.batch_size_per_worker} per worker "
        f"({record.samples_per_s:,.0f} samples/s): {record.reason}; global_batch_size "
        f"{sizes[0]} -> {sizes[1]}, learning_rate.initial {lr_before:.4g} -> {lr_after:.4g} "
        f"({scaling_of(job)[0]}); updates: {before} -> {after}; {record.probes} probes, "
        f"{record.duration_s:.1f} s"
    )
    if (factor := lr_after / lr_before) > LARGEST_LR_FACTOR:
        yield (
            f"warning: learning_rate.initial grows {factor:.3g}-fold, as max_batch_size allows. "
            f"Beyond {LARGEST_LR_FACTOR} the training may end worse or diverge. Use a warm-up "
            "(learning_rate.warmup), batch_size_search.lr_rule: sqrt, or no max_batch_size, and "
            "compare the accuracies."
        )


def _bounds(job: Job, section: BatchSizeSection, train_size: int, workers: int) -> SizeBounds:
    """Return the sizes that leave enough memory and updates."""
    own, length = job.global_batch_size // workers, length_of(job)
    ramp, (rule, _) = job.batch_ramp, scaling_of(job)
    largest = largest_size(section, own, train_size, length, workers, ramp, rule)
    max_step_s = _TRAINING_FRACTION * length.seconds / section.min_updates
    return SizeBounds(largest, train_size // workers, own, max_step_s)
