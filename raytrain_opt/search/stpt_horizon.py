"""Horizon-aware STPT: find the peak of a full schedule, then train with it.

A rate that looks best after a few steps is too small: right after it drops, the loss falls
because the noise does (Wu et al., ICLR 2018). So candidates are compared at the end of full
schedules, compressed into few steps:

    before epoch 1   search the peak (see `peak_search`), of several optimizers where the job names
                     none (`optimizer_race`). None of these steps are kept.
    then             train with this peak: warm-up and decay to zero over all epochs; again with a
                     lower one where the training collapsed (see `collapse`). Where the weight
                     decay follows the training, the first half holds the validation split
                     out (see `weight_decay`); otherwise, and then, it trains on all samples.

Source of pre-training candidates from one state: Yamada et al. (Kobe University), STPT.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from raytrain_opt.config.learning_rate import FINE_TUNING_LR, HorizonPolicy
from raytrain_opt.config.updates import OptimizerSection
from raytrain_opt.optim.epoch_steps import EpochSpan, EpochSteps, Length
from raytrain_opt.optim.schedules import RelativeSchedule
from raytrain_opt.search.collapse import Attempt, last_restart, latest_attempt
from raytrain_opt.search.optimizer_race import OptimizerRace, all_diverged
from raytrain_opt.search.peak_search import (
    FEWEST_STEPS,
    CandidateSteps,
    PeakRequest,
    PeakSearch,
    point_to_lr,
)
from raytrain_opt.search.policy import (
    NOT_DECIDED,
    Candidate,
    CandidateResult,
    Decision,
    History,
    Policy,
    StartAgain,
    TrainEpoch,
    TryCandidates,
    is_finite,
)
from raytrain_opt.search.weight_decay import Watch, decay_by_fit

# Of several optimizers, each starts at its usual rate times initial / this, SGD's usual rate.
_SGD_LR = 0.1

# The peak of networks that do not normalize channels, relative to what short schedules prefer: a
# full training stays near its peak for many more updates. At 1 instead, seven tasks of MLPs, VGGs
# and ViTs lose 2.2 points in the mean. Weights in front of BatchNorm or GroupNorm have no scale of
# their own: a smaller peak gains nothing there (benchmarks/RESULTS.md).
_WITHOUT_CHANNEL_NORM = 0.5

# The cost of a search with max_search_cost: auto, unless the training is a small one. With so many
# updates the search decides as full trainings do (benchmarks/RESULTS.md), and in so many
# operations they take minutes of some cores, a second of a GPU.
_USUAL_COST, _DECISIVE_STEPS, _SMALL_SEARCH_FLOPS = 0.2, 300, 1e14


@dataclass(frozen=True)
class HorizonStpt(Policy):
    """The policy, configured by a section of the job file."""

    section: HorizonPolicy
    length: Length
    steps: EpochSteps
    optimizers: tuple[OptimizerSection, ...]
    channel_norm: bool = True  # the network has BatchNorm, GroupNorm or InstanceNorm
    validation_size: int = 0  # samples of the validation split
    step_flops: float = math.inf  # operations of an update
    guessing_loss: float = math.inf  # see `optimizer_race`

    def schedule(self, optimizer: int) -> RelativeSchedule:
        """Return the schedule of the full training, relative to the peak."""
        section, warmup = self.optimizers[optimizer], self.section.warmup_fraction
        shape = "constant" if section.is_schedule_free else self.section.shape
        return RelativeSchedule(shape, section.traits.usual_warmup if warmup is None else warmup)

    def span(self, epoch: int, history: History, start: int = 0) -> EpochSpan:
        """Return the part that this epoch covers of the training after the first `start` ones."""
        return self.length.span(epoch, self.steps, history.plans, start)

    def _attempt(self, history: History) -> Attempt:
        return latest_attempt(history, self.length.known_epochs)

    @property
    def search_updates(self) -> float:
        if self.length.includes_search or not self.race(History()).is_possible:
            return 0
        return self._budget(History())

    @property
    def last_restart(self) -> int:
        return last_restart(self.length.known_epochs)

    def race(self, history: History) -> OptimizerRace:
        """Return the search before epoch 1: of the first optimizer only, if too short for all."""
        budget = self._budget(history)
        race = self._race(self.optimizers, budget)
        return race if race.is_possible else self._race(self.optimizers[:1], budget)

    def _budget(self, history: History) -> float:
        """Return the updates of all candidates; auto lets the search of a small training decide.

        The search of a training for a time is a part of it.
        """
        cost, steps = self.section.max_search_cost, self._updates(history)
        fraction = _USUAL_COST if cost == "auto" else cost
        if self.length.includes_search:
            return steps * fraction / (1 + fraction)
        if cost != "auto":
            return fraction * steps
        is_small = _DECISIVE_STEPS * self.step_flops <= _SMALL_SEARCH_FLOPS
        return max(fraction * steps, min(_DECISIVE_STEPS, steps) if is_small else 0)

    def _cost(self, history: History, budget: float) -> str:
        """Say what the search may cost."""
        part = budget / self._updates(history)
        return f"a search of at most {budget:.0f} updates, {100 * part:.0f} % of the training"

    def _updates(self, history: History) -> int:
        """Return the updates of the training, as planned at first."""
        return self.length.planned_steps(self.steps, history.plans)

    def _race(self, optimizers: Sequence[OptimizerSection], budget: float) -> OptimizerRace:
        steps = CandidateSteps.within(
            budget,
            horizon=self.section.horizon,
            epoch_steps=self.steps.search,
            optimizers=len(optimizers),
        )
        searches = (
            PeakSearch(
                self._initial(i), steps, budget, optimizer.traits.usual_lr, self._peak_factor
            )
            for i, optimizer in enumerate(optimizers)
        )
        names = (str(optimizer.name) for optimizer in optimizers)
        return OptimizerRace(tuple(names), tuple(searches), budget, self.guessing_loss)

    @property
    def _peak_factor(self) -> float:
        return 1.0 if self.channel_norm else _WITHOUT_CHANNEL_NORM

    def _initial(self, optimizer: int) -> float:
        """Return the rate at which the search starts, and which trains if it cannot decide.

        The job's is that of SGD among several; so is the default.
        """
        initial = self.section.initial
        if len(self.optimizers) == 1 and initial not in (_SGD_LR, FINE_TUNING_LR):
            return initial
        usual_lr = self.optimizers[optimizer].traits.usual_lr or _SGD_LR
        return initial * usual_lr / _SGD_LR

    def next(self, epoch: int, history: History) -> TryCandidates | StartAgain | TrainEpoch:
        """Return a round before epoch 1, an epoch, or a new start where the training collapsed.

        Raises DivergedError when all candidates diverged.
        """
        if epoch > 1 or history.is_decided(1) or not self.race(history).is_possible:
            return self._train(epoch, history)
        optimizer, following = self.race(history).next(history.decisions)
        assert isinstance(following, PeakRequest)
        return self._try_peaks(optimizer, following, history)

    def decide(
        self, action: TryCandidates, results: Sequence[CandidateResult], history: History
    ) -> Decision:
        """Decide on the peak: the weighted mean of all rates that reduce the loss."""
        scores = tuple(map(action.score_of, results))
        undecided = Decision(
            action.epoch,
            action.base_lr,
            scores,
            winner=None,
            next_base_lr=action.base_lr,
            reason="",
            stage=action.stage,
            steps=action.pretrain_steps,
            tried=tuple(results),
        )
        rounds, race = (*history.decisions, undecided), self.race(history)
        if all_diverged(rounds):
            return replace(undecided, reason=f"all {len(undecided.scores)} candidates diverged")
        optimizer, following = race.next(rounds)
        name = f"{self.optimizers[optimizer].name}, " if len(self.optimizers) > 1 else ""
        if isinstance(following, PeakRequest):
            reason = f"next {name}{following.stage}: {following.reason}"
            if not history.decisions:
                reason = f"{self._cost(history, race.budget_steps)}; {reason}"
            return replace(undecided, reason=reason)
        how = "" if following.is_decided else NOT_DECIDED
        reason = f"{how}{name}peak {following.lr:.3g}: {following.reason}"
        return replace(
            undecided,
            winner=following.result,
            next_base_lr=following.lr,
            next_optimizer=optimizer,
            reason=reason,
            tried=(),
        )

    def _try_peaks(self, optimizer: int, request: PeakRequest, history: History) -> TryCandidates:
        base_lr = self._initial(optimizer)
        first = sum(len(decision.scores) for decision in history.decisions)
        is_auto = self.optimizers[optimizer].has_auto_weight_decay
        weight_decay_factor = 0.0 if is_auto else 1.0
        candidates = tuple(
            # Numbered through the epoch: a winner may come from an earlier round.
            Candidate(first + index, lr / base_lr, lr, weight_decay_factor, optimizer)
            for index, lr in enumerate(map(point_to_lr, request.points))
        )
        name = f"{self.optimizers[optimizer].name}, " if len(self.optimizers) > 1 else ""
        return TryCandidates(
            1,
            base_lr,
            f"{name}{request.stage}: {request.reason}",
            candidates,
            self.schedule(optimizer).compressed(request.steps),
            stage=request.stage,
            fresh_statistics=True,
        )

    def _train(self, epoch: int, history: History) -> StartAgain | TrainEpoch:
        attempt = self._attempt(history)
        span, own = self.span(epoch, history, attempt.start), attempt.own(history)
        found = history.latest
        optimizer = found.next_optimizer if found else 0
        start = self._initial(optimizer)
        peak = (found.next_base_lr if found else start) * attempt.lr_factor
        schedule = self.schedule(optimizer)
        how = "constant rate" if schedule.shape == "constant" else f"{schedule.shape} decay from"
        reason = f"{how} {peak:.3g}"
        if not found:
            reason += ": too few steps for a search"
            cost = math.ceil(100 * FEWEST_STEPS / span.total_steps) / 100
            if cost <= 1 and self._race(self.optimizers[:1], FEWEST_STEPS).is_possible:
                reason += f" within learning_rate.max_search_cost; {cost:g} allows one"
        if attempt.number > len(history.restarts):
            loss = history.epoch_losses[-1]
            why = f"the training loss is {loss:.3g}"
            if not is_finite(loss):
                why = "the loss or a weight is not finite"
            again = "training starts again from the initial weights"
            return StartAgain(epoch, f"{why}: {again}, {reason}")
        lrs = tuple(peak * part for part in schedule.of_epoch(span))
        steps = replace(self.steps.last(epoch, lrs), optimizer=optimizer)
        action = TrainEpoch(epoch, steps, reason)
        if not self.optimizers[optimizer].has_auto_weight_decay:
            return action
        sum_of_lrs = peak * schedule.mean * span.total_steps
        size = span.total_steps / self.steps.first
        decay = decay_by_fit(own, optimizer, sum_of_lrs, size)
        watch = self._watch(attempt)
        if watch is None:
            return replace(action, steps=replace(steps, weight_decay_factor=decay))
        watched = decay_by_fit(own, optimizer, sum_of_lrs, size, watch)
        trained = epoch - attempt.start
        reports_overfitting = trained == watch.end + 1 and watched > decay
        held_out = self.validation_size if trained <= watch.end else 0
        return replace(
            action,
            steps=replace(steps, weight_decay_factor=watched, held_out=held_out),
            scores=trained in (watch.start, watch.end),
            overfitting=watch.finding(own) if reports_overfitting else "",
        )

    def _watch(self, attempt: Attempt) -> Watch | None:
        if not self.validation_size:
            return None
        epochs = self.length.known_epochs - attempt.start
        return Watch.of(epochs, channel_norm=self.channel_norm)
