"""How long a run trains: its epochs, a time, or until the `stop` section ends it.

The rest of a training for a time is laid out before each epoch, at the speed measured so far:

    t, c     seconds of an update, and of all else in an epoch
    S, T     updates in a full epoch; seconds left

While more than two full epochs of S t + c seconds fit into T, the next one is full. From then on
an epoch takes half of what is left, so that the speed is measured again and again before the end:
the last ones are short, but not shorter than 4 c and `_SHORTEST_EPOCH`.

An epoch covers the same fraction of what is left of the schedule as of the updates left. So the
rate is continuous when the speed changes, and the schedule ends with the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from raytrain_opt.clock import monotonic_s
from raytrain_opt.config.schema import StopSection
from raytrain_opt.errors import JobError, Problem
from raytrain_opt.execution.resolve import Resolved
from raytrain_opt.optim.epoch_steps import EpochSpan
from raytrain_opt.pools.commands import MainTrain, StateRef
from raytrain_opt.pools.interface import MainTraining
from raytrain_opt.recording.recorder import EventLog
from raytrain_opt.recording.records import EpochRecord
from raytrain_opt.results import Metric, Steps
from raytrain_opt.search.policy import History

# The training is to end this much earlier: what the last epoch takes is known afterwards only.
_MARGIN = 0.04
# A measurement takes at most this part of the time.
_MEASURED_FRACTION, _MEASURED_S = 0.01, 1.0
# Epochs before the end are shorter, but not shorter than this part of the time.
_SHORTEST_EPOCH = 0.05
# The first updates of a process take longer than the others, so they are not measured.
_FIRST_STEPS = 2
# Small enough to change nothing, and not 0, by which some optimizers divide.
_MEASURED_LR = 1e-9
# A change of the estimated length that the user is told about.
_NOTABLE_CHANGE = 0.1


@dataclass(frozen=True)
class Pace:
    """Measured seconds of an update, and of all else in an epoch."""

    step_s: float
    other_s: float


class TrainingLength:
    """Plans the epochs of a run, and says which is the last."""

    def __init__(self, resolved: Resolved, event_log: EventLog) -> None:
        self._job, self._steps, self._event_log = resolved.job, resolved.steps, event_log
        self._length = resolved.length
        self._optimizers = resolved.learner.optimizers
        self._pace: Pace | None = None
        self._optimizer = 0  # that was measured
        self._span: EpochSpan | None = None
        self._warned = False
        self.records: list[EpochRecord] = []  # of the finished epochs

    def epochs_left(self) -> Iterator[int]:
        """Yield the numbers of the epochs to train, from 1, until one of them was the last."""
        while not (self.is_last(len(self.records)) or self._stop_reason()[1]):
            yield len(self.records) + 1

    def resume(self, records: list[EpochRecord], history: History) -> None:
        """Continue after these epochs. Raises JobError if the optimizer would change."""
        self.records = records
        self._span = history.spans[-1] if history.spans else None
        epochs = self._length.known_epochs
        if not records or epochs in (0, records[-1].epochs):
            return
        before, latest = records[-1], history.latest
        name = str(self._optimizers[latest.next_optimizer if latest else 0].name)
        if name != before.optimizer:  # the choice of Muon depends on the length
            rule = f"would continue with {name} after epochs with {before.optimizer}"
            hint = "start a new run from the weights: --set model.weights=RUN_DIR"
            raise JobError([Problem("epochs", rule, str(epochs), hint)])
        text = f"the schedule now covers {epochs} epochs, not {before.epochs}"
        self._event_log.log("length", before.epoch + 1, text)

    @property
    def epochs(self) -> int:
        """The number of epochs, as estimated now; 0 while that is unknown."""
        return self._length.known_epochs or (self._span.epochs if self._span else 0)

    def fraction(self, epochs_done: float) -> float:
        """Return the part of the training that is done after this number of epochs."""
        return epochs_done / self.epochs if self.epochs else 0.0

    def estimate(self, history: History, measure: Callable[[int, float], Pace]) -> History:
        """Return the history with what the next epoch covers, if time is limited.

        `measure` gets the number of an optimizer and seconds to use.
        """
        if self._length.known_epochs:
            return history
        time_s, latest = self._length.seconds, history.latest
        optimizer = latest.next_optimizer if latest else 0
        if self._pace is None or optimizer != self._optimizer:
            self._pace = measure(optimizer, min(_MEASURED_S, _MEASURED_FRACTION * time_s))
            self._optimizer = optimizer
        epoch, full_steps = len(self.records) + 1, self._steps.first
        left_s = (1 - _MARGIN) * time_s - self._event_log.elapsed_s()
        steps = lay_out(left_s, self._pace, full_steps, _SHORTEST_EPOCH * time_s)
        span = self._span = epoch_span(epoch, steps, history.spans)
        before = history.spans[-1].total_steps if history.spans else 0
        if abs(span.total_steps - before) > _NOTABLE_CHANGE * before:
            epochs = span.total_steps / full_steps
            text = f"train_for: a training of {epochs:.3g} epochs; {max(left_s, 0):.0f} s are left"
            self._event_log.log("length", epoch, text)
        return history.after_span(span)

    def is_last(self, epoch: int) -> bool:
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
        """Take the mean of the pace so far and the epoch's, of which each alone is noisy."""
        if self._pace is None:
            return
        step_s, other_s = self._pace.step_s, self._pace.other_s
        main_s = record.timings_s.get("main_compute_s") or 0.0
        if record.samples:
            measured_s = main_s * self._job.global_batch_size / record.samples
            step_s = (step_s + measured_s) / 2
        if record.epoch > 1:  # the first one includes the search
            other_s = (other_s + record.duration_s - main_s) / 2
        self._pace = Pace(step_s, other_s)

    def _stop_reason(self) -> tuple[str, bool]:
        """Return why the `stop` section would end the run, if it would, and whether it does."""
        if (section := self._job.stop) is None:
            return "", False
        metric = next((r.metric for r in self.records if r.metric is not None), Metric())
        values = [record.test_metrics.get(metric.name) for record in self.records]
        if reached_target(section, metric, values):
            return f"test_metric reached the target, {section.target:g}", True
        if lost_patience(section, metric, values):
            text = f"test_metric was no better in {section.patience} evaluated epochs"
            constant = all(optimizer.is_schedule_free for optimizer in self._job.optimizers)
            return text, constant or not self._job.learning_rate.decays
        return "", False


