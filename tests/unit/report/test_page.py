"""The page without a browser: its content; it is self-contained and escapes texts."""

from __future__ import annotations

import re
from base64 import b64decode
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from raytrain_opt.report import write_report
from raytrain_opt.report.run_plots import learning_rate_plots, training_plots
from raytrain_opt.report.run_reader import read_run
from tests.support.synthetic_runs import (
    epoch_line,
    evaluation,
    event_line,
    round_line,
    with_batch_size_search,
    with_predictions,
    write_lines,
    write_run,
)

PLANTED = '<script>alert("planted")</script>&$x$'
VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """The tags and texts of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.texts.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def text(self) -> str:
        return " ".join(self.texts)


def read(location: str) -> Page:
    return Page(Path(location).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def complete_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with everything that a report can show."""
    run = with_batch_size_search(write_run(tmp_path_factory.mktemp("complete") / "run"))
    with_predictions(run)
    staleness = {"0": 5, "1": 3, "2": 2}
    write_lines(run / "epochs.jsonl", [epoch_line(n, staleness=staleness) for n in range(1, 7)])
    write_lines(run / "events.jsonl", [event_line("restarted", "slot 1 again", process="slot 1")])
    write_report(str(run))
    return run


def test_every_plot_is_in_the_page(complete_run: Path) -> None:
    page = read(f"{complete_run}/report.html")
    plots = ["loss", "metric", "learning_rate", "batch_size_speed"]
    assert [f["id"] for f in page.all("figure")] == [f"plot-{name}" for name in plots]
    assert ">accuracy</text>" in images(page)["Training: accuracy over steps"]  # an axis


def test_tables_hold_the_data(complete_run: Path) -> None:
    page = read(f"{complete_run}/report.html")
    names = {"rounds", "probes", "epochs", "events", "classes"}
    assert {table["id"] for table in page.all("table")} == {f"table-{name}" for name in names}
    assert len(page.all("caption")) == len(names)
    assert all(head["scope"] == "col" for head in page.all("th"))
    candidates = [text for text in page.texts if "★\N{NO-BREAK SPACE}" in text]
    assert len(candidates) == 6
    assert all(rate in candidates[0] for rate in ("0.2", "0.1", "0.05"))


def images(page: Page) -> dict[str, str]:
    """Return the plots, by their titles."""
    plots = [image for image in page.all("img") if image["alt"]]
    contents = [str(plot["src"]).partition("base64,")[2] for plot in plots]
    texts = [b64decode(content).decode() for content in contents]
    return {str(plot["alt"]): text for plot, text in zip(plots, texts, strict=True)}


def texts_after(page: Page, text: str, count: int) -> list[str]:
    """The next texts after this one, names of columns included."""
    texts = [text.strip() for text in page.texts if text.strip()]
    start = next(i for i, other in enumerate(texts) if other.startswith(text)) + 1
    return texts[start : start + count]


def test_predictions_are_shown_by_class_and_confidence(complete_run: Path) -> None:
    """Class i has 20 samples, i // 2 of which are taken for the next class."""
    page = read(f"{complete_run}/report.html")
    worst = ["class 8", "20", "80.0 %", "class 9 (4)", "class 9", "20", "80.0 %", "class 0 (4)"]
    assert texts_after(page, "All classes by accuracy", 12)[4:] == worst
    assert "Predictions on the 200 test samples after epoch 6." in page.text
    assert len([image for image in page.all("img") if not image["alt"]]) == 12
    assert texts_after(page, "class 9 (67.0 %)", 1) == ["labeled class 8; val/163.jpg"]


def test_a_thousand_classes_are_a_small_page(tmp_path: Path) -> None:
    run = with_predictions(write_run(tmp_path / "run"), classes=1000)
    page = read(write_report(str(run)))
    assert (run / "report.html").stat().st_size < 400_000
    assert "The 100 worst classes by accuracy." in page.text


def test_the_page_is_self_contained(complete_run: Path) -> None:
    html = (complete_run / "report.html").read_text()
    assert "http:" not in html
    assert "https:" not in html
    page = Page(html)
    for _, attributes in page.tags:
        for name in ("src", "href", "action", "data"):
            link = attributes.get(name)
            assert link is None or link.startswith(("#", "data:,", "data:image/"))
    assert "url(" not in html
    assert "@import" not in html
    for svg in images(page).values():
        assert not re.search(r"(href=\"|url\()[^#]", svg)


def test_texts_of_users_are_escaped(tmp_path: Path) -> None:
    changes = {
        "model": {"name": PLANTED},
        "data": {"name": PLANTED},
        "name": PLANTED,
        "learning_rate": {"policy": PLANTED, "initial": 0.1},
    }
    run = write_run(tmp_path / "run<b>&$y$" / "_x", job_changes=changes)
    write_lines(run / "rounds.jsonl", [round_line(1, reason=PLANTED, stage=PLANTED)])
    write_lines(run / "events.jsonl", [event_line("failed", PLANTED, process=PLANTED)])
    page = read(write_report(str(run)))
    assert not page.all("script")
    assert not page.all("b")
    assert PLANTED in page.text


