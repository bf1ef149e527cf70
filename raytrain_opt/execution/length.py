"""How long a run trains: its epochs, a time, or until the `stop` section ends it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from raytrain_opt.clock import monotonic_s
from raytrain_opt.config.schema import StopSection
from raytrain_opt.errors import JobError, Problem
from raytrain_opt.execution.resolve import Resolved
from raytrain_opt.optim.epoch_steps import EpochSpan
from raytrain_opt.pools.commands import MainTrain, StateRef
from raytrain_opt.pools.protocol import MainTraining
from raytrain_opt.recording.recorder import EventLog
from raytrain_opt.recording.records import EpochRecord
from raytrain_opt.results import Metric, Steps
from raytrain_opt.search.policy import History, Policy, StartAgain, TryCandidates
from raytrain_opt.search.time_budget import Pace, plan_epoch

# Time is planned to end this much earlier: what the last epoch takes is known afterwards only.
_MARGIN = 0.04
# A measurement takes at most this part of the time.
_MEASURED_FRACTION, _MEASURED_S = 0.01, 1.0
# Epochs before the end are shorter, but not shorter than this part of the time.
_SHORTEST_EPOCH = 0.05
# The first updates of a process take longer than the others, so they are not measured.
_FIRST_STEPS = 2
# Small enough to change nothing, and not 0, by which some optimizers divide.
_MEASURED_LR = 1e-9
# A change of the planned length that the user is told about.
_NOTABLE_CHANGE = 0.1


class TrainingLength:
    """Plans the epochs of a run, and says which is the last."""

    def __init__(self, resolved: Resolved, event_log: EventLog) -> None:
        self._job, self._steps, self._event_log = resolved.job, resolved.steps, event_log
        self._length = resolved.length
        self._optimizers = resolved.learner.optimizers
        self._pace: Pace | None = None
        self._optimizer = 0  # that was measured
        self._span: EpochSpan | None = None
        self._reported_steps = 0
        self._warned = False
        self.records: list[EpochRecord] = []  # of the finished epochs

    def epochs_left(self) -> Iterator[int]:
        """Yield the numbers of the epochs to train, from 1, until one of them was the last."""
        while not (self.is_last(len(self.records)) or self._stop_reason()[1]):
            yield len(self.records) + 1

    def resume(self, records: list[EpochRecord], history: History) -> None:
        """Continue after these epochs."""
        self.records = records
        self._span = history.plans[-1] if history.plans else None

    def log_change(
        self, policy: Policy, history: History, lrs: Sequence[float], steps: int
    ) -> None:
        """Say what another number of epochs than before does to the rate, if it is another.

        `lrs`: of all steps so far, the last `steps` of them in the next epoch. Raises JobError if
        the optimizer would change.
        """
        epochs = self._length.known_epochs
        if not self.records or epochs in (0, self.records[-1].epochs):
            return
        before, latest = self.records[-1], history.latest
        name = str(self._optimizers[latest.next_optimizer if latest else 0].name)
        if name != before.optimizer:  # the choice of Muon depends on the length
            rule = f"would continue with {name} after epochs with {before.optimizer}"
            hint = "start a new run from the weights: --set model.weights=RUN_DIR"
            raise JobError([Problem("epochs", rule, str(epochs), hint)])
        action = policy.next(before.epoch + 1, history)
        if isinstance(action, StartAgain):  # which says its rate
            return
        planned = (action.base_lr,) if isinstance(action, TryCandidates) else action.steps.lrs
        text = f"{lrs[-1]:.3g} to {planned[min(steps, len(planned) - 1)]:.3g}"
        text = f"the schedule now covers {epochs} epochs: the rate goes from {text}"
        self._event_log.log("length", before.epoch + 1, text)

    @property
    def epochs(self) -> int:
        """The number of epochs, as planned now; 0 while that is unknown."""
        return self._length.known_epochs or (self._span.epochs if self._span else 0)

    def fraction(self, epochs_done: float) -> float:
        """Return the part of the training that is done after this number of epochs."""
        return epochs_done / self.epochs if self.epochs else 0.0

    def plan(self, history: History, measure: Callable[[int, float], Pace]) -> History:
        """Return the history with a plan, if time is limited.

        `measure` gets the number of an optimizer and seconds to use.
        """
        if self._length.known_epochs:
            return history
        time_s = self._length.seconds
        optimizer = history.latest.next_optimizer if history.latest else 0
        if self._pace is None or optimizer != self._optimizer:
            self._pace = measure(optimizer, min(_MEASURED_S, _MEASURED_FRACTION * time_s))
            self._optimizer = optimizer
        epoch = len(self.records) + 1
        left_s = (1 - _MARGIN) * time_s - self._event_log.elapsed_s()
        self._span = plan_epoch(
            epoch,
            left_s,
            self._pace,
            self._steps.first,
            evaluate_every=self._job.evaluate.every_epochs,
            shortest_s=_SHORTEST_EPOCH * time_s,
            plans=history.plans,
        )
        self._log_plan(self._span, left_s)
        return history.after_plan(self._span)

    def is_last(self, epoch: int) -> bool:
        """Return whether the schedule ends with this epoch."""
        if self._length.known_epochs:
            return epoch >= self._length.known_epochs
        return self._span is not None and self._span.epoch == epoch and self._span.is_last

    def after_epoch(self, record: EpochRecord) -> bool:
        """Take the record of an epoch; return whether the run ends with it."""
        self.records.append(record)
        self._measure_epoch(record)
        text, stops = self._stop_reason()
        ends = self.is_last(record.epoch) or stops
        if stops:
            self._event_log.log("stopped", record.epoch, f"epoch {record.epoch}: {text}")
        elif text and not (self._warned or ends):
            self._warned = True
            text += "; training continues, because the rate decays until the last epoch"
            self._event_log.log("patience", record.epoch, f"epoch {record.epoch}: {text}")
        return ends

    def _measure_epoch(self, record: EpochRecord) -> None:
        if self._pace is None:
            return
        timings_s, pace = record.timings_s, self._pace
        main_s = timings_s.get("main_compute_s") or 0.0
        evaluate_s = timings_s.get("evaluate_s")
        steps = record.samples / self._job.global_batch_size
        measured = Pace(
            main_s / steps if steps else pace.step_s,
            pace.evaluate_s if evaluate_s is None else evaluate_s,
            # The first epoch includes the search.
            record.duration_s - main_s - (evaluate_s or 0.0) if record.epoch > 1 else pace.other_s,
        )
        self._pace = pace.updated(measured)

    def _log_plan(self, span: EpochSpan, left_s: float) -> None:
        """Log the first plan, and later ones of clearly another length."""
        reported = self._reported_steps
        change = abs(span.total_steps / reported - 1) if reported else math.inf
        if change > _NOTABLE_CHANGE:
            self._reported_steps = span.total_steps
            epochs = span.total_steps / self._steps.first
            text = f"train_for: a training of {epochs:.3g} epochs; {max(left_s, 0):.0f} s are left"
            self._event_log.log("planned", span.epoch, text)

    def _stop_reason(self) -> tuple[str, bool]:
        """Return why the `stop` section would end the run, if it would, and whether it does."""
        section = self._job.stop
        if section is None:
            return "", False
        metric = next((r.metric for r in self.records if r.metric is not None), Metric())
        values = [record.test_metrics.get(metric.name) for record in self.records]
        if reached_target(section, metric, values):
            return f"test_metric reached the target, {section.target:g}", True
        if lost_patience(section, metric, values):
            text = f"test_metric was no better in {section.patience} evaluated epochs"
            return text, not self._job.rate_decays
        return "", False


def measure_pace(
    training: MainTraining, state: StateRef, optimizer: int, epoch_steps: int, limit_s: float
) -> tuple[Pace, int]:
    """Train some updates and evaluate, both from `state`; return the pace and their number."""
    total = 0

    def time_steps(steps: int) -> tuple[float, float]:
        """Return the seconds of this many updates, and of all else in a training of them."""
        nonlocal total
        total += steps
        began_s = monotonic_s()
        measured = Steps(0, (_MEASURED_LR,) * steps, optimizer=optimizer)
        command = MainTrain(state, 1, measured)
        steps_s = training.train(command).totals.duration_s
        return steps_s, monotonic_s() - began_s - steps_s

    steps = min(_FIRST_STEPS, epoch_steps)
    time_steps(steps)
    steps_s, other_s = time_steps(steps)
    while steps_s + other_s < limit_s / 2 and steps < epoch_steps:
        steps = min(2 * steps, epoch_steps)
        steps_s, other_s = time_steps(steps)
    return Pace(steps_s / steps, training.evaluate(state).duration_s, other_s), total


def reached_target(section: StopSection, metric: Metric, values: Sequence[float | None]) -> bool:
    """Return whether the latest value of the metric is as good as the target."""
    if section.target is None or not values or values[-1] is None:
        return False
    return metric.score(values[-1]) >= metric.score(section.target)


def lost_patience(section: StopSection, metric: Metric, values: Sequence[float | None]) -> bool:
    """Return whether the last `patience` evaluated epochs brought no better value.

    `values`: of each epoch; None where it was not evaluated, or the value is not finite.
    """
    known = [metric.score(value) for value in values if value is not None]
    if section.patience is None or len(known) <= section.patience or values[-1] is None:
        return False
    return max(known[-section.patience :]) <= max(known[: -section.patience])