def lay_out(left_s: float, pace: Pace, full_steps: int, shortest_s: float) -> list[int]:
    """Return the updates of each epoch that is left, at least one of them."""
    full_s = full_steps * pace.step_s + pace.other_s
    shortest_s = max(shortest_s, 4 * pace.other_s, pace.step_s)
    full_epochs = max(0, int(left_s / full_s) - 1)
    left_s -= full_epochs * full_s
    epochs = [full_steps] * full_epochs
    while left_s > 0:
        epoch_s = max(left_s / 2, shortest_s)
        if left_s - epoch_s < shortest_s:
            epoch_s = left_s
        epoch_s = min(epoch_s, full_s)
        epochs.append(round((epoch_s - pace.other_s) / pace.step_s))
        left_s -= epoch_s
    return [steps for steps in epochs if steps > 0] or [1]


def epoch_span(epoch: int, left: Sequence[int], spans: Sequence[EpochSpan]) -> EpochSpan:
    """Return what `epoch` covers, the first of the epochs with these updates.

    `spans`: earlier ones; the last of each epoch before says what it covered.
    """
    done = {span.epoch: span for span in spans if span.epoch < epoch}
    start = done[epoch - 1].stop if done else 0.0
    stop = 1.0 if len(left) == 1 else start + (1.0 - start) * left[0] / sum(left)
    total_steps = sum(span.steps for span in done.values()) + sum(left)
    return EpochSpan(epoch, epoch - 1 + len(left), start, stop, 1.0, left[0], total_steps)


def measure_pace(
    training: MainTraining, state: StateRef, optimizer: int, epoch_steps: int, limit_s: float
) -> tuple[Pace, int]:
    """Train some updates and evaluate, both from `state`; return the pace and their number."""
    total, steps = 0, min(_FIRST_STEPS, epoch_steps)

    def time_steps() -> tuple[float, float]:
        """Return the seconds of `steps` updates, and of all else in a training of them."""
        nonlocal total
        total += steps
        began_s = monotonic_s()
        command = MainTrain(state, 1, Steps(0, (_MEASURED_LR,) * steps, optimizer=optimizer))
        steps_s = training.train(command).totals.duration_s
        return steps_s, monotonic_s() - began_s - steps_s

    time_steps()
    steps_s, other_s = time_steps()
    while steps_s + other_s < limit_s / 2 and steps < epoch_steps:
        steps = min(2 * steps, epoch_steps)
        steps_s, other_s = time_steps()
    return Pace(steps_s / steps, other_s + training.evaluate(state).duration_s), total


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
