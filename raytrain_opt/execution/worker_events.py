"""What the log of events says about workers and slots: their number and deaths."""

from __future__ import annotations

from collections.abc import Sequence

from raytrain_opt.pools.protocol import Pool
from raytrain_opt.recording.recorder import EventLog
from raytrain_opt.search.policy import CandidateResult, TryCandidates


class WorkerEvents:
    """Logs changes; `at_work` is the number of workers in the latest epoch."""

    def __init__(self, event_log: EventLog, workers: Pool) -> None:
        self._event_log, self._size = event_log, workers.size
        self.at_work = workers.size

    def trained(self, epoch: int, workers: int) -> None:
        """Log another number of workers."""
        before, self.at_work = self.at_work, workers
        if workers != before:
            self._event_log.log(
                "fewer" if workers < before else "more",
                epoch,
                f"epoch {epoch}: running on {workers} of {self._size} workers; "
                "global batch size unchanged",
            )

    def lost_results(
        self, action: TryCandidates, results: Sequence[CandidateResult], pool: Pool
    ) -> list[CandidateResult]:
        """Return and log a result for each candidate whose slot died too often."""
        finished = {result.candidate.index for result in results}
        lost = [c for c in action.candidates if c.index not in finished]
        if lost:
            lrs = ", ".join(f"{candidate.lr:.3g}" for candidate in lost)
            self._event_log.log(
                "lost",
                action.epoch,
                f"epoch {action.epoch}: learning rate {lrs} is left out: its slot died more often "
                "than max_restarts allows, or made no progress within timeouts.no_progress_s; "
                f"{len(pool.alive())} of {pool.size} slots are left",
            )
        return [CandidateResult.lost(candidate) for candidate in lost]
