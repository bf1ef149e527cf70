"""Loss, metric and learning rate of the training, and the table of the search's rounds."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from raytrain_opt.recording.records import CandidateRecord, RoundRecord
from raytrain_opt.report.plots import (
    SERIES,
    Cell,
    Plot,
    Table,
    color,
    draw,
    draw_line,
    percent_axis,
    plain,
    plain_log,
    rate,
    thousands,
    whole_numbers,
)
from raytrain_opt.report.run_reader import RunRecords
from raytrain_opt.results import Metric

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# More cannot be distinguished in a plot.
_MAX_ROUNDS, _MAX_POINTS = 300, 25_000
# With more epochs than this, single points of the training are not marked.
_MAX_DOTS, _DOT_SIZE = 150, 3


def training_plots(run: RunRecords) -> list[Plot]:
    """Plot losses over epochs and the metric over steps; none without records."""
    if not run.epochs and not run.rounds:
        return []
    return [_losses(run), _metric(run)] if run.epochs else [_metric(run)]


def learning_rate_plots(run: RunRecords) -> list[Plot]:
    """Plot learning rates over epochs; none without records."""
    return [_learning_rates(run)] if run.epochs or run.rounds else []


def _losses(run: RunRecords) -> Plot:
    lines = {
        "training": [(e.epoch, e.train_loss) for e in run.epochs],
        "test": [(e.epoch, e.test_metrics.get("loss")) for e in run.epochs],
    }

    def paint(axes: Axes) -> None:
        marker = "." if len(run.epochs) <= _MAX_DOTS else ""
        for (name, points), hue in zip(lines.items(), ("blue", "orange"), strict=True):
            known = [(epoch, loss) for epoch, loss in points if loss is not None]
            if known:
                draw_line(axes, known, marker=marker, color=color(hue), label=name)
        axes.set(xlabel="epoch", ylabel="loss")
        whole_numbers(axes)

    caption = (
        "Training loss: mean over the epoch, with augmentation and regularization. Test loss: "
        "after the epoch. Data: table of epochs."
    )
    return draw("loss", "Loss over epochs", caption, paint)


def _metric(run: RunRecords) -> Plot:
    name = run.metric.name
    caption = (
        f"Blue: the training, by test {name} after each epoch"
        + (f" and validation {name} of each round's winner" if run.rounds else "")
        + ". "
    )
    if run.rounds:
        caption += (
            f"Short lines: all candidates, from their common initial state to their {name} on "
            "the validation split after pre-training (as in figure 2 of the STPT paper). "
        )
    caption += f"{_thinned(run)}Data: tables of this page."

    def paint(axes: Axes) -> None:
        marker = "." if len(run.epochs) <= _MAX_DOTS else ""
        draw_line(axes, _main_line(run), marker=marker, color=color("blue"), label="training")
        for winners, label, line_color, width in (
            (False, "other candidates", color("grey"), 0.9),
            (True, "winner", color("orange"), 1.5),
        ):
            lines = _candidate_lines(run, winners=winners)
            if len(lines):
                x, y = lines[..., 0], lines[..., 1]
                axes.plot(x.ravel(), y.ravel(), color=line_color, linewidth=width, label=label)
                axes.plot(x[:, 1], y[:, 1], ".", color=line_color, markersize=_DOT_SIZE)
        axes.set(xlabel="step", ylabel=name)
        thousands(axes, "x")
        if run.metric.is_fraction:
            percent_axis(axes)

    return draw("metric", f"Training: {name} over steps", caption, paint)


def _candidate_lines(run: RunRecords, *, winners: bool) -> npt.NDArray[Any]:
    """Return (step, metric) before and after each pre-training [candidates, 3, 2].

    The third point is NaN, where matplotlib ends a line; so is a metric that was not measured.
    """
    lines = []
    for record in _thin_out(run.rounds, _MAX_ROUNDS):
        step = run.first_step(record.epoch)
        is_known = 1 < record.epoch <= len(run.epochs) + 1
        before = run.epochs[record.epoch - 2].test_metric if is_known else None
        for candidate in record.candidates:
            if (candidate is record.chosen) == winners:
                end = (step + record.pretrain_steps, candidate.val_metric)
                lines.append([(step, before), end, (nan, nan)])
    return np.array(lines, float).reshape(-1, 3, 2)


def _main_line(run: RunRecords) -> list[tuple[float, float]]:
    """Return steps and metrics of the training: of kept winners and after each epoch."""
    points: list[tuple[float, float | None]] = []
    for epoch in run.epochs:
        points += [
            (run.first_step(record.epoch) + record.kept_steps, record.chosen.val_metric)
            for record in run.rounds_by_epoch.get(epoch.epoch, ())
            if record.kept_steps == record.pretrain_steps and record.chosen is not None
        ]
        points.append((run.first_step(epoch.epoch + 1), epoch.test_metric))
    return [(step, value) for step, value in points if value is not None]


def _learning_rates(run: RunRecords) -> Plot:
    caption = "Learning rate of each step"
    caption += ", and all candidates. " if run.rounds else ". "
    caption += f"{_thinned(run)}Data: tables of this page."

    def paint(axes: Axes) -> None:
        candidates = [
            (r.epoch, c) for r in _thin_out(run.rounds, _MAX_ROUNDS) for c in r.candidates
        ]
        for status, marker, name, color_name in (
            ("ok", "o", "candidates", "grey"),
            ("diverged", "x", "diverged", "orange"),
        ):
            points = np.array([(epoch - 1, c.lr) for epoch, c in candidates if c.status == status])
            if len(points):
                x, y = points.T
                axes.plot(x, y, marker, color=color(color_name), markersize=_DOT_SIZE, label=name)
        epochs, rates = _rates_of_training(run)
        axes.plot(epochs, rates, color=color("blue"), linewidth=1.6, label="training")
        axes.set(xlabel="epoch", ylabel="learning rate")
        plain_log(axes, "y")

    return draw("learning_rate", "Learning rate over epochs", caption, paint)


def _rates_of_training(run: RunRecords) -> tuple[list[float], list[float]]:
    """Return position (in epochs) and learning rate of each step's ends, without rates of 0."""
    ends = [n - 1 + np.linspace(0, 1, len(e.steps.lrs) + 1) for n, e in enumerate(run.schedule, 1)]
    x = [position for epoch in ends for position in np.repeat(epoch, 2)[1:-1].tolist()]
    y = [lr or nan for epoch in run.schedule for lr in epoch.steps.lrs for _ in range(2)]
    return _thin_out(x, _MAX_POINTS), _thin_out(y, _MAX_POINTS)


