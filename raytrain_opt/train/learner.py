"""What a worker or a candidate's slot holds and does: train some steps, evaluate, move state.

One `Learner` is built per process and lives as long as the run. It knows nothing of Ray.
Nothing in its loop waits for the device: sums of loss and hits stay there until the end of
a phase.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raytrain_opt.clock import monotonic_s
from raytrain_opt.config.optimizer import ParallelSection
from raytrain_opt.config.schema import Job
from raytrain_opt.data import TrainingData, open_data
from raytrain_opt.data.array_sets import Arrays
from raytrain_opt.data.base import Batch, DataInfo, Split
from raytrain_opt.models import build_model, check_output
from raytrain_opt.optim.batch_ramp import ramp_factor
from raytrain_opt.optim.build import build_optimizer, set_lr, set_weight_decays, weight_decays
from raytrain_opt.train.batchnorm import (
    batches_seen,
    count_positions,
    pool_statistics,
    prepare,
    recalibrate,
)
from raytrain_opt.train.buffers import buffers_of
from raytrain_opt.train.group import Parallel, alone
from raytrain_opt.train.loss import build_loss
from raytrain_opt.train.state import HostState, capture, restore
from raytrain_opt.train.totals import BLOCK, Buffers, EvalTotals, GradientNorms, TrainTotals

_AMP_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16}

# Called before each step with the number of steps done in this phase; may raise to stop it.
OnStep = Callable[[int], None]


@dataclass(frozen=True)
class Shares:
    """Which shares of each global batch this process computes: `mine` of `count`.

    Their gradients are added up and divided by `divisor`, by default the number of them.
    """

    mine: range
    count: int
    divisor: float | None = None

    @classmethod
    def of_rank(cls, rank: int, world_size: int, count: int) -> Shares:
        """`count` shares over as many or fewer workers, as evenly as they go. The mean over the
        workers, which DDP takes, is the mean over all shares, however many each of them has.
        """
        mine = range(rank * count // world_size, (rank + 1) * count // world_size)
        return cls(mine, count, count / world_size)

    @property
    def divided_by(self) -> float:
        """Of a sum of the gradients of `mine`."""
        return len(self.mine) if self.divisor is None else self.divisor

    def cut(self, parts: int) -> Shares:
        """The same samples in `parts` times as many shares."""
        mine = range(self.mine.start * parts, self.mine.stop * parts)
        return Shares(mine, self.count * parts, self.divided_by * parts)


@dataclass(frozen=True)
class _Phase:
    """What was trained last: `seen` are the BatchNorm layers' counts at its start."""

    epoch: int
    shares: Shares
    seen: dict[str, int]


