"""Horizon-aware STPT: find the peak of a full schedule, train with it, rarely correct it.

A rate that looks best after a few steps is too small: right after it drops, the loss falls
because the noise does (Wu et al., ICLR 2018). So candidates are compared at the end of full
schedules, compressed into few steps:

    before epoch 1   search the peak (see `peak_search`), of several optimizers where the job names
                     none (`optimizer_race`). None of these steps are kept.
    then             train with this peak: warm-up and decay to zero over all epochs.
    on request       try 0.1, 1 and 10 times the weight decay, with that peak.
    later, rarely    try 0.5, 1 and 2 times the rest of the schedule: some real steps, then the
                     rest of the decay compressed. The run continues from the winner's state
                     after the real steps, and the rates of all later steps follow its factor.
                     Factor 1 stays unless another is better beyond noise; in that case later
                     rounds have not paid off and stop, unless the loss rises suddenly.

Weight decay acts over a full training (through the sum of rate times decay: Wang and Aitchison,
arXiv 2405.13698), so in weight-decay candidates it is multiplied by the factor by which their
schedule is compressed.

Source of pre-training candidates from one state: Yamada et al. (Kobe University), STPT.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from raytrain_opt.config.learning_rate import HorizonPolicy
from raytrain_opt.config.updates import OptimizerSection
from raytrain_opt.errors import DivergedError
from raytrain_opt.optim.epoch_steps import EpochSteps
from raytrain_opt.optim.relative_schedule import RelativeSchedule
from raytrain_opt.search.loss_trend import PLATEAU_EPOCHS, has_spiked, has_stalled
from raytrain_opt.search.optimizer_race import OptimizerRace
from raytrain_opt.search.paired_comparison import group_losses, losses_of, z_score
from raytrain_opt.search.peak_search import (
    MAX_CANDIDATES,
    CandidateSteps,
    PeakChoice,
    PeakRequest,
    PeakSearch,
    point_to_lr,
)
from raytrain_opt.search.policy import (
    Candidate,
    CandidateResult,
    Decision,
    History,
    TrainEpoch,
    TryCandidates,
)
from raytrain_opt.search.weight_averaging import candidates_to_average

# Stages of rounds, beside those of the peak search.
LATER, WEIGHT_DECAY = "later", "weight_decay"

# Factors of the rest of the schedule and of the weight decay.
_FACTORS = (0.5, 1.0, 2.0)
_WEIGHT_DECAY_FACTORS = (0.1, 1.0, 10.0)
# Of several optimizers, each starts at its usual rate times initial / this, SGD's usual rate.
_SGD_LR = 0.1
# A change has to be better by this many standard errors: one in about forty is by chance.
_MIN_Z_SCORE = 2.0
# When all diverged the rate is divided by 4, in at most 3 rounds: then by 64 in all.
_DIVERGED_DIVISOR, _MAX_DIVERGED_ROUNDS = 4.0, 3
# Steps of a later round, kept and compressed, where the epoch has that many: fewer favor small
# rates. There is no round with fewer compressed steps than the minimum: they show nothing.
_LATER_STEPS, _MIN_COMPRESSED_STEPS = 48, 5


def max_round_size() -> int:
    """Return the largest number of candidates of a round."""
    return max(MAX_CANDIDATES, len(_FACTORS))


@dataclass(frozen=True)
class HorizonStpt:
    """The policy, configured by a section of the job file."""

    section: HorizonPolicy
    epochs: int
    steps: EpochSteps
    optimizers: tuple[OptimizerSection, ...]

    def schedule(self, optimizer: int) -> RelativeSchedule:
        """Return the schedule of the full training, relative to the peak."""
        is_constant = self.optimizers[optimizer].is_schedule_free
        shape = "constant" if is_constant else self.section.shape
        return RelativeSchedule(shape, self.section.warmup_fraction)

    @property
    def race(self) -> OptimizerRace:
        """The search before epoch 1."""
        budget = self.section.max_search_cost * self.epochs * self.steps.first
        count = len(self.optimizers)
        steps = CandidateSteps.within(
            budget,
            horizon=self.section.horizon,
            epoch_steps=self.steps.first,
            optimizers=count,
        )
        return OptimizerRace(
            tuple(str(optimizer.name) for optimizer in self.optimizers),
            tuple(PeakSearch(self._initial(i), steps, budget) for i in range(count)),
            budget,
        )

    def _initial(self, optimizer: int) -> float:
        """Return the rate at which the search starts; the job's is that of SGD among several."""
        if len(self.optimizers) == 1:
            return self.section.initial
        return self.section.initial * self.optimizers[optimizer].usual_lr / _SGD_LR

    def next(self, epoch: int, history: History) -> TryCandidates | TrainEpoch:
        """Return a round of the search before epoch 1, a later round, or the rest of the epoch.

        Raises DivergedError when every candidate of too many rounds diverged.
        """
        if history.is_decided(epoch):
            kept, _ = self._later_steps(epoch) if epoch > 1 else (0, 0)
            return self._train(epoch, history, kept)
        if epoch == 1 and self.race.is_possible:
            optimizer, following = self.race.next(history.decisions)
            if isinstance(following, PeakChoice):
                return self._try_weight_decays(optimizer, following, history)
            return self._try_peaks(optimizer, following, history)
        why = self._reason_for_round(epoch, history)
        if why and self._can_afford_round(epoch, history):
            return self._try_factors(epoch, history, why)
        return self._train(epoch, history, 0)

    def decide(
        self, action: TryCandidates, results: Sequence[CandidateResult], history: History
    ) -> Decision:
        """Decide from these results and those of the epoch's earlier rounds.

        Peaks: the weighted mean of all rates that reduce the loss. Factors of the rate or of
        the weight decay: 1, unless another is clearly better.
        """
        scores = tuple(-r.val_loss if r.status == "ok" else float("-inf") for r in results)
        undecided = Decision(
            action.epoch,
            action.base_lr,
            scores,
            winner=None,
            next_base_lr=action.base_lr,
            reason="",
            stage=action.stage,
            steps=action.pretrain_steps,
            tried=tuple(replace(r, val_losses=group_losses(r.val_losses)) for r in results),
            next_weight_decay_factor=_weight_decay_factor(history),
            next_optimizer=_optimizer(history),
        )
        if action.stage == WEIGHT_DECAY:
            _, peak = self.race.next(history.decisions)
            assert isinstance(peak, PeakChoice)
            return _decide_weight_decay(undecided, peak.result)
        if action.stage == LATER:
            return self._add_averaging(_decide_factor(undecided), results)
        return self._decide_peak(undecided, history)

    def _add_averaging(self, decision: Decision, results: Sequence[CandidateResult]) -> Decision:
        if decision.winner is None:
            return decision
        averaged = candidates_to_average(self.section, decision.winner, results, decision.scores)
        return replace(decision, averaged=averaged)

    # Before epoch 1.

    def _try_peaks(self, optimizer: int, request: PeakRequest, history: History) -> TryCandidates:
        base_lr, first = self._initial(optimizer), _count_candidates(history)
        candidates = tuple(
            # Numbered through the epoch: a winner may come from an earlier round.
            Candidate(first + index, lr / base_lr, lr, optimizer=optimizer)
            for index, lr in enumerate(map(point_to_lr, request.points))
        )
        is_race = len(self.optimizers) > 1
        name = f"{self.optimizers[optimizer].name}, " if is_race else ""
        return TryCandidates(
            1,
            base_lr,
            f"{name}{request.stage}: {request.reason}",
            candidates,
            self.schedule(optimizer).compressed(request.steps),
            paired=True,
            stage=request.stage,
            fresh_statistics=is_race,  # momentum and averages change weights at other speeds
        )

    def _decide_peak(self, undecided: Decision, history: History) -> Decision:
        rounds = (*history.decisions, undecided)
        if self.race.all_diverged(rounds):
            return replace(undecided, reason=f"all {len(undecided.scores)} candidates diverged")
        optimizer, following = self.race.next(rounds)
        if isinstance(following, PeakRequest):
            return replace(undecided, reason=following.reason)
        if self._can_afford_weight_decays(rounds):
            return replace(undecided, reason=f"{following.reason}: next its weight decay")
        name = f"{self.optimizers[optimizer].name}, " if len(self.optimizers) > 1 else ""
        reason = f"{name}peak {following.lr:.3g}: {following.reason}"
        return _decided(undecided, following.result, following.lr, reason)

    def _can_afford_weight_decays(self, rounds: Sequence[Decision]) -> bool:
        """Return whether the job asks for it and the budget covers as many steps as the peak's."""
        cost = len(_WEIGHT_DECAY_FACTORS) * rounds[-1].steps
        return self.section.search_weight_decay and cost <= self.race.steps_left(rounds)

    def _try_weight_decays(
        self, optimizer: int, peak: PeakChoice, history: History
    ) -> TryCandidates:
        first, steps = _count_candidates(history), history.decisions[-1].steps
        return TryCandidates(
            1,
            peak.lr,
            f"try {_listed(_WEIGHT_DECAY_FACTORS)} times the weight decay",
            tuple(
                Candidate(first + index, 1.0, peak.lr, factor, optimizer)
                for index, factor in enumerate(_WEIGHT_DECAY_FACTORS)
            ),
            self.schedule(optimizer).compressed(steps),
            paired=True,
            stage=WEIGHT_DECAY,
            weight_decay_scale=self.steps.before(self.epochs + 1) / steps,
        )

    # Later rounds.

    def _reason_for_round(self, epoch: int, history: History) -> str | None:
        """Return why this epoch needs a round; None without a reason, or if none has paid off."""
        decisions, losses = history.decisions, history.epoch_losses
        rounds = [decision for decision in decisions if decision.stage == LATER]
        if not decisions or any(decision.epoch == epoch for decision in rounds):
            return "again" if decisions else None  # all diverged: the round is repeated
        if has_spiked(losses):
            return "the loss has risen"
        if any(r.winner is not None and r.next_base_lr == r.base_lr for r in rounds):
            return None
        if epoch in self._recheck_epochs():
            return f"{epoch - 1} of {self.epochs} epochs are done"
        since = epoch - 1 - max((r.epoch for r in rounds), default=0)
        return "the loss has stalled" if has_stalled(losses) and since >= PLATEAU_EPOCHS else None

    def _can_afford_round(self, epoch: int, history: History) -> bool:
        if any(decision.stage == LATER for decision in history.rounds_of(epoch)):
            return True  # a repeated round: without a rate that trains there is no training
        kept, compressed = self._later_steps(epoch)
        cost = len(_FACTORS) * (kept + compressed) / self.steps(epoch)
        spent = sum(len(r.scores) * r.steps / self.steps(r.epoch) for r in history.decisions)
        return (
            compressed >= _MIN_COMPRESSED_STEPS
            and spent + cost <= self.section.max_search_cost * self.epochs
        )

    def _recheck_epochs(self) -> set[int]:
        starts = (1 + round(fraction * self.epochs) for fraction in self.section.recheck_at)
        return {epoch for epoch in starts if 1 < epoch <= self.epochs}

    def _later_steps(self, epoch: int) -> tuple[int, int]:
        """Return the kept and the compressed steps of a later round.

        Together they are as large a part of the horizon as the epochs left are of the training,
        or `_LATER_STEPS` if that is more.
        """
        left = 1 - (epoch - 1) / self.epochs
        target = max(_LATER_STEPS, round(self.section.horizon * left * self.steps(epoch)))
        steps = min(target, self.steps(epoch))
        return steps // 2, steps - steps // 2

    def _try_factors(self, epoch: int, history: History, why: str) -> TryCandidates:
        self._raise_if_all_diverged(epoch, history)
        base_lr, (kept, compressed) = self._peak(history), self._later_steps(epoch)
        weight_decay_factor, optimizer = _weight_decay_factor(history), _optimizer(history)
        schedule = self.schedule(optimizer)
        done = (epoch - 1 + kept / self.steps(epoch)) / self.epochs
        real = schedule.of_epoch(epoch, self.epochs, self.steps)[:kept]
        return TryCandidates(
            epoch,
            base_lr,
            f"{why}: try {_listed(_FACTORS)} times the rest of the schedule",
            tuple(
                Candidate(index, factor, base_lr * factor, weight_decay_factor, optimizer)
                for index, factor in enumerate(_FACTORS)
            ),
            (*real, *schedule.compressed(compressed, done)),
            kept_steps=kept,
            paired=True,
            stage=LATER,
        )

    def _raise_if_all_diverged(self, epoch: int, history: History) -> None:
        diverged = history.rounds_of(epoch)
        if len(diverged) > _MAX_DIVERGED_ROUNDS:
            peaks = ", ".join(f"{decision.base_lr:.3g}" for decision in diverged)
            raise DivergedError(
                f"epoch {epoch}: the loss of every candidate was not finite, at 0.5 to 2 times "
                f"each of these peak learning rates: {peaks}. The weights were damaged before "
                "this round. Likely causes: data that are not finite, or an overflow with "
                "precision: fp16."
            )

    # Training.

    def _peak(self, history: History) -> float:
        return history.latest.next_base_lr if history.latest else self._initial(0)

    def _train(self, epoch: int, history: History, kept: int) -> TrainEpoch:
        peak, optimizer = self._peak(history), _optimizer(history)
        schedule = self.schedule(optimizer)
        fractions = schedule.of_epoch(epoch, self.epochs, self.steps)[kept:]
        how = "constant rate" if schedule.shape == "constant" else f"{schedule.shape} decay from"
        reason = f"{how} {peak:.3g}"
        if not history.decisions:
            reason += ": too few steps for a search within learning_rate.max_search_cost"
        lrs = tuple(peak * fraction for fraction in fractions)
        return TrainEpoch(epoch, lrs, reason, _weight_decay_factor(history), optimizer)