@pytest.mark.parametrize("name", [f'../../a" {PLANTED}', "top\\1", "mAP [small]"])
def test_the_name_of_a_metric_is_only_text(tmp_path: Path, name: str) -> None:
    """It comes from records, which somebody else may have made."""
    run = write_run(tmp_path / "run", epochs=1)
    metric = {"name": name, "higher_is_better": True}
    measured = {"test_metrics": {name: 0.5}, "metric": metric}
    write_lines(run / "epochs.jsonl", [epoch_line(1, **measured)])
    write_lines(run / "rounds.jsonl", [round_line(1, metric=metric)])
    page = read(write_report(str(run)))
    assert not page.all("script")
    svg = images(page)[f"Training: {name} over steps"]
    assert f">{escape(name, quote=False)}</text>" in svg
    assert list(tmp_path.iterdir()) == [run]


def test_an_interrupted_run_has_a_report(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", epochs=1, finished=False)
    write_lines(run / "events.jsonl", [event_line("interrupted", "Terminated")])
    page = read(write_report(str(run)))
    assert "1 of 3 epochs" in page.text
    assert "interrupted: Terminated" in page.text


def test_a_batch_size_search_alone_has_a_report(tmp_path: Path) -> None:
    run = with_batch_size_search(write_run(tmp_path / "run", epochs=0, finished=False))
    page = read(write_report(str(run)))
    assert {f["id"] for f in page.all("figure")} >= {"plot-batch_size_speed"}
    assert "not finished" not in page.text


@pytest.mark.parametrize("measured", [[None], [1.0], [None, 0.5, None]])
def test_few_measurements_are_enough(tmp_path: Path, measured: list[float | None]) -> None:
    run = write_run(tmp_path / "run", epochs=len(measured))
    lines = [epoch_line(n, **evaluation(a), train_loss=None) for n, a in enumerate(measured, 1)]
    write_lines(run / "epochs.jsonl", lines)
    read(write_report(str(run)))


def test_a_report_under_a_uri_is_written_there(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    assert write_report(f"file://{run}") == f"file://{run}/report.html"
    assert read(f"{run}/report.html").all("figure")


def test_the_page_takes_at_most_1500_bytes_for_each_round(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", epochs=1000)
    page = Path(write_report(str(run)))
    assert page.stat().st_size < 1.5e6
    assert page.read_text().count("<tr>") > 2000


def race_line(first: int, optimizer: str, steps: int, **changes: Any) -> dict[str, Any]:
    """Return a round before the first epoch: three candidates of one optimizer."""
    fields = {"stage": "coarse", "kept_steps": 0, "pretrain_steps": steps, **changes}
    line = {**round_line(1, None), **fields}
    for candidate in line["candidates"]:
        candidate.update(index=first + candidate["index"], optimizer=optimizer)
        candidate["val_loss"] = 10 * candidate["lr"] if optimizer == "AdamW" else candidate["lr"]
    return line


def race_page(folder: Path, *lines: dict[str, Any]) -> Page:
    run_dir = write_run(folder / "run", rounds=False)
    write_lines(run_dir / "rounds.jsonl", lines)
    return Page(Path(write_report(str(run_dir))).read_text())


def test_a_race_of_optimizers_is_shown(tmp_path: Path) -> None:
    page = race_page(
        tmp_path,
        race_line(0, "AdamW", 9, reason="next Muon"),
        race_line(3, "Muon", 9),
        race_line(6, "Muon", 36, winner=4, next_base_lr=0.2, reason="peak 0.2"),
    )
    assert "chose Muon with a peak learning rate of 0.2, against AdamW." in page.text
    svg = images(page)["Search before the first epoch"]
    assert all(f">{label}</text>" in svg for label in ("AdamW", "Muon", "chosen peak"))


def test_a_search_that_decided_nothing_is_not_shown_as_a_choice(tmp_path: Path) -> None:
    reason = "not decided: Muon, peak 0.1: the best candidate's loss is noise"
    page = race_page(
        tmp_path,
        race_line(0, "AdamW", 9),
        race_line(3, "Muon", 9, winner=4, next_base_lr=0.1, reason=reason),
    )
    assert f"The search before the first epoch has {reason}." in page.text
    svg = images(page)["Search before the first epoch"]
    assert ">usual rate</text>" in svg
    assert "chosen peak" not in svg


def test_losses_below_zero_are_plotted_and_much_higher_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A likelihood of continuous values may have such a loss."""
    painted = []

    def draw(name: str, title: str, caption: str, paint: Any) -> None:
        painted.append(Figure().add_subplot())
        paint(painted[-1])

    monkeypatch.setattr("raytrain_opt.report.run_plots.draw", draw)
    line = race_line(0, "AdamW", 9)
    for candidate, loss in zip(line["candidates"], (-3.0, -2.8, 5.0), strict=True):
        candidate.update(val_loss=loss, val_metric=loss)
    line["metric"] = {"name": "loss", "higher_is_better": False}
    run_dir = write_run(tmp_path / "run", rounds=False)
    write_lines(run_dir / "rounds.jsonl", [line])
    records = replace(read_run(str(run_dir)), epochs=[])
    learning_rate_plots(records)
    training_plots(records)
    validation, _, metric = painted
    assert sorted(validation.lines[0].get_ydata()) == [-3.0, -2.8]
    [dots] = (line for line in metric.lines if line.get_marker() == "." and len(line.get_ydata()))
    ends = [loss for loss in dots.get_ydata() if loss == loss]
    assert sorted(ends) == [-3.0, -2.8]
