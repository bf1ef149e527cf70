"""What the search for the learning rate measured and decided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from raytrain_opt.recording.records import CandidateRecord, RoundRecord
from raytrain_opt.report.formatting import plain, rate, times
from raytrain_opt.report.plots import SERIES, Plot, color, draw, draw_line, plain_log
from raytrain_opt.report.run_reader import RunRecords

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
        "higher losses are not shown. "
        + " ".join(f"{name} {outcome}." for name, outcome in outcomes(rounds).items())
        + " All values are in the table of rounds."
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


def outcomes(rounds: Sequence[RoundRecord]) -> dict[str, str]:
    """Return the outcome of each optimizer of a race, with the reason; empty without a race.

    The loss of one that left is compared with the lowest of those that went on, after as many
    steps where they have candidates of that length.
    """
    tried: dict[tuple[str, int], list[CandidateRecord]] = {}
    for record in rounds:
        for candidate in record.candidates:
            tried.setdefault((candidate.optimizer, record.pretrain_steps), []).append(candidate)
    optimizers = list(dict.fromkeys(optimizer for optimizer, _ in tried))
    longest = {o: max(steps for other, steps in tried if other == o) for o in optimizers}
    winner = rounds[-1].winner if rounds else None  # perhaps a candidate of an earlier round
    undecided = bool(rounds) and rounds[-1].is_undecided
    chosen = {o for (o, _), candidates in tried.items() for c in candidates if c.index == winner}
    best = {
        key: min(scored, key=lambda c: c.val_loss or 0.0)
        for key, candidates in tried.items()
        if (scored := [c for c in candidates if c.status == "ok"])
    }
    texts = {}
    for optimizer, steps in longest.items() if len(optimizers) > 1 else ():
        candidates, own = tried[optimizer, steps], best.get((optimizer, steps))
        went_on = [o for o in optimizers if o != optimizer and (o in chosen or longest[o] > steps)]
        rivals = [best[o, steps] for o in went_on if (o, steps) in best]
        rival = min(rivals, key=lambda c: c.val_loss or 0.0, default=None)
        how = "left after" if chosen else "so far has"
        trains = "trains, which was not decided" if undecided else "was chosen"
        text = trains if optimizer in chosen else f"{how} {times(steps, 'step')}"
        if own:
            text += f": lowest loss {plain(own.val_loss)} at {rate(own.lr)}"
            if rival and optimizer not in chosen:
                text += f" against {plain(rival.val_loss)} of {rival.optimizer}"
        else:
            of_length = f" of {steps} steps" if any(o == optimizer for o, _ in best) else ""
            text += f": all its candidates{of_length} "
            words = {"lost": "were lost"}
            text += " or ".join(sorted({words.get(c.status, c.status) for c in candidates}))
        total = sum(n * len(all_) for (o, n), all_ in tried.items() if o == optimizer)
        texts[optimizer] = f"{text}; {times(total, 'step')} in all"
    return texts
