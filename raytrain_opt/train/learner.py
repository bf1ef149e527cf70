"""What one process does in training: train some steps, evaluate, load and capture a state.

Each worker or slot builds one `Learner`, which lives as long as the run. Its training loop never
waits for the device: the sums of losses and metrics stay there until somebody asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn

from raytrain_opt.clock import monotonic_s
from raytrain_opt.config.updates import ParallelSection
from raytrain_opt.data import TrainingData, open_data
from raytrain_opt.data.base import Batch, DataInfo, no_op
from raytrain_opt.data.factory import SharedData
from raytrain_opt.errors import DataError
from raytrain_opt.optim import averaging
from raytrain_opt.optim.epoch_steps import ramp_factor
from raytrain_opt.optim.factory import build_optimizer
from raytrain_opt.optim.update import get_weight_decays, set_lr, set_weight_decays, update_weights
from raytrain_opt.random_state import derive_seed, find_generators, seed_all, seeded
from raytrain_opt.results import NO_STEPS, EvalTotals, Split, Steps, TrainTotals
from raytrain_opt.train import batch_norm
from raytrain_opt.train.data_parallel import Parallel
from raytrain_opt.train.evaluation import add_ranks, evaluate
from raytrain_opt.train.kernels import autocast_dtype, choose_kernels, compile_model, eager
from raytrain_opt.train.learner_config import LearnerConfig
from raytrain_opt.train.micro_batches import MicroBatches
from raytrain_opt.train.phase import Phase, describe, failed_steps
from raytrain_opt.train.rank_check import compare_ranks
from raytrain_opt.train.state import TrainingState, capture, restore
from raytrain_opt.train.task import build_task, find_metric_names

# Enough to score candidates in trials; statistics that belong to other weights cost 10 to 50
# points of accuracy in the AlgoPerf benchmark.
_STATISTICS_BATCHES = 10

# Called before each step with the number of steps since the phase began, or its totals were taken.
OnStep = Callable[[int], object]


class Learner:
    """Model, optimizer, task and data of one process.

    `distribute` wraps the model for data parallelism; states have the names of the bare model.
    """

    def __init__(
        self,
        config: LearnerConfig,
        shared: SharedData,
        device: torch.device,
        distribute: Callable[[nn.Module, ParallelSection], Parallel] = Parallel,
    ) -> None:
        self.config, self.device = config, device
        choose_kernels(config.precision, device)
        self._autocast_dtype = autocast_dtype(config.precision, device)
        self.data: TrainingData = open_data(
            config.data,
            shared,
            hold_out=config.hold_out,
            seed=config.seed,
            device=device,
            channels_last=config.channels_last,
            classification=config.task.is_classification,
        )
        of_driver = config.data_digest if shared is None else ""
        if of_driver and of_driver != self.data.source.digest():
            rule = f"{config.data.name} returns other samples in this process than in the driver; "
            rule += "it must return the same each time: give its random generators a fixed seed"
            raise DataError("data.name", rule)
        with seeded(derive_seed(config.seed, "task"), device):
            self.task = build_task(config.task, config.loss, self.info, device)
        self.model = config.build_model(self.info).to(device)
        batch_norm.set_momentum(self.model, config.batch_norm.momentum)
        batch_norm.freeze_statistics(self.model, config.model.freeze)
        samples = self.data.first_samples("train")
        with self.autocast():
            self.metric_names = find_metric_names(self.task, self.model, samples)
        self.compiled = compile_model(config.compile, self.model, device)
        self.parallel = distribute(self.model, config.parallel)
        self._build_optimizer(0)
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
        self._batches: Iterator[Batch]
        self._begin_phase(1, MicroBatches.all(1))

    @property
    def info(self) -> DataInfo:
        return self.data.info

    def state(self, *, copy: bool) -> TrainingState:
        index = self._optimizer_index
        return capture(self.model, self.optimizer, self.scaler, copy=copy, optimizer_index=index)

    def load(self, state: TrainingState) -> None:
        self._use_optimizer(state.optimizer_index)
        restore(state, self.model, self.optimizer, self.scaler)

    def _use_optimizer(self, index: int) -> None:
        if index != self._optimizer_index:
            averaging.use_weights(self.optimizer, training=True)
            self._build_optimizer(index)

    def _build_optimizer(self, index: int) -> None:
        self._optimizer_index = index
        with seeded(derive_seed(self.config.seed, f"optimizer {index}"), self.device):
            self.optimizer = build_optimizer(
                self.config.optimizers[index],
                self.model,
                steps_per_epoch=self.info.steps_per_epoch(self.config.global_batch_size),
                distributed=self.parallel.distributed,
            )
        average = self.config.average
        if average is not None and not averaging.averages_weights(self.optimizer):
            averaging.attach_ema(self.optimizer, average)
        self.clip_norm = self.config.optimizers[index].clip_norm
        self._weight_decays = get_weight_decays(self.optimizer)

    def train(
        self,
        epoch: int,
        steps: Steps,
        micro_batches: MicroBatches,
        on_step: OnStep = lambda _: None,
        *,
        search: bool = False,
    ) -> TrainTotals:
        self.begin(epoch, steps, micro_batches, search=search)
        self.advance(len(steps.lrs), on_step)
        return self.end()

    def begin(
        self, epoch: int, steps: Steps, micro_batches: MicroBatches, *, search: bool = False
    ) -> None:
        """Begin a phase: `advance` trains its steps, in any number of parts, `end` ends it.

        All workers of a process group compute the micro-batches of a step together: the same
        arguments from the same state give the same bits for any number of workers and parts. In a
        `search` the validation split is held out.
        """
        self._use_optimizer(steps.optimizer)
        grown = micro_batches.refined(ramp_factor(self.config.batch_ramp, epoch))
        self._begin_phase(epoch, grown, search=search, held_out=steps.held_out)
        decays = [steps.weight_decay_factor * decay for decay in self._weight_decays]
        set_weight_decays(self.optimizer, decays)
        self._use_training_mode()
        self.parallel.begin_phase(grown)
        self._steps = steps
        indices = product(range(steps.first, steps.end), self.parallel.indices)
        self._batches = self.micro_batches_at(indices)

    def advance(self, until: int, on_step: OnStep = lambda _: None) -> None:
        """Train the phase's steps before `until`, counted as `on_step` counts them."""
        self._use_training_mode()
        phase, steps = self._phase, self._steps
        for update in range(phase.steps, until):
            on_step(update)
            set_lr(self.optimizer, steps.lrs[update])
            self._train_step(steps.first + update, self._batches)

    def take_totals(self) -> TrainTotals:
        """Return the totals of the phase since they were last taken.

        With averaging, the model has the averaged weights until the phase advances. Raises
        JobError if ranks differ.
        """
        totals = self._take_totals()
        self._compare_ranks()
        return totals

    def _take_totals(self) -> TrainTotals:
        averaging.use_weights(self.optimizer, training=False)
        totals = self._phase.take_totals()
        self._steps = self._steps.after(totals.steps)
        return totals

    def end(self) -> TrainTotals:
        """End the phase; return as `take_totals`. `finish_phase` takes the statistics then."""
        totals = self._take_totals()
        self.parallel.end_phase()
        self._batches = iter(())
        return totals

    def _use_training_mode(self) -> None:
        averaging.use_weights(self.optimizer, training=True)
        self.parallel.forward.train()

    def _train_step(self, step: int, batches: Iterator[Batch]) -> None:
        phase, parallel = self._phase, self.parallel
        self.optimizer.zero_grad(set_to_none=True)
        count = phase.micro_batches.count
        phase.losses.append(torch.zeros(count, device=self.device, dtype=torch.float64))
        for index in parallel.indices:
            requested_s = monotonic_s()
            batch = next(batches)
            phase.data_wait_s += monotonic_s() - requested_s
            self.seed(f"{phase.epoch} {step} {index}")
            with parallel.accumulate(index), self.attempt(parallel.finish_backward):
                phase.losses[-1][index] = self._accumulate(batch, parallel.divisor)
            phase.samples += batch.size
            phase.skipped += batch.skipped
        parallel.end_backward()
        self.seed(f"{phase.epoch} {step} update")  # alike on all ranks
        with self.attempt():
            update_weights(self.optimizer, self.scaler, self.clip_norm)
        phase.steps += 1
        parallel.after_step()

    def attempt(self, repair: Callable[[], None] = no_op) -> AbstractContextManager[None]:
        """Return a context for a pass or an update that may raise, see `failed_steps`."""
        return failed_steps(self._phase, self.model, repair)

    def seed(self, use: str) -> None:
        """Seed the random numbers of one use, which the text names."""
        seed_all(derive_seed(self.config.seed, use), self.device, self._generators)

    @property
    def position(self) -> str:
        return f"after {self._steps.first + self._phase.steps} steps of epoch {self._phase.epoch}"

    @property
    def failure(self) -> Exception | None:
        return self._phase.failure

    def begin_micro_batches(self, epoch: int, count: int, held_out: int = 0) -> None:
        """Begin a phase of single micro-batches (`add_gradient`); `count` of them make a step."""
        self._begin_phase(epoch, MicroBatches.all(count), held_out=held_out)
        self.model.train()

    def micro_batches_at(self, indices: Iterable[tuple[int, int]]) -> Iterator[Batch]:
        """Yield the batches at these (step, micro-batch) indices of the current phase's epoch."""
        epoch, count = self._phase.epoch, self._phase.micro_batches.count
        size, search = self._global_batch_size(epoch), self._phase.search
        return self.data.train_batches(
            epoch, indices, count, size, search=search, held_out=self._phase.held_out
        )

    def add_gradient(self, batch: Batch, index: tuple[int, int]) -> float:
        """Add the gradient of one micro-batch's mean loss; return the sum of the losses.

        Random numbers depend on `index`, (step, micro-batch), only.
        """
        step, micro_batch = index
        self.seed(f"{self._phase.epoch} {step} {micro_batch}")
        return self._accumulate(batch, 1.0).item()

    def _begin_phase(
        self, epoch: int, micro_batches: MicroBatches, *, search: bool = False, held_out: int = 0
    ) -> None:
        self._phase, self._steps = Phase(epoch, micro_batches, search, held_out), NO_STEPS
        self._batches = iter(())
        # Those of the user's objects, which may create some at any time.
        self._generators = find_generators(self.task, self.model, self.optimizer)

    def _accumulate(self, batch: Batch, divisor: float) -> Tensor:
        """Add the gradient of one micro-batch's mean loss / `divisor`; return the losses' sum."""
        with self.autocast():
            loss = self.task.training_loss(self.parallel.forward, batch.content)
        # An unreadable sample has no gradient; the others must not weigh more for it.
        divisor *= (1 + batch.skipped / batch.size) / batch.relative_size
        scaled = loss if divisor == 1 else loss / divisor
        self.scaler.scale(scaled).backward()  # type: ignore[no-untyped-call]
        return loss.detach().double() * batch.size

    def evaluate(
        self,
        split: Split,
        rank: int = 0,
        world_size: int = 1,
        on_step: Callable[[int, int], object] = lambda _done, _total: None,
    ) -> EvalTotals:
        """Evaluate this rank's samples of the split, each sample once over all ranks.

        `on_step` is called before each batch with the numbers of completed and of all batches.
        """
        totals = evaluate(self, split, rank, world_size, on_step)
        return replace(totals, failure=describe(self._phase.failure))

    def add_ranks(self, part: EvalTotals) -> EvalTotals:
        """Return the totals of all ranks for this one's; all ranks call this. See `evaluation`."""
        return add_ranks(self.task, part, self.device)

    def finish_phase(self, *, fresh: bool = False) -> None:
        """Let BatchNorm's running averages belong to the weights. Raises JobError if ranks differ.

        They are those of the training or, with `batch_norm.recalibrate_batches`, averaged weights
        or `fresh`, recomputed from the epoch's first batches (`train.batch_norm`).
        """
        count = self.config.batch_norm.recalibrate_batches
        if fresh or averaging.averages_weights(self.optimizer):
            count = count or _STATISTICS_BATCHES
        if count and batch_norm.layers_with_statistics(self.model):
            self._recalibrate(count)
        self._compare_ranks()

    def _compare_ranks(self) -> None:
        failed = self._phase.failure is not None
        if self.parallel.distributed:
            compare_ranks(self.model, self.optimizer, self._phase.epoch, failed=failed)

    def _recalibrate(self, count: int) -> None:
        epoch, parallel = self._phase.epoch, self.parallel
        steps = range(min(count, self.info.train_size // self._global_batch_size(epoch)))
        batches = self.micro_batches_at(product(steps, parallel.indices))

        def forward(step: int) -> None:
            for index in parallel.indices:
                batch = next(batches)
                self.seed(f"{epoch} recalibrate {step} {index}")
                with parallel.forward_pass(index), self.attempt():
                    self.task.training_loss(self.model, batch.content)
            parallel.end_forward()

        # With the momenta of cumulative averages the model would be compiled again.
        with self.autocast(), eager(self.model):
            batch_norm.recalibrate(self.model, [partial(forward, step) for step in steps])

    def _global_batch_size(self, epoch: int) -> int:
        return self.config.global_batch_size * ramp_factor(self.config.batch_ramp, epoch)

    def release_memory(self) -> None:
        """Free cached device memory for the other pool, which uses the same GPU."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        self.data.close()

    def autocast(self) -> torch.autocast:
        """Return a context that runs a forward pass in the configured precision."""
        dtype = self._autocast_dtype
        return torch.autocast(self.device.type, dtype, enabled=dtype is not None)