def _decide_factor(undecided: Decision) -> Decision:
    alive = {r.candidate.multiplier: r for r in undecided.tried if r.status == "ok"}
    if not alive:
        lr = undecided.base_lr / _DIVERGED_DIVISOR
        reason = f"all {len(undecided.scores)} candidates diverged: peak lowered"
        return replace(undecided, next_base_lr=lr, reason=reason, tried=())
    unchanged = alive.get(1.0)
    better = [r for r in alive.values() if unchanged is None or _is_clearly_better(r, unchanged)]
    winner = min(better, key=lambda r: r.val_loss) if better else alive[1.0]
    factor = winner.candidate.multiplier
    reason = f"{factor:g} times the rest of the schedule"
    reason += ": clearly better" if better else ": no other is clearly better"
    return _decided(undecided, winner, winner.candidate.lr, reason)


def _decide_weight_decay(undecided: Decision, peak: CandidateResult) -> Decision:
    alive = {r.candidate.weight_decay_factor: r for r in undecided.tried if r.status == "ok"}
    # When factor 1 diverged: the peak's own candidate, trained without the weight-decay scale.
    unchanged = alive.get(1.0, peak)
    better = [r for r in alive.values() if _is_clearly_better(r, unchanged)]
    winner = min(better, key=lambda r: r.val_loss) if better else unchanged
    why = "clearly better" if better else "no other is clearly better"
    factor = f"{winner.candidate.weight_decay_factor:g} times the weight decay"
    reason = f"peak {undecided.base_lr:.3g}, {factor}: {why}"
    return _decided(undecided, winner, undecided.base_lr, reason)


def _decided(undecided: Decision, winner: CandidateResult, lr: float, reason: str) -> Decision:
    return replace(
        undecided,
        winner=replace(winner, val_losses=()),
        next_base_lr=lr,
        next_weight_decay_factor=winner.candidate.weight_decay_factor,
        next_optimizer=winner.candidate.optimizer,
        reason=reason,
        tried=(),
    )


def _weight_decay_factor(history: History) -> float:
    return history.latest.next_weight_decay_factor if history.latest else 1.0


def _optimizer(history: History) -> int:
    return history.latest.next_optimizer if history.latest else 0


def _count_candidates(history: History) -> int:
    return sum(len(decision.scores) for decision in history.decisions)


def _listed(factors: Sequence[float]) -> str:
    return ", ".join(f"{factor:g}" for factor in factors)


def _is_clearly_better(result: CandidateResult, reference: CandidateResult) -> bool:
    return z_score(losses_of(result), losses_of(reference)) < -_MIN_Z_SCORE
