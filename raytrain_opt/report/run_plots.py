"""The plots of a run: loss, metric, learning rate, the search, and the speed by batch size."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from raytrain_opt.recording.records import RoundRecord
from raytrain_opt.report.plots import (
    BLUE,
    GREY,
    INK,
    ORANGE,
    SERIES,
    Plot,
    draw,
    draw_line,
    plain_log,
    thousands,
)
from raytrain_opt.report.run_reader import RunRecords

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# More cannot be distinguished in a plot.
_MAX_ROUNDS, _MAX_POINTS = 300, 12_500
_DOTS: dict[str, Any] = {"marker": ".", "markersize": 3}


def training_plots(run: RunRecords) -> list[Plot]:
    """Plot losses over epochs and the metric over steps; none without records."""
    if not run.epochs and not run.rounds:
        return []
    return [_losses(run), _metric(run)] if run.epochs else [_metric(run)]


def _losses(run: RunRecords) -> Plot:
    lines = {
        "training": [(e.epoch, e.train_loss) for e in run.epochs],
        "test": [(e.epoch, e.test_metrics.get("loss")) for e in run.epochs],
    }

    def paint(axes: Axes) -> None:
        for (name, points), hue in zip(lines.items(), SERIES, strict=False):
            if known := [(epoch, loss) for epoch, loss in points if loss is not None]:
                draw_line(axes, known, **_DOTS, color=hue, label=name)
        axes.set(xlabel="epoch", ylabel="loss")
        axes.locator_params("x", integer=True, min_n_ticks=1)

    caption = (
        "Training loss: mean over the epoch, with augmentation and regularization. Test loss: "
        "after the epoch."
    )
    return draw("loss", "Loss over epochs", caption, paint)


def _metric(run: RunRecords) -> Plot:
    name = run.metric.name
    caption = f"Blue: the training, by test {name} after each epoch"
    if run.rounds:
        caption += (
            f" and validation {name} of each round's winner. Short lines: candidates, from their "
            f"common initial state to their {name} on the validation split after pre-training "
            "(as in figure 2 of the STPT paper). Much higher losses are not shown"
        )

    def paint(axes: Axes) -> None:
        from matplotlib.ticker import PercentFormatter

        draw_line(axes, _main_line(run), **_DOTS, color=BLUE, label="training")
        for winners, label, line_color, width in (
            (False, "other candidates", GREY, 0.9),
            (True, "winner", ORANGE, 1.5),
        ):
            if len(lines := _candidate_lines(run, winners=winners)):
                x, y = lines[..., 0], lines[..., 1]
                axes.plot(x.ravel(), y.ravel(), color=line_color, linewidth=width, label=label)
                axes.plot(x[:, 1], y[:, 1], linestyle="", color=line_color, **_DOTS)
        axes.set(xlabel="step", ylabel=name)
        thousands(axes, "x")
        if run.metric.is_fraction:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))

    return draw("metric", f"Training: {name} over steps", f"{caption}.", paint)


def _candidate_lines(run: RunRecords, *, winners: bool) -> npt.NDArray[Any]:
    """Return (step, metric) before and after each pre-training, and NaN, [candidates, 3, 2]."""
    lines = []
    for record in _thin_out(run.rounds, _MAX_ROUNDS):
        step = run.first_step(record.epoch)
        is_known = 1 < record.epoch <= len(run.epochs) + 1
        before = run.epochs[record.epoch - 2].test_metric if is_known else None
        for candidate in record.candidates:
            if (candidate is record.chosen) == winners:
                end = (step + record.pretrain_steps, candidate.val_metric)
                lines.append([(step, before), end, (nan, nan)])  # NaN ends a line in matplotlib
    array = np.array(lines, float).reshape(-1, 3, 2)
    ends = array[:, 1, 1]
    if np.isfinite(ends).any() and not run.metric.higher_is_better:
        middle = float(np.nanmedian(ends))
        ends[ends > middle + 0.5 * abs(middle)] = nan  # else the training would be a flat line
    return array


def _main_line(run: RunRecords) -> list[tuple[float, float]]:
    """Return steps and metrics of the training: of kept winners and after each epoch."""
    points = [
        (run.first_step(record.epoch) + record.kept_steps, record.chosen.val_metric)
        for record in run.rounds
        if record.kept_steps == record.pretrain_steps and record.chosen is not None
    ]
    points += [(run.first_step(epoch.epoch + 1), epoch.test_metric) for epoch in run.epochs]
    return sorted((step, value) for step, value in points if value is not None)


def learning_rate_plots(run: RunRecords) -> list[Plot]:
    """Plot the candidates before the first epoch, and the rate of each step; none without any."""
    rounds = [record for record in run.rounds if record.stage and record.epoch == 1]
    plots = [_search(rounds)] if any(record.candidates for record in rounds) else []
    return [*plots, _learning_rates(run)] if run.schedule else plots


def _learning_rates(run: RunRecords) -> Plot:
    points = [
        (epoch + step / len(record.steps.lrs), lr)
        for epoch, record in enumerate(run.schedule)
        for step, lr in enumerate(record.steps.lrs)
        if lr > 0
    ]
    points = _thin_out(points, _MAX_POINTS)
    points += [(len(run.schedule), lr) for _, lr in points[-1:]]

    def paint(axes: Axes) -> None:
        draw_line(axes, points, drawstyle="steps-post", color=BLUE, linewidth=1.6)
        axes.set(xlabel="epoch", ylabel="learning rate")
        plain_log(axes, "y")

    caption = "Learning rate of each step of the training."
    return draw("learning_rate", "Learning rate over epochs", caption, paint)


def _thin_out(values: Sequence[Any], max_values: int) -> list[Any]:
    """Return at most `max_values` of the values, evenly spaced."""
    stride = -(-len(values) // max_values)
    return list(values[:: max(stride, 1)])


def _search(rounds: Sequence[RoundRecord]) -> Plot:
    optimizers = list(dict.fromkeys(c.optimizer for r in rounds for c in r.candidates))
    lengths = sorted({record.pretrain_steps for record in rounds})
    last = rounds[-1]

    def paint(axes: Axes) -> None:
        lines = {(o, n): _points(rounds, o, n) for o in optimizers for n in lengths}
        lowest = [min(loss for _, loss in line) for line in lines.values() if line]
        worst = max(lowest, default=1.0)
        highest = worst + 0.15 * abs(worst)  # about there, candidates hardly trained
        for (optimizer, steps), line in lines.items():
            points = [(lr, loss) for lr, loss in line if loss <= highest]
            style = "-" if steps == lengths[-1] else ":" if steps == lengths[0] else "--"
            hue = SERIES[optimizers.index(optimizer) % len(SERIES)]
            label = optimizer if steps == lengths[0] else None
            draw_line(axes, points, style, color=hue, marker="o", markersize=4, label=label)
        if last.winner is not None:
            label = "usual rate" if last.is_undecided else "chosen peak"
            axes.axvline(last.next_base_lr, color=INK, linewidth=1, label=label)
        plain_log(axes, "x")
        axes.set(xlabel="peak learning rate", ylabel="validation loss")

    caption = (
        "Validation loss of candidates after a full schedule, compressed into few steps: "
        f"{', '.join(map(str, lengths))} steps, the shortest dotted, the longest solid. Much "
        "higher losses are not shown. All values are in the table of rounds."
    )
    return draw("search", "Search before the first epoch", caption, paint)


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


def batch_size_plots(run: RunRecords) -> list[Plot]:
    """Plot the speeds of the probes; no plot before the first one that fits into memory."""
    measured = [record for record in run.probes if record.status == "ok" and record.samples_per_s]
    if not measured:
        return []

    def paint(axes: Axes) -> None:
        axes.errorbar(
            [record.batch_size for record in measured],
            [record.samples_per_s or 0.0 for record in measured],
            [record.samples_per_s_error or 0.0 for record in measured],
            fmt="o",
            color=BLUE,
            markersize=4,
            label="probes",
        )
        if run.batch_size is not None:
            chosen = run.batch_size.batch_size_per_worker
            axes.axvline(chosen, color=ORANGE, linestyle="--", label=f"chosen: {chosen}")
        axes.set(xlabel="batch size per worker", ylabel="samples/s")
        plain_log(axes, "x", 2)
        thousands(axes, "y")
        axes.set_ylim(bottom=0)

    caption = "Each probe with its standard error. Dashed: the chosen size."
    return [draw("batch_size_speed", "Speed over batch size", caption, paint)]
