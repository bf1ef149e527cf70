"""Horizon-aware STPT: find the peak of a full schedule, then train with it.

A rate that looks best after a few steps is too small (Wu et al., ICLR 2018). So candidates are
compared at the end of full schedules, compressed into few steps (docs/learning-rate.md):

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
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from raytrain_opt.config.learning_rate import SGD_LR, HorizonPolicy
from raytrain_opt.config.updates import OptimizerSection
from raytrain_opt.errors import DivergedError
from raytrain_opt.optim.epoch_steps import EpochSpan, EpochSteps, Length
from raytrain_opt.optim.schedules import RelativeSchedule
from raytrain_opt.search.collapse import Attempt, last_restart, latest_attempt
from raytrain_opt.search.optimizer_race import OptimizerRace
from raytrain_opt.search.peak_search import (
    Budget,
    PeakChoice,
    PeakRequest,
    PeakSearch,
    divide_budget,
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
)
from raytrain_opt.search.weight_decay import MANY_EPOCHS, Watch, decay_by_fit

# The peak of networks that do not normalize channels, relative to what short schedules prefer: a
# full training stays near its peak for many more updates. At 1 instead, seven tasks of MLPs, VGGs
# and ViTs lose 2.2 points in the mean. Weights in front of BatchNorm or GroupNorm have no scale of
# their own: a smaller peak gains nothing there (benchmarks/RESULTS.md).
_WITHOUT_CHANNEL_NORM = 0.5

# Up to this many updates such a network trains at the usual rate, and at one that falls with the
# root of their number beyond (Zinkevich, ICML 2003).
_USUAL_UPDATES = 100

# The cost of a search with max_search_cost: auto, unless the training is a small one. With so many
# updates the search decides as full trainings do (benchmarks/RESULTS.md), and in so many
# operations they take minutes of some cores, a second of a GPU.
_USUAL_COST, _DECISIVE_STEPS, _SMALL_SEARCH_FLOPS = 0.2, 300, 1e14
# Lengths of the candidates, after which a training has to be better than a guess.
_LENGTHS = 2
# The updates of the search that follows one whose result is not clear, in a small training (in one
# of 2,400 updates it gains nothing), and how many times as long its candidates have to be.
_LONG_SEARCH, _LONGER = 1000, 1.5


@dataclass(frozen=True)
class TaskFacts:
    """What a search needs to know of data and network."""

    channel_norm: bool = True  # the network has BatchNorm, GroupNorm or InstanceNorm
    validation_size: int = 0
    step_flops: float = math.inf  # operations of an update
    guessing_loss: float = math.inf  # see `optimizer_race`
    classifies: bool = True  # not a task of the user's own
    own_order: bool = False  # a sampler of the user's own
    initial_lr: float = SGD_LR  # where the search starts unless the job says


NO_FACTS = TaskFacts()


@dataclass(frozen=True)
class HorizonStpt(Policy):
    """The policy, configured by a section of the job file."""

    section: HorizonPolicy
    length: Length
    steps: EpochSteps
    optimizers: tuple[OptimizerSection, ...]
    facts: TaskFacts = NO_FACTS

    def schedule(self, optimizer: int) -> RelativeSchedule:
        """Return the schedule of the full training, relative to the peak."""
        section, warmup = self.optimizers[optimizer], self.section.warmup_fraction
        shape = "constant" if section.is_schedule_free else self.section.shape
        return RelativeSchedule(shape, section.traits.usual_warmup if warmup is None else warmup)

    @property
    def search_updates(self) -> float:
        races = self._races(History()) if self.length.known_epochs else []
        return sum(race.budget.left for race in races)

    @property
    def last_restart(self) -> int:
        return last_restart(self.length.known_epochs)

    def budgets(self, history: History) -> list[float]:
        """Return the updates that the search may take, and one that follows if it is not clear."""
        cost = self.section.max_search_cost
        updates = self.length.expected_steps(self.steps, history.spans)
        fraction = _USUAL_COST if cost == "auto" else cost
        if not self.length.known_epochs:  # the search is a part of the time
            return [updates * fraction / (1 + fraction)]
        if cost != "auto":
            return [fraction * updates]
        affordable = min(updates, _SMALL_SEARCH_FLOPS / max(self.facts.step_flops, 1.0))
        usual = max(fraction * updates, min(_DECISIVE_STEPS, affordable))
        if usual > _DECISIVE_STEPS:  # not a small training
            return [usual]
        return [usual, min(_LONG_SEARCH, affordable - usual)]

    def _races(self, history: History) -> list[OptimizerRace]:
        """Return the search before epoch 1, and a longer one for a result that is not clear."""
        races = list[OptimizerRace]()
        for budget in self.budgets(history):
            race = self._race(budget, history)
            if race is None or (races and race.steps.fine < _LONGER * races[0].steps.fine):
                break
            races.append(race)
        return races

    def _race(self, budget: float, history: History) -> OptimizerRace | None:
        """Return a search: of the first optimizer only if it is short; None if it is too short."""
        optimizers = self.optimizers
        steps = divide_budget(budget, self.steps.first, len(optimizers))
        if steps is None:
            optimizers = optimizers[:1]
            steps = divide_budget(budget, self.steps.first, 1)
        if steps is None:
            return None
        left, factor = Budget(budget), 1.0 if self.facts.channel_norm else _WITHOUT_CHANNEL_NORM
        length_factor, searches = self._length_factor(history), list[PeakSearch]()
        for i, optimizer in enumerate(optimizers):
            known, undecided = optimizer.traits.usual_lr, self._undecided(i, history)
            usual = None if known is None else known * length_factor
            searches.append(PeakSearch(i, self._start(i), steps, left, usual, undecided, factor))
        names = tuple(str(optimizer.name) for optimizer in optimizers)
        repeats = not self.facts.channel_norm and self.length.known_epochs >= MANY_EPOCHS
        calm = (i for i, o in enumerate(optimizers) if not (repeats and o.traits.second_rule))
        return OptimizerRace(names, tuple(searches), self.facts.guessing_loss, next(calm, 0))

    def _following(self, history: History) -> PeakRequest | PeakChoice | None:
        """Return what follows these rounds; None without a search. Raises DivergedError."""
        search = self._search(history)
        try:
            request = next(search)
            for decision in history.decisions:
                request = search.send(decision.tried)
            return request
        except StopIteration as end:
            choice: PeakChoice | None = end.value
            return choice

    def _search(
        self, history: History
    ) -> Generator[PeakRequest, Sequence[CandidateResult], PeakChoice | None]:
        choice: PeakChoice | None = None
        for race in self._races(history):
            try:
                latest = yield from race.run("" if choice is None else "not clear yet: ")
            except DivergedError:
                if choice is None:
                    raise
                break
            # Candidates that hardly train are longer, too, and may have learned all there is.
            if choice is None or latest.is_decided or not choice.is_decided:
                choice = latest
            if choice.is_clear:
                break
        return choice

    def _start(self, optimizer: int) -> float:
        """Return the rate at which the search starts."""
        initial = self.section.initial or self.facts.initial_lr
        if len(self.optimizers) == 1:
            return initial
        return initial * (self.optimizers[optimizer].traits.usual_lr or SGD_LR) / SGD_LR

    def _length_factor(self, history: History) -> float:
        """Return the ratio of the usual rates of this training and of a short one."""
        updates = self.length.expected_steps(self.steps, history.spans)
        shorter = 1.0 if self.facts.channel_norm else _USUAL_UPDATES / updates
        return math.sqrt(min(1.0, shorter))

    def _undecided(self, optimizer: int, history: History) -> float:
        """Return the rate that trains if the search decides nothing: the job's, or the usual."""
        factor = 1.0 if self.section.initial else self._length_factor(history)
        return self._start(optimizer) * factor

    def next(self, epoch: int, history: History) -> TryCandidates | StartAgain | TrainEpoch:
        """Return a round before epoch 1, a new start, or an epoch. Raises DivergedError."""
        request = None if epoch > 1 or history.is_decided(1) else self._following(history)
        if isinstance(request, PeakRequest):
            return self._try_peaks(request, history)
        return self._train(epoch, history)

    def decide(
        self, action: TryCandidates, results: Sequence[CandidateResult], history: History
    ) -> Decision:
        """Decide on the peak: the weighted mean of all rates that reduce the loss."""
        lr, tried = action.base_lr, tuple(results)
        undecided = Decision(action.epoch, lr, None, lr, "all candidates diverged", tried)
        try:
            following = self._following(history.after_round(undecided))
        except DivergedError:  # which `next` raises, once this round is recorded
            return undecided
        assert following is not None
        several = len(self.optimizers) > 1
        name = f"{self.optimizers[following.optimizer].name}, " if several else ""
        if isinstance(following, PeakRequest):
            reason = f"next {name}{following.stage}: {following.reason}"
            if not history.decisions:  # what the search may cost
                budget, *longer = (race.budget.left for race in self._races(history))
                updates = self.length.expected_steps(self.steps, history.spans)
                part = f"{100 * budget / updates:.0f} % of the training"
                more = "".join(f", and {n:.0f} more if the result is not clear" for n in longer)
                reason = f"a search of at most {budget:.0f} updates, {part}{more}; {reason}"
            return replace(undecided, reason=reason)
        how = "" if following.is_decided else NOT_DECIDED
        return replace(
            undecided,
            winner=following.result,
            next_base_lr=following.lr,
            next_optimizer=following.optimizer,
            untrained_loss=following.untrained_loss,
            reason=f"{how}{name}peak {following.lr:.3g}: {following.reason}",
        )

    def _try_peaks(self, request: PeakRequest, history: History) -> TryCandidates:
        optimizer = request.optimizer
        base_lr = self._start(optimizer)
        first = sum(len(decision.tried) for decision in history.decisions)
        weight_decay_factor = 0.0 if self.optimizers[optimizer].has_auto_weight_decay else 1.0
        candidates = tuple(
            # Numbered through the epoch: a winner may come from an earlier round.
            Candidate(first + index, lr / base_lr, lr, weight_decay_factor, optimizer)
            for index, lr in enumerate(map(point_to_lr, request.points))
        )
        return TryCandidates(
            1,
            base_lr,
            candidates,
            self.schedule(optimizer).compressed(request.steps),
            stage=request.stage,
            fresh_statistics=True,
        )

    def _train(self, epoch: int, history: History) -> StartAgain | TrainEpoch:
        epochs, facts = self.length.known_epochs, self.facts
        trained = (epoch - 1 - (history.restarts or (1,))[-1]) * self.steps.first
        longest = max((race.steps.fine for race in self._races(history)), default=0)
        guess = facts.guessing_loss if trained >= _LENGTHS * longest else math.inf
        attempt = latest_attempt(history, epochs, guess, may_rise=facts.own_order)
        span = self.length.span(epoch, self.steps, history.spans, attempt.start)
        found = history.latest
        optimizer = found.next_optimizer if found else 0
        peak = (found.next_base_lr if found else self._undecided(0, history)) * attempt.lr_factor
        schedule = self.schedule(optimizer)
        how = "constant rate" if schedule.shape == "constant" else f"{schedule.shape} decay from"
        reason = f"{how} {peak:.3g}"
        if not found:
            reason += ": too few steps for a search within learning_rate.max_search_cost"
        if attempt.number > len(history.restarts):
            again = "training starts again from the initial weights"
            return StartAgain(epoch, f"{attempt.why}: {again}, {reason}")
        lrs = tuple(peak * part for part in schedule.of_epoch(span))
        steps = replace(self.steps.last(epoch, lrs), optimizer=optimizer)
        action = TrainEpoch(epoch, steps, reason)
        if self.optimizers[optimizer].has_auto_weight_decay:
            return self._with_decay(action, attempt, history, span, peak * schedule.mean)
        return action

    def _with_decay(
        self,
        action: TrainEpoch,
        attempt: Attempt,
        history: History,
        span: EpochSpan,
        mean_lr: float,
    ) -> TrainEpoch:
        """Return an epoch with the weight decay that follows the fit."""
        own, trained = attempt.own(history), action.epoch - attempt.start
        split = self.facts.validation_size
        epochs = self.length.known_epochs - attempt.start if split else 0
        watch = Watch.of(epochs, channel_norm=self.facts.channel_norm)
        sum_of_lrs, size = mean_lr * span.total_steps, span.total_steps / self.steps.first
        decay = partial(decay_by_fit, own, sum_of_lrs, size, classifies=self.facts.classifies)
        watched = decay(watch)
        found = trained == watch.end + 1 and watched > decay()
        held_out = split if trained <= watch.end else 0
        return replace(
            action,
            steps=replace(action.steps, weight_decay_factor=watched, held_out=held_out),
            scores=trained in (watch.start, watch.end),
            overfitting=watch.finding(own) if found else "",
        )
