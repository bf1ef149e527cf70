"""Find optimizer and learning rate for a training loop outside this package, in this process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sized
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, default_collate

from raytrain_opt.config.schema import Job
from raytrain_opt.config.updates import OptimizerChoiceSection
from raytrain_opt.errors import JobError, Problem
from raytrain_opt.execution.check import check_job, try_job
from raytrain_opt.execution.resolve import Placement, Resolved, resolve
from raytrain_opt.optim.factory import build_optimizer
from raytrain_opt.optim.update import set_lr
from raytrain_opt.pools.in_process import in_process_pools, open_learner
from raytrain_opt.pools.interface import fetch_initial_state
from raytrain_opt.pools.rounds import CandidateTraining
from raytrain_opt.search.policy import EpochLosses, History, TrainEpoch, TryCandidates
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.task import loss_of_each


@dataclass(frozen=True)
class CandidateRate:
    """A point of the curve: the loss on the validation split after a short schedule."""

    optimizer: str
    lr: float  # the peak
    updates: int
    loss: float  # NaN if the training diverged


@dataclass(frozen=True)
class OptimizerChoice:
    """The chosen optimizer of the caller's model, and the search that chose it."""

    name: str
    lr: float  # the peak
    lrs: tuple[float, ...] = field(repr=False)  # of each update of the training
    reason: str
    curve: tuple[CandidateRate, ...] = field(repr=False)
    optimizer: Optimizer = field(repr=False)
    scheduler: LambdaLR = field(repr=False)  # call step() after each update


def find_optimizer(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor] | Any,
    loader: DataLoader[Any],
    *,
    epochs: int,
    max_search_cost: float | str = "auto",
    seed: int = 0,
) -> OptimizerChoice:
    """Search optimizer and learning rate of a training of `epochs` epochs, without training.

    Copies of the model train for a few updates on nine tenths of the loader's Dataset and are
    compared on the rest, as the policy stpt_horizon does. The model itself is unchanged.

    Args:
        model: on the device to train on.
        loss: a function of (output, y) that returns the mean over a batch (x, y), or a task, for
            any other batch: an object with `training_loss` and `validation_metrics`.
        loader: its Dataset is map-style; with the batch size to train with.
        epochs: of the training; the schedule has its length.
        max_search_cost: updates of the search, as a fraction of the training's.
        seed: of the order of samples, and of the validation split.

    Raises:
        JobError, DataError: the loader or the loss cannot be used.
    """
    job = _job(model, loss, loader, epochs, max_search_cost, seed)
    if problems := check_job(job):
        raise JobError(problems, "find_optimizer")
    facts, shared, _ = try_job(job, "find_optimizer")
    placement = Placement.from_job(job)
    free = resolve(job, facts, placement, job.global_batch_size).learner.optimizers
    # Averaging optimizers need calls in the loop, and a decay of "auto" the run's policy.
    candidates = [s.without_auto_weight_decay() for s in free if not s.is_schedule_free]
    section = OptimizerChoiceSection(name="auto", candidates=candidates)
    job = job.model_copy(update={"optimizer": section})
    resolved = resolve(job, facts, placement, job.global_batch_size)
    with open_learner(resolved.learner, job.workers, shared) as learner:
        history = _search(learner, resolved)
    return _choice(model, resolved, history)


def _search(learner: Learner, resolved: Resolved) -> History:
    pools = in_process_pools(learner, with_slots=False, candidate_batch=None)
    training = CandidateTraining(pools.workers, together=True)
    state, history = fetch_initial_state(pools.workers), History()
    while isinstance(action := resolved.policy.next(1, history), TryCandidates):
        results = training.train_round(state, action)
        history = history.after_round(resolved.policy.decide(action, results, history))
    return history


def _choice(model: nn.Module, resolved: Resolved, history: History) -> OptimizerChoice:
    sections, batch_size = resolved.learner.optimizers, resolved.job.global_batch_size
    curve = tuple(
        CandidateRate(
            str(sections[result.candidate.optimizer].name),
            result.candidate.lr,
            result.samples // batch_size,
            result.val_loss,
        )
        for decision in history.decisions
        for result in decision.tried
    )
    decision, lrs, actions = history.latest, list[float](), list[TrainEpoch]()
    for epoch in range(1, resolved.length.known_epochs + 1):
        action = resolved.policy.next(epoch, history)
        assert isinstance(action, TrainEpoch)  # nothing collapses here
        actions.append(action)
        lrs += action.steps.lrs
        history = history.after_epoch(EpochLosses(0.0))
    section, peak = sections[actions[0].steps.optimizer], max(lrs)
    optimizer = build_optimizer(section, model, steps_per_epoch=resolved.steps.first)
    set_lr(optimizer, peak)
    factors = [lr / peak for lr in lrs] + [0.0]  # after the last update
    scheduler = LambdaLR(optimizer, lambda step: factors[min(step, len(lrs))])
    reason = (decision or actions[0]).reason
    return OptimizerChoice(
        str(section.name), peak, tuple(lrs), reason, curve, optimizer, scheduler
    )


def _job(
    model: nn.Module,
    loss: Any,
    loader: DataLoader[Any],
    epochs: int,
    max_search_cost: float | str,
    seed: int,
) -> Job:
    """Return the training as a job. Raises JobError for a loader without batches of one size."""
    collate = loader.collate_fn
    if loader.batch_size is None:
        rule = "must have a batch_size, and no batch sampler of your own"
        raise JobError([Problem("loader", rule)], "find_optimizer")
    sampler: Any = loader.sampler
    dataset = loader.dataset
    is_usual = isinstance(sampler, RandomSampler | SequentialSampler)
    if isinstance(dataset, Sized) and not (is_usual and len(sampler) == len(dataset)):
        rule = f"has a {type(sampler).__name__}, but the search draws each sample once per epoch"
        hint = "give a loader with shuffle=True, of a Subset to leave samples out"
        raise JobError([Problem("loader", rule, None, hint)], "find_optimizer")
    on_gpu = next(model.parameters()).device.type != "cpu"
    values = {
        "model": copy.deepcopy(model).cpu(),
        "data": {
            "name": (loader.dataset, loader.dataset),
            "loader_workers": loader.num_workers,
            "drop_last": loader.drop_last,
            # In a function, as it may be an object.
            "collate": None if collate is default_collate else lambda samples: collate(samples),
        },
        "task": loss if hasattr(loss, "training_loss") else LossTask(loss),
        "epochs": epochs,
        "global_batch_size": loader.batch_size,
        "learning_rate": {"policy": "stpt_horizon", "max_search_cost": max_search_cost},
        "workers": {"use_gpu": on_gpu, "threads": torch.get_num_threads()},
        "seed": seed,
    }
    return Job.model_validate(values)


class LossTask:
    """The task of a loss function of (output, y), over batches (x, y)."""

    def __init__(self, loss: Callable[[Any, Any], Tensor]) -> None:
        of_each = loss_of_each(loss)
        self.loss, self._of_samples = loss, loss if of_each is None else of_each
        self.gives_batch_means = of_each is None

    def training_loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return self.loss(model(x), y)

    def validation_metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Return the loss of each sample, or the batch's mean where the loss has no other."""
        x, y = batch
        losses = self._of_samples(model(x), y)
        return {"loss": losses.flatten(1).mean(1) if losses.dim() > 1 else losses.expand(len(y))}