def _thinned(run: RunRecords) -> str:
    shown = len(_thin_out(run.rounds, _MAX_ROUNDS))
    if shown == len(run.rounds):
        return ""
    return f"{shown:,} of {len(run.rounds):,} rounds are shown. "


def rounds_table(run: RunRecords) -> Table:
    """Return a row per round, with all candidates."""
    name = run.metric.name
    columns = (
        "epoch", "stage", "steps", "base LR", "next LR", name, "ahead",
        f"candidates: LR, {name}", "reason",
    )  # fmt: skip
    optimizers = {c.optimizer for record in run.rounds for c in record.candidates}
    rows = [_row(record, several=len(optimizers) > 1) for record in run.rounds]
    caption = (
        f"All rounds with all candidates (★: winner), and {name} on the validation split. Ahead: "
        "how much better the winner is there than the best other candidate"
        f"{', in points' if run.metric.is_fraction else ''}."
    )
    return Table("rounds", caption, columns, rows, wide=columns[-2:])


def _row(record: RoundRecord, *, several: bool) -> list[Cell]:
    """Return the cells of a round. `several`: candidates differ in their optimizers."""
    chosen, metric = record.chosen, record.metric
    value = None if chosen is None else chosen.val_metric
    others = [c.val_metric for c in record.candidates if c is not chosen]
    known = [metric.score(other) for other in others if other is not None]
    ahead = None if value is None or not known else metric.score(value) - max(known)
    ahead_text = "–" if ahead is None else metric.difference(ahead).removesuffix(" points")
    tried = (_candidate(c, metric, several=several, won=c is chosen) for c in record.candidates)
    return [
        Cell(str(record.epoch)),
        Cell(record.stage or "–"),
        Cell(str(record.pretrain_steps)),
        Cell(rate(record.base_lr)),
        Cell(rate(record.next_base_lr)),
        Cell(metric.text(value)),
        Cell(ahead_text, mark="low" if (ahead or 0) < 0 else ""),
        Cell(";  ".join(tried)),
        Cell(record.reason),
    ]


