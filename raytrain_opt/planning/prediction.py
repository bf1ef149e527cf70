"""Add up the terms of a plan: step, epoch, search, training, memory and cost.

| symbol | meaning                                                                          |
|--------|----------------------------------------------------------------------------------|
| B, W   | global batch, workers; each computes b = B / W samples of an update              |
| c(b)   | seconds of an update's forward and backward pass and update (`terms`)            |
| s      | on CPU, processes that share a core: max(1, threads of a node's workers / cores), |
|        | times `busy` with as many processes as cores, in proportion with fewer            |
| x      | seconds of the all-reduces of an update, in m messages (`cluster`)               |
| l(B)   | seconds in which the loaders of all nodes deliver B samples                      |

    step = max(c(b) + x - min(2/3 c(b), x (m - 1) / m), l(B))    on GPUs
    step = max(s (c(b) + x), l(B))                               on CPUs

The backward pass, 2/3 of the work, hides the exchange, except for the last message. On a CPU the
exchange needs the core itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from raytrain_opt.cluster.resources import PoolRequest, plan_pools
from raytrain_opt.config.schema import Job
from raytrain_opt.data.base import DataInfo
from raytrain_opt.errors import JobError, ResourcesError
from raytrain_opt.optim.epoch_steps import epoch_steps, ramp_factor
from raytrain_opt.planning.cluster import ClusterSection
from raytrain_opt.planning.terms import MeasuredStep, Terms
from raytrain_opt.search.factory import build_policy, max_candidates
from raytrain_opt.search.policy import (
    CandidateResult,
    EpochLosses,
    History,
    Policy,
    TryCandidates,
)

# DDP's first message has 1 MiB, the others 25.
_FIRST_MESSAGE_BYTES, _MESSAGE_BYTES = 2**20, 25 * 2**20
# The forward pass is a third of the work of a training step.
_FORWARD = 1 / 3
# Batches that are compared: the job's times these powers of 2.
_BATCH_OCTAVES = range(-3, 7)


@dataclass(frozen=True)
class Prediction:
    """One batch and number of workers, with the samples that the same progress then needs."""

    workers: int
    global_batch_size: int
    step_s: float
    exchange_s: float
    hidden_s: float  # of the exchange, beside the backward pass
    epoch_s: float
    search_s: float
    search_on: str
    training_s: float
    memory_bytes: float  # of a device
    cost: float  # 0 without a price

    @property
    def total_s(self) -> float:
        """Search and training."""
        return self.search_s + self.training_s

    @property
    def device_hours(self) -> float:
        """Hours of all devices together."""
        return self.workers * self.total_s / 3600


@dataclass(frozen=True)
class Planner:
    """Predicts a job on a cluster.

    `exchange_bytes`: gradients of an update, as exchanged. `sample_flops`: operations of a
    sample's training, by which a search tells a small training.
    """

    job: Job
    info: DataInfo
    cluster: ClusterSection
    terms: Terms
    exchange_bytes: float
    checkpoint_bytes: float = 0.0
    sample_flops: float = math.inf

    def predict(self, workers: int, global_batch_size: int) -> Prediction:
        """Predict the job with this batch. Raises JobError if it is too large, ResourcesError."""
        section = self.job.workers.model_copy(update={"count": workers})
        sections = {"workers": section, "global_batch_size": global_batch_size}
        job, ramp = self.job.model_copy(update=sections), self.job.batch_ramp.steps
        steps = epoch_steps(
            self.info.train_size,
            global_batch_size,
            ramp,
            self.info.search_size,
            drop_last=job.data.drop_last,
        )
        step_s, exchange_s, hidden_s = self.step_s(workers, global_batch_size)
        assert job.epochs is not None  # `plan` has refused jobs without
        policy = build_policy(job, steps, step_flops=self.sample_flops * global_batch_size)
        search_s, search_on = self._search_s(job, job.epochs, policy)
        evaluate_s = self._score_s(workers, self.info.test_size)
        training_s = math.ceil(job.epochs / job.evaluate.every_epochs) * evaluate_s
        unsaved_s, write_s = 0.0, self.terms.checkpoint_s
        for epoch in range(1, job.epochs + 1):
            batch = global_batch_size * ramp_factor(ramp, epoch)
            epoch_s = steps(epoch) * self.step_s(workers, batch)[0] + self.terms.epoch_s
            training_s, unsaved_s = training_s + epoch_s, unsaved_s + epoch_s
            if epoch % job.checkpoint.every_epochs == 0:
                # A checkpoint is written beside the training, which waits for the one before.
                if epoch > job.checkpoint.every_epochs:
                    training_s += max(0.0, write_s - unsaved_s)
                unsaved_s = 0.0
        training_s = training_s * self.progress(global_batch_size) + write_s
        node_hours = self.cluster.nodes_of(workers) * (search_s + training_s) / 3600
        return Prediction(
            workers,
            global_batch_size,
            step_s,
            exchange_s,
            hidden_s,
            steps.first * step_s + evaluate_s + self.terms.epoch_s,
            search_s,
            search_on,
            training_s,
            self.terms.fixed_bytes + global_batch_size / workers * self.terms.sample_bytes,
            node_hours * (self.cluster.price_per_node_hour or 0.0),
        )

    def step_s(self, workers: int, global_batch_size: int) -> tuple[float, float, float]:
        """Return the seconds of a step, of its exchange, and of what the backward pass hides."""
        compute_s = self.terms.compute_s(global_batch_size / workers) * self._sharing(workers)
        messages = 1 + math.ceil(
            max(0.0, self.exchange_bytes - _FIRST_MESSAGE_BYTES) / _MESSAGE_BYTES
        )
        exchange_s = self.cluster.exchange_s(self.exchange_bytes, messages, workers)
        hidden_s = min((1 - _FORWARD) * compute_s, exchange_s * (1 - 1 / messages))
        if self.cluster.device is None:
            hidden_s, exchange_s = 0.0, exchange_s * self._sharing(workers)
        nodes, loader = self.cluster.nodes_of(workers), self.cluster.loader_samples_per_s
        load_s = global_batch_size / nodes / loader if loader else 0.0
        return max(compute_s + exchange_s - hidden_s, load_s), exchange_s, hidden_s

    def calibrated(self, measured: Sequence[MeasuredStep]) -> Planner:
        """Return the planner with `busy` from steps of several workers on nodes like the plan's.

        Processes that compute at the same time share caches and memory, on CPUs so much that one
        worker alone does not tell the speed of two.
        """
        factors = []
        for workers, batch, step_s in measured:
            busy_share = self._busy_share(workers)
            if self.cluster.device is None and busy_share > 0:
                slowdown = step_s / self.step_s(workers, batch)[0]
                factors.append(1 + max(0.0, slowdown - 1) / busy_share)
        if not factors:
            return self
        return replace(self, terms=replace(self.terms, busy=median(factors)))

    def progress(self, global_batch_size: int) -> float:
        """Return the samples that this batch needs, relative to the job's (McCandlish et al.)."""
        noise = self.terms.noise_scale
        if noise is None:
            return 1.0
        return (noise + global_batch_size) / (noise + self.job.global_batch_size)

    def doublings(self) -> list[Prediction]:
        """Predict the job's batch on 1, 2, 4, … workers, and on all devices."""
        return list(self._possible([self.job.global_batch_size]))

    def choices(self) -> list[Prediction]:
        """Predict all numbers of workers, and batches where the noise scale is known."""
        octaves = [0] if self.terms.noise_scale is None else _BATCH_OCTAVES
        sizes = {max(1, int(self.job.global_batch_size * 2.0**i)) for i in octaves}
        return list(self._possible(sorted(sizes)))

    def _possible(self, batch_sizes: Sequence[int]) -> Iterator[Prediction]:
        """Yield all combinations that split evenly and fit the cluster and its memory."""
        counts = sorted(
            {*(2**i for i in range(self.cluster.size.bit_length())), self.cluster.size}
        )
        for size, count in ((s, c) for s in batch_sizes for c in counts if s % c == 0):
            try:
                prediction = self.predict(count, size)
            except (JobError, ResourcesError):
                continue  # not possible: others are
            if prediction.memory_bytes <= self.cluster.memory_bytes:
                yield prediction

    def _sharing(self, workers: int) -> float:
        """Return how many times as long computing takes as with the measured threads."""
        if self.cluster.device is not None:
            return 1.0
        cores, in_node = self.cluster.devices, workers / self.cluster.nodes_of(workers)
        threads = self.job.workers.threads or max(1, cores // math.ceil(in_node))
        busy = 1 + (self.terms.busy - 1) * self._busy_share(workers)
        return busy * max(1.0, in_node * threads / cores) * self.terms.threads / threads

    def _busy_share(self, workers: int) -> float:
        """Return which part of a node's other cores compute for other workers."""
        cores, in_node = self.cluster.devices, workers / self.cluster.nodes_of(workers)
        return min(1.0, (in_node - 1) / max(1, cores - 1))

    def _score_s(self, workers: int, samples: int) -> float:
        return _FORWARD * samples / workers * self.terms.sample_s * self._sharing(workers)

    def _search_s(self, job: Job, epochs: int, policy: Policy) -> tuple[float, str]:
        """Return the seconds of all candidates, less the kept steps, and who trains them."""
        workers, batch = job.workers.size, job.global_batch_size
        request = PoolRequest(
            job.workers, batch, job.slots, max_candidates(job), job.search_on, False
        )
        slots = plan_pools(request, self.cluster.resources).slots
        rounds = search_rounds(policy, epochs)
        if not rounds:
            return 0.0, "no candidates"
        worker_step_s = step_s = self.step_s(workers, batch)[0]
        score_s = self._score_s(workers, self.info.validation_size)
        if slots:
            # A slot computes all parts of the batch, or one with candidate_batch: local.
            parts = 1 if job.learning_rate.candidate_batch == "local" else workers
            sharing = math.ceil(slots / self.cluster.size)
            step_s = sharing * parts * self.terms.compute_s(batch / workers)
            score_s = sharing * self._score_s(1, self.info.validation_size)
        total_s = 0.0
        for action in rounds:
            waves = math.ceil(len(action.candidates) / (slots or 1))
            total_s += waves * (action.pretrain_steps * step_s + score_s)
            total_s -= action.kept_steps * worker_step_s
        return total_s, f"on {slots} slots" if slots else "on the workers"


def search_rounds(policy: Policy, epochs: int) -> list[TryCandidates]:
    """Return the rounds of a policy where its first base rates are the best ones.

    A search that has to look further takes more, within `learning_rate.max_search_cost`.
    """
    rounds: list[TryCandidates] = []
    history = History()
    for epoch in range(1, epochs + 1):
        while isinstance(action := policy.next(epoch, history), TryCandidates):
            rounds.append(action)
            results = []
            for candidate in action.candidates:
                loss = 1 + math.log10(candidate.multiplier) ** 2
                result = CandidateResult(candidate, "ok", 1 / loss, loss, loss, 1, 0, 0, 0, 64)
                results.append(result)
            history = history.after_round(policy.decide(action, results, history))
        history = history.after_epoch(EpochLosses(1.0))
    return rounds
