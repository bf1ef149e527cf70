"""Horizon-aware STPT: find the peak of a whole schedule, train with it, rarely correct it.

A rate that looks best after a few steps is too small: right after it drops, the loss falls
because the noise does (Wu et al., ICLR 2018). So candidates are compared at the end of whole
schedules, squeezed into few steps:

    before epoch 1   the peak is searched (see `peak_search`). No step of that is kept.
    then             warm-up and decay to zero with this peak, over the whole training.
    on request       0.1, 1 and 10 times the weight decay, with that peak.
    later, rarely    0.5, 1 and 2 times what is left of the schedule: some real steps, then the
                     rest of the decay squeezed. The winner's state before that goes on, and the
                     rates of the rest of the training follow its factor. 1 stays unless another
                     is better beyond noise; then searching has not paid, and ends, unless the
                     loss rises suddenly.

Weight decay acts over a whole training (through the sum of rate times decay: Wang and Aitchison,
arXiv 2405.13698), so candidates for it get it times as much as their schedule is squeezed.

Source of pre-training candidates from one state: Yamada et al. (Kobe University), STPT.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from raytrain_opt.config.learning_rate import HorizonPolicy
from raytrain_opt.errors import DivergedError
from raytrain_opt.optim.batch_ramp import EpochSteps
from raytrain_opt.search.combine import members_of_average
from raytrain_opt.search.loss_trend import PLATEAU_EPOCHS, has_spiked, has_stalled
from raytrain_opt.search.paired import errors_behind, grouped, losses_of
from raytrain_opt.search.peak_search import MOST_CANDIDATES, Ask, Found, PeakSearch, lr_of
from raytrain_opt.search.policy import (
    Candidate,
    CandidateResult,
    Plan,
    Round,
    is_decided,
)
from raytrain_opt.search.squeezed import WholeSchedule

LATER, DECAY = "later", "decay"

# Of what is left of the schedule, and in standard errors how clearly a change has to be better.
_FACTORS = (0.5, 1.0, 2.0)
_DECAY_FACTORS = (0.1, 1.0, 10.0)
_CLEAR = 2.0
# All diverged: the rate is divided by this, so many times.
_LOST_DIVISOR, _MOST_LOST = 4.0, 3
# Steps of a later round, kept and squeezed, where the epoch has so many: fewer favour small
# rates. With fewer squeezed ones than the last there is none: they say nothing.
_LATER_STEPS, _FEWEST_STEPS = 48, 5


def most_of_a_round() -> int:
    """The most candidates that a round can have."""
    return max(MOST_CANDIDATES, len(_FACTORS))


@dataclass(frozen=True)
class HorizonStpt:
    """The policy, with the section of the job file that sets it."""

    section: HorizonPolicy
    epochs: int
    steps: EpochSteps

    @property
    def schedule(self) -> WholeSchedule:
        """Of the whole training, in shares of the peak."""
        return WholeSchedule(self.section.shape, self.section.warmup_share)

    @property
    def search(self) -> PeakSearch:
        """What comes before epoch 1."""
        steps, budget = self.steps.first, self.section.budget * self.epochs
        return PeakSearch(self.section.initial, self.section.horizon, steps, budget * steps)

    def plan(self, epoch: int, history: Sequence[Round], losses: Sequence[float] = ()) -> Plan:
        """The search before epoch 1, a later round, or the (rest of the) epoch.

        Raises DivergedError when every candidate of too many rounds diverged.
        """
        if is_decided(history, epoch):
            kept, _ = self._later_steps(epoch) if epoch > 1 else (0, 0)
            return self._main_plan(epoch, history, kept)
        if epoch == 1 and self.search.is_possible:
            asked = self.search.next(history)
            if isinstance(asked, Found):
                return self._decay_plan(asked, history)
            return self._search_plan(asked, history)
        why = self._why_a_round(epoch, history, losses)
        if why and self._can_pay_a_round(epoch, history):
            return self._later_plan(epoch, history, why)
        return self._main_plan(epoch, history, 0)

    def choose(self, plan: Plan, results: Sequence[CandidateResult]) -> Round:
        """Decide over the results, together with those of the epoch's earlier rounds.

        Peaks: the centre of what gains. Factors of the rate or of the weight decay:
        1, unless another is clearly better.
        """
        scores = tuple(-r.val_loss if r.status == "ok" else float("-inf") for r in results)
        tried = tuple(replace(r, val_losses=grouped(r.val_losses)) for r in results)
        undecided = Round(
            plan.epoch,
            plan.base_lr,
            scores,
            winner=None,
            next_base_lr=plan.base_lr,
            reason="",
            stage=plan.stage,
            steps=plan.pretrain_steps,
            tried=tried,
            next_decay=plan.decay,
        )
        if plan.stage == DECAY:
            found = self.search.next(plan.earlier)
            assert isinstance(found, Found)
            return _choose_decay(undecided, found.result)
        if plan.stage == LATER:
            return self._averaging(_choose_factor(undecided), results)
        return self._choose_peak(plan, undecided)

    def _averaging(self, choice: Round, results: Sequence[CandidateResult]) -> Round:
        if choice.winner is None:
            return choice
        members = members_of_average(self.section, choice.winner, results, choice.scores)
        return replace(choice, averaged=members)

    # Before epoch 1.

    def _search_plan(self, asked: Ask, history: Sequence[Round]) -> Plan:
        base_lr, done = self.section.initial, sum(len(r.scores) for r in history)
        rates = [lr_of(point) for point in asked.points]
        candidates = tuple(
            # Numbered through the epoch: a winner may come from an earlier round.
            Candidate(done + index, lr / base_lr, lr)
            for index, lr in enumerate(rates)
        )
        return Plan(
            1,
            base_lr,
            f"{asked.stage}: {asked.reason}",
            candidates,
            self.schedule.squeezed(asked.steps),
            paired=True,
            stage=asked.stage,
            earlier=tuple(history),
        )

    def _choose_peak(self, plan: Plan, undecided: Round) -> Round:
        rounds = (*plan.earlier, undecided)
        if self.search.is_lost(rounds):
            return replace(undecided, reason=f"all {len(undecided.scores)} candidates diverged")
        following = self.search.next(rounds)
        if isinstance(following, Ask):
            return replace(undecided, reason=following.reason)
        if self._may_try_decays(rounds):
            return replace(undecided, reason=f"{following.reason}: next its weight decay")
        reason = f"peak {following.lr:.3g}: {following.reason}"
        return _decided(undecided, following.result, following.lr, reason)

    def _may_try_decays(self, rounds: Sequence[Round]) -> bool:
        """It is asked for, and what is left of the budget pays as many steps as the peak had."""
        cost = len(_DECAY_FACTORS) * rounds[-1].steps
        return self.section.search_weight_decay and cost <= self.search.steps_left(rounds)

    def _decay_plan(self, found: Found, history: Sequence[Round]) -> Plan:
        lr, done = found.lr, sum(len(r.scores) for r in history)
        steps = history[-1].steps
        return Plan(
            1,
            lr,
            f"try {_listed(_DECAY_FACTORS)} times the weight decay",
            tuple(Candidate(done + i, 1.0, lr, f) for i, f in enumerate(_DECAY_FACTORS)),
            self.schedule.squeezed(steps),
            paired=True,
            stage=DECAY,
            earlier=tuple(history),
            decay_scale=self.steps.before(self.epochs + 1) / steps,
        )

    # Later rounds.

    def _why_a_round(
        self, epoch: int, history: Sequence[Round], losses: Sequence[float]
    ) -> str | None:
        """None when there is no reason for one, or when they have not paid."""
        rounds = [r for r in history if r.stage == LATER]
        if not history or any(r.epoch == epoch for r in rounds):
            return "again" if history else None  # it was lost, and is repeated
        if has_spiked(losses):
            return "the loss has risen"
        if any(r.winner is not None and r.next_base_lr == r.base_lr for r in rounds):
            return None
        if epoch in self._later_epochs():
            return f"{epoch - 1} of {self.epochs} epochs are done"
        since = epoch - 1 - max((r.epoch for r in rounds), default=0)
        return "the loss has stalled" if has_stalled(losses) and since >= PLATEAU_EPOCHS else None

    def _can_pay_a_round(self, epoch: int, history: Sequence[Round]) -> bool:
        if any(r.stage == LATER and r.epoch == epoch for r in history):
            return True  # without a rate that trains there is no training
        kept, squeezed = self._later_steps(epoch)
        cost = len(_FACTORS) * (kept + squeezed) / self.steps(epoch)
        spent = sum(len(r.scores) * r.steps / self.steps(r.epoch) for r in history)
        return squeezed >= _FEWEST_STEPS and spent + cost <= self.section.budget * self.epochs

    def _later_epochs(self) -> set[int]:
        starts = (1 + round(share * self.epochs) for share in self.section.rounds_at)
        return {epoch for epoch in starts if 1 < epoch <= self.epochs}

    def _later_steps(self, epoch: int) -> tuple[int, int]:
        """Steps that are kept and squeezed ones: both together as much of the horizon as is left
        of the training, or more.
        """
        left = 1 - (epoch - 1) / self.epochs
        wanted = max(_LATER_STEPS, round(self.section.horizon * left * self.steps(epoch)))
        steps = min(wanted, self.steps(epoch))
        return steps // 2, steps - steps // 2

    def _later_plan(self, epoch: int, history: Sequence[Round], why: str) -> Plan:
        self._refuse_when_hopeless(epoch, history)
        base_lr, (kept, squeezed) = self._peak(history), self._later_steps(epoch)
        decay = _decay(history)
        done = (epoch - 1 + kept / self.steps(epoch)) / self.epochs
        real = self.schedule.of_epoch(epoch, self.epochs, self.steps)[:kept]
        return Plan(
            epoch,
            base_lr,
            f"{why}: try {_listed(_FACTORS)} times the rest of the schedule",
            tuple(Candidate(i, f, base_lr * f, decay) for i, f in enumerate(_FACTORS)),
            (*real, *self.schedule.squeezed(squeezed, done)),
            kept_steps=kept,
            paired=True,
            stage=LATER,
            decay=decay,
        )

    def _refuse_when_hopeless(self, epoch: int, history: Sequence[Round]) -> None:
        lost = [r for r in history if r.epoch == epoch]
        if len(lost) > _MOST_LOST:
            tried = ", ".join(f"{r.base_lr:.3g}" for r in lost)
            raise DivergedError(
                f"epoch {epoch}: the loss of every candidate was not finite, at 0.5 to 2 times "
                f"each of these peak learning rates: {tried}. The training had gone wrong before; "
                "likely causes: data that are not finite, or fp16."
            )

    # Training.

    def _peak(self, history: Sequence[Round]) -> float:
        return history[-1].next_base_lr if history else self.section.initial

    def _main_plan(self, epoch: int, history: Sequence[Round], kept: int) -> Plan:
        peak = self._peak(history)
        shares = self.schedule.of_epoch(epoch, self.epochs, self.steps)[kept:]
        reason = f"{self.section.shape} decay from {peak:.3g}"
        if not history:
            reason += ": too few steps for a search within learning_rate.budget"
        lrs = tuple(peak * share for share in shares)
        return Plan(epoch, peak, reason, lrs=lrs, decay=_decay(history))


def _choose_factor(undecided: Round) -> Round:
    alive = {r.candidate.multiplier: r for r in undecided.tried if r.status == "ok"}
    if not alive:
        lr = undecided.base_lr / _LOST_DIVISOR
        reason = f"all {len(undecided.scores)} candidates diverged: peak lowered"
        return replace(undecided, next_base_lr=lr, reason=reason, tried=())
    stay = alive.get(1.0)
    better = [r for r in alive.values() if stay is None or _is_clearly_better(r, stay)]
    winner = min(better, key=lambda r: r.val_loss) if better else alive[1.0]
    factor = winner.candidate.multiplier
    reason = f"{factor:g} times the rest of the schedule"
    reason += ": clearly better" if better else ": no other is clearly better"
    return _decided(undecided, winner, winner.candidate.lr, reason)


def _choose_decay(undecided: Round, found: CandidateResult) -> Round:
    alive = {r.candidate.decay: r for r in undecided.tried if r.status == "ok"}
    stay = alive.get(1.0, found)  # the peak's own run was without so much decay
    better = [r for r in alive.values() if _is_clearly_better(r, stay)]
    winner = min(better, key=lambda r: r.val_loss) if better else stay
    why = "clearly better" if better else "no other is clearly better"
    factor = f"{winner.candidate.decay:g} times the weight decay"
    reason = f"peak {undecided.base_lr:.3g}, {factor}: {why}"
    return _decided(undecided, winner, undecided.base_lr, reason)


def _decided(undecided: Round, winner: CandidateResult, lr: float, reason: str) -> Round:
    return replace(
        undecided,
        winner=replace(winner, val_losses=()),
        next_base_lr=lr,
        next_decay=winner.candidate.decay,
        reason=reason,
        tried=(),
    )


def _decay(history: Sequence[Round]) -> float:
    return history[-1].next_decay if history else 1.0


def _listed(factors: Sequence[float]) -> str:
    return ", ".join(f"{factor:g}" for factor in factors)


def _is_clearly_better(result: CandidateResult, stay: CandidateResult) -> bool:
    return errors_behind(losses_of(result), losses_of(stay)) < -_CLEAR