def _candidate(candidate: CandidateRecord, metric: Metric, *, several: bool, won: bool) -> str:
    name = f"{candidate.optimizer if several else ''} {rate(candidate.lr)}".strip()
    if candidate.weight_decay_factor != 1:
        name += f" (weight decay × {plain(candidate.weight_decay_factor)})"
    is_ok = candidate.status == "ok"
    result = metric.text(candidate.val_metric) if is_ok else candidate.status
    text = f"{'★ ' if won else ''}{name} → {result}"
    return text.replace(" ", "\N{NO-BREAK SPACE}")


def _thin_out(values: Sequence[Any], max_values: int) -> list[Any]:
    """Return at most `max_values` of the values, evenly spaced."""
    stride = -(-len(values) // max_values)
    return list(values[:: max(stride, 1)])


# Lines of candidates by their number of steps, shortest first; longer ones are all solid.
_STYLES = (":", "--", "-")


def search_plots(run: RunRecords) -> list[Plot]:
    """Plot the candidates of policy stpt_horizon; no plot without any."""
    rounds = [record for record in run.rounds if record.stage and record.epoch == 1]
    optimizers = list(dict.fromkeys(c.optimizer for r in rounds for c in r.candidates))
    if not optimizers:
        return []
    lengths = sorted({record.pretrain_steps for record in rounds})
    peak = None if rounds[-1].winner is None else rounds[-1].next_base_lr
    undecided = rounds[-1].is_undecided

    def paint(axes: Axes) -> None:
        lines = {(o, n): _points(rounds, o, n) for o in optimizers for n in lengths}
        lowest = [min(loss for _, loss in line) for line in lines.values() if line]
        worst = max(lowest, default=1.0)
        highest = worst + 0.15 * abs(worst)  # about there, candidates hardly trained
        for (optimizer, steps), line in lines.items():
            points = [(lr, loss) for lr, loss in line if loss <= highest]
            style = _STYLES[min(lengths.index(steps), len(_STYLES) - 1)]
            hue = color(SERIES[optimizers.index(optimizer) % len(SERIES)])
            label = optimizer if steps == lengths[0] else None
            draw_line(axes, points, style, color=hue, marker="o", markersize=4, label=label)
        if peak is not None:
            label = "usual rate" if undecided else "chosen peak"
            axes.axvline(peak, color=color("ink"), linewidth=1, label=label)
        plain_log(axes, "x")
        axes.set(xlabel="peak learning rate", ylabel="validation loss")

    caption = (
        "Validation loss of candidates after a full schedule, compressed into few steps: "
        f"{', '.join(map(str, lengths))} steps, the shortest dotted, the longest solid. Much "
        "higher losses are not shown. All values are in the table of rounds."
    )
    return [draw("search", "Search before the first epoch", caption, paint)]


def _points(
    rounds: Sequence[RoundRecord], optimizer: str, steps: int
) -> list[tuple[float, float]]:
    """Return the rate and the loss of the candidates that did not diverge, by rate."""
    return sorted(
        (candidate.lr, candidate.val_loss)
        for record in rounds
        if record.pretrain_steps == steps
        for candidate in record.candidates
        if candidate.optimizer == optimizer and candidate.status == "ok"
        if candidate.val_loss is not None
    )