class Learner:
    """Model, optimiser, loss and data of one process.

    `distribute` says how it works with others (`train.group`); state always refers to the bare
    model.
    """

    def __init__(
        self,
        job: Job,
        shared: Arrays | None,
        device: torch.device,
        distribute: Callable[[nn.Module, ParallelSection], Parallel] = alone,
    ) -> None:
        self.job, self.device = job, device
        self.data: TrainingData = open_data(
            job.data, shared, seed=job.seed, device=device, channels_last=job.channels_last
        )
        self.model, self._positions = _build(job, self.info, device)
        self.parallel = distribute(self.model, job.parallel)
        self.optimizer = build_optimizer(
            job.optimizer,
            self.model,
            steps_per_epoch=self.info.steps_per_epoch(job.global_batch_size),
        )
        self._weight_decays = weight_decays(self.optimizer)
        self.loss = build_loss(job.loss)
        self.scaler = torch.amp.GradScaler(device.type, enabled=job.precision == "fp16")
        self._phase = _Phase(1, Shares(range(1), 1), batches_seen(self.model))

    @property
    def info(self) -> DataInfo:
        """Sizes of the data set."""
        return self.data.info

    def state(self, *, copy: bool) -> HostState:
        """See `train.state.capture`."""
        return capture(self.model, self.optimizer, self.scaler, copy=copy)

    def load(self, state: HostState) -> None:
        """See `train.state.restore`."""
        restore(state, self.model, self.optimizer, self.scaler)

    def train(
        self,
        epoch: int,
        first_step: int,
        lrs: Sequence[float],
        shares: Shares,
        on_step: OnStep = lambda _: None,
        decay: float = 1.0,
    ) -> TrainTotals:
        """Train len(lrs) steps of `epoch`, from `first_step`, each at its rate, with `decay` times
        the optimiser's weight decay.

        Several shares are accumulated into one update, so that the result is the one that
        as many workers would compute together. The same arguments from the same state give
        the same result, whatever ran before.
        """
        started_s, wait_s, samples, skipped = monotonic_s(), 0.0, 0, 0
        shares = self._ramped(epoch, shares)
        self._phase = _Phase(epoch, shares, batches_seen(self.model))
        sums = torch.zeros(2, device=self.device, dtype=torch.float64)
        self._seed(f"{self.job.seed} {epoch} {first_step} {shares.mine.start}")
        set_weight_decays(self.optimizer, [decay * each for each in self._weight_decays])
        self.parallel.forward.train()
        self.parallel.begin(shares.divided_by, self.scaler.scale)
        batches = self._batches(range(first_step, first_step + len(lrs)))
        for done, lr in enumerate(lrs):
            on_step(done)
            set_lr(self.optimizer, lr)
            self.optimizer.zero_grad(set_to_none=True)
            for share in shares.mine:
                asked_s = monotonic_s()
                batch = next(batches)
                wait_s += monotonic_s() - asked_s
                with self.parallel.accumulate(last=share == shares.mine[-1]):
                    sums += self._accumulate(batch, shares.divided_by)
                samples += len(batch.y)
                skipped += batch.skipped
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.parallel.after_step()
        loss_sum, correct = sums.tolist()
        return TrainTotals(
            steps=len(lrs),
            samples=samples,
            loss_sum=loss_sum,
            correct=int(correct),
            skipped=skipped,
            seconds=monotonic_s() - started_s,
            data_wait_s=wait_s,
            norms=self._norms(),
        )

    def begin_shares(self, epoch: int, count: int) -> None:
        """Shares of any steps of `epoch` follow, each by itself; `count` of them make a step."""
        self._phase = _Phase(epoch, Shares(range(1), count), batches_seen(self.model))
        self.model.train()

    def batches_at(self, places: Iterable[tuple[int, int]]) -> Iterator[Batch]:
        """Those of the epoch that was begun: (step, share)."""
        at = self._phase
        size = self._global_batch_size(at.epoch)
        return self.data.train_places(at.epoch, places, at.shares.count, size)

    def add_gradient(self, batch: Batch, place: tuple[int, int]) -> tuple[float, int]:
        """Add the gradient of the mean loss of one share to what the parameters have. Returns the
        sum of its losses and the hits. The same share draws the same random numbers everywhere.
        """
        step, share = place
        self._seed(f"{self.job.seed} {self._phase.epoch} {step} share {share}")
        loss_sum, hits = self._accumulate(batch, 1.0).tolist()
        return loss_sum, int(hits)

    def buffers(self, batches: int) -> Buffers:
        """What `batches` shares, since they were begun, did to this process's model."""
        at = self._phase
        size = self._global_batch_size(at.epoch) // at.shares.count
        return buffers_of(self.model, size, self._positions, at.seen, batches)

    def _norms(self) -> GradientNorms | None:
        """What was measured of the gradients of the phase that is over."""
        pairs, size = self.parallel.finish(), self._global_batch_size(self._phase.epoch)
        return GradientNorms(size // self._phase.shares.count, size, pairs) if pairs else None

    def _accumulate(self, batch: Batch, divisor: float) -> Tensor:
        """Forward and backward of one share; returns [sum of losses, hits] on the device."""
        with self.autocast():
            output = self.parallel.forward(batch.x)
            loss = self.loss(output, batch.y)
        scaled = loss if divisor == 1 else loss / divisor
        self.scaler.scale(scaled).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            hits = (output.argmax(1) == batch.y).sum()
            return torch.stack((loss.detach().double() * len(batch.y), hits.double()))

    @torch.no_grad()
    def evaluate(
        self,
        split: Split,
        rank: int = 0,
        world_size: int = 1,
        on_step: Callable[[int, int], None] = lambda _done, _total: None,
        *,
        blocks: bool = False,
    ) -> EvalTotals:
        """This rank's part of the split, each sample once; loss and top-1 and top-5 hits. With
        `blocks` also the loss of each block of samples, by which two models can be compared.
        """
        started_s, samples = monotonic_s(), 0
        block_losses: list[Tensor] = []
        sums = torch.zeros(3, device=self.device, dtype=torch.float64)
        self.model.eval()
        batch_size = self.eval_batch_size
        split_size = self.info.test_size if split == "test" else self.info.selection_size
        total = math.ceil(split_size / (world_size * batch_size))
        for done, batch in enumerate(self.data.evaluate(split, rank, world_size, batch_size)):
            on_step(done, total)
            with self.autocast():
                output = self.model(batch.x)
                loss = self.loss(output, batch.y)
            guesses = output.topk(min(5, output.shape[1]), dim=1).indices
            hits = guesses == batch.y.unsqueeze(1)
            sums += torch.stack(
                (loss.double() * len(batch.y), hits[:, 0].sum().double(), hits.sum().double())
            )
            samples += len(batch.y)
            if blocks:
                parts = zip(torch.split(output, BLOCK), torch.split(batch.y, BLOCK), strict=True)
                block_losses += [self.loss(some, labels).double() for some, labels in parts]
        loss_sum, correct, top5 = sums.tolist()
        by_block = torch.stack(block_losses).tolist() if block_losses else []
        seconds = monotonic_s() - started_s
        return EvalTotals(samples, loss_sum, int(correct), int(top5), seconds, tuple(by_block))

    def settle_statistics(self) -> None:
        """After a phase that was trained together: one set of BatchNorm statistics for all, that
        of the phase, or taken anew from the first batches of its epoch (`train.batchnorm`).
        """
        at, wanted = self._phase, self.job.batch_norm.recalibrate_batches
        if not wanted:
            size = self._global_batch_size(at.epoch) // at.shares.count
            pool_statistics(self.model, size, self._positions, at.seen)
            return
        self._seed(f"{self.job.seed} {at.epoch} recalibrate {at.shares.mine.start}")
        steps = self.info.steps_per_epoch(self._global_batch_size(at.epoch))
        batches = islice(self._batches(range(steps)), wanted)
        with self.autocast():
            recalibrate(self.model, (batch.x for batch in batches), self._positions)

    def _batches(self, steps: range) -> Iterator[Batch]:
        """This process's shares of these steps of the present phase's epoch."""
        at = self._phase
        size = self._global_batch_size(at.epoch)
        return self.data.train(at.epoch, steps, at.shares.mine, at.shares.count, size)

    def _global_batch_size(self, epoch: int) -> int:
        return self.job.global_batch_size * ramp_factor(self.job.batch_ramp, epoch)

    def _ramped(self, epoch: int, shares: Shares) -> Shares:
        """A larger batch in more shares, or in as many larger ones."""
        if self.job.ramp_by == "worker":
            return shares
        return shares.cut(ramp_factor(self.job.batch_ramp, epoch))

    @staticmethod
    def _seed(text: str) -> None:
        """The same random numbers in every process for the same text (unlike `hash`)."""
        digest = blake2b(text.encode(), digest_size=8).digest()
        torch.manual_seed(int.from_bytes(digest, "big") >> 1)

    def wait_for_device(self) -> None:
        """Until what was asked of it is done; for measuring."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def release_memory(self) -> None:
        """Give cached device memory back while the other pool computes on the same GPU."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        """End the loader processes."""
        self.data.close()

    def autocast(self) -> torch.autocast:
        """The job's precision, for a forward pass."""
        dtype = _AMP_DTYPE.get(self.job.precision)
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)

    @property
    def eval_batch_size(self) -> int:
        """Of one forward pass without gradients."""
        given = self.job.evaluate.batch_size_per_worker
        return given or max(self.job.batch_size_per_worker, 256)


def _build(job: Job, info: DataInfo, device: torch.device) -> tuple[nn.Module, dict[str, float]]:
    """The model, and the positions in its BatchNorm layers (see `count_positions`)."""
    model = build_model(
        job.model,
        num_classes=info.num_classes,
        sample_shape=info.sample_shape,
        seed=job.seed,
    ).to(device)
    if job.channels_last and len(info.sample_shape) == 3:
        model = model.to(memory_format=torch.channels_last)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    model = prepare(model, job.batch_norm, world_size=world_size)
    with count_positions(model) as positions:
        check_output(model, info.sample_shape, info.num_classes, device)
    if job.compile:
        model.compile()
    return model, positions


def reduce_sums(values: Sequence[float], device: torch.device) -> list[float]:
    """Each value summed over the process group (float64); unchanged without a group."""
    if not dist.is_initialized():
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    return [float(value) for value in tensor.tolist()]
