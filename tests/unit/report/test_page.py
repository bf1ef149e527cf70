"""The page without a browser: its content; it is self-contained and escapes texts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from raytrain_opt.report import write_report
from raytrain_opt.report.learning_rate_plots import search_plots
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
    staleness = {"counts": [5, 3, 2], "mean": 0.7, "max": 2}
    write_lines(run / "epochs.jsonl", [epoch_line(n, staleness=staleness) for n in range(1, 7)])
    write_lines(run / "events.jsonl", [event_line("restarted", "slot 1 again", process="slot 1")])
    write_report([str(run)])
    return run


def test_every_plot_is_in_the_page(complete_run: Path) -> None:
    page = read(f"{complete_run}/report.html")
    plots = {
        "metric", "learning_rate", "batch_size_speed", "time_parts", "loss",
    }  # fmt: skip
    assert {f"plot-{name}" for name in plots} == {f["id"] for f in page.all("figure")}
    assert len(page.all("svg")) == len(plots)
    assert all(svg["role"] == "img" and svg["aria-label"] for svg in page.all("svg"))
    assert ">accuracy</text>" in (complete_run / "report.html").read_text()  # an axis


def test_tables_hold_the_data(complete_run: Path) -> None:
    page = read(f"{complete_run}/report.html")
    names = {"rounds", "probes", "epochs", "events", "classes"}
    assert {table["id"] for table in page.all("table")} == {f"table-{name}" for name in names}
    assert len(page.all("caption")) == len(names)
    assert all(head["scope"] == "col" for head in page.all("th"))
    candidates = [text for text in page.texts if "★\N{NO-BREAK SPACE}" in text]
    assert len(candidates) == 6
    assert all(rate in candidates[0] for rate in ("0.2", "0.1", "0.05"))


def texts_after(page: Page, text: str, count: int) -> list[str]:
    """The next texts after this one, names of columns included."""
    texts = [text.strip() for text in page.texts if text.strip()]
    start = next(i for i, other in enumerate(texts) if other.startswith(text)) + 1
    return texts[start : start + count]


def test_predictions_are_shown_by_class_and_confidence(complete_run: Path) -> None:
    """Class i has 20 samples, i // 2 of which are taken for the next class."""
    page = read(f"{complete_run}/report.html")
    worst = ["class 8", "20", "80.0 %", "84.2 %", "class 9 (4)", "class 9", "20", "80.0 %"]
    assert texts_after(page, "All classes by accuracy", 13)[5:] == worst
    assert "Predictions on the 200 test samples after epoch 6." in page.text
    images = page.all("img")
    assert len(images) == 12
    assert texts_after(page, "class 9 (67.0 %)", 1) == ["labeled class 8; test sample 163"]


def test_a_thousand_classes_are_a_small_page(tmp_path: Path) -> None:
    run = with_predictions(write_run(tmp_path / "run"), classes=1000)
    page = read(write_report([str(run)]))
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
            assert link is None or link.startswith(("#", "data:,", "data:image/jpeg;base64,"))
    assert "url(" not in re.sub(r"url\(#", "", html)
    assert "@import" not in html


def test_identifiers_are_unique_and_known(complete_run: Path) -> None:
    page = read(f"{complete_run}/report.html")
    known = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(known) == len(set(known))
    used = {link for link in links(page) if link.startswith("#")}
    assert used
    assert {link[1:] for link in used} <= set(known)


def links(page: Page) -> Iterator[str]:
    for _, attributes in page.tags:
        yield attributes.get("href") or ""
        yield from re.findall(r"url\((#[^)]+)\)", " ".join(v or "" for v in attributes.values()))


def test_plots_use_the_colors_of_the_page(complete_run: Path) -> None:
    html = (complete_run / "report.html").read_text()
    body = html[html.index("<body>") :]
    assert "var(--blue)" in body
    assert not re.search(r"#0072b2|#1f2329|#d9dde3", body)


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
    page = read(write_report([str(run)]))
    other = write_run(tmp_path / "other", job_changes={"seed": PLANTED})
    compared = read(write_report([str(run), str(other)]))
    for found in (page, compared):
        assert len(found.all("script")) == 1
        assert not found.all("b")
        assert PLANTED in found.text


@pytest.mark.parametrize("name", [f'../../a" {PLANTED}', "top\\1", "mAP [small]"])
def test_the_name_of_a_metric_is_only_text(tmp_path: Path, name: str) -> None:
    """It comes from records, which somebody else may have made."""
    run = write_run(tmp_path / "run", epochs=1)
    metric = {"name": name, "higher_is_better": True}
    measured = {"test_metrics": {name: 0.5}, "metric": metric}
    write_lines(run / "epochs.jsonl", [epoch_line(1, **measured)])
    write_lines(run / "rounds.jsonl", [round_line(1, metric=metric)])
    page = read(write_report([str(run)]))
    assert len(page.all("script")) == 1
    assert f"Training: {name} over steps" in [svg["aria-label"] for svg in page.all("svg")]
    known = {attributes.get("id") for _, attributes in page.tags}
    assert {link[1:] for link in links(page) if link.startswith("#")} <= known
    assert list(tmp_path.iterdir()) == [run]
    compared = read(write_report([str(run), str(run)]))
    assert f"Test {name} over seconds" in [svg["aria-label"] for svg in compared.all("svg")]


def test_an_interrupted_run_has_a_report(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", epochs=1, finished=False)
    write_lines(run / "events.jsonl", [event_line("interrupted", "Terminated")])
    page = read(write_report([str(run)]))
    assert "1 of 3 epochs" in page.text
    assert "interrupted: Terminated" in page.text


def test_a_batch_size_search_alone_has_a_report(tmp_path: Path) -> None:
    run = with_batch_size_search(write_run(tmp_path / "run", epochs=0, finished=False))
    page = read(write_report([str(run)]))
    assert {f["id"] for f in page.all("figure")} >= {"plot-batch_size_speed"}
    assert "not finished" not in page.text


@pytest.mark.parametrize("measured", [[None], [1.0], [None, 0.5, None]])
def test_few_measurements_are_enough(tmp_path: Path, measured: list[float | None]) -> None:
    run = write_run(tmp_path / "run", epochs=len(measured))
    lines = [epoch_line(n, **evaluation(a), train_loss=None) for n, a in enumerate(measured, 1)]
    write_lines(run / "epochs.jsonl", lines)
    read(write_report([str(run)]))


def test_a_comparison_shows_the_fields_that_differ(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / "a", job_changes={"seed": 1}),
        write_run(tmp_path / "b", epochs=3, rounds=False, job_changes={"seed": 2}),
    ]
    location = write_report([str(run) for run in runs])
    assert location == f"{runs[0]}/comparison.html"
    page = read(location)
    assert [f["id"] for f in page.all("figure")] == ["plot-metric_over_time"]
    caption = next(i for i, text in enumerate(page.texts) if text.startswith("Results."))
    table = page.texts[caption:]
    assert table.index("91.67 %") < table.index("B") < table.index("83.33 %")
    rows = " ".join(page.texts[page.texts.index("seed") :])
    assert "global_batch_size" not in rows
    assert "epochs" in page.texts


def test_a_report_under_a_uri_is_written_there(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    assert write_report([f"file://{run}"]) == f"file://{run}/report.html"
    assert read(f"{run}/report.html").all("svg")


def test_the_page_takes_at_most_1500_bytes_for_each_round(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", epochs=1000)
    page = Path(write_report([str(run)]))
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
    return Page(Path(write_report([str(run_dir)])).read_text())


def test_a_race_of_optimizers_is_shown(tmp_path: Path) -> None:
    page = race_page(
        tmp_path,
        race_line(0, "AdamW", 9, reason="next Muon"),
        race_line(3, "Muon", 9),
        race_line(6, "Muon", 36, winner=4, next_base_lr=0.2, reason="peak 0.2"),
    )
    assert "chose Muon with a peak learning rate of 0.2, against AdamW." in page.text
    assert {"AdamW", "Muon", "chosen peak"} <= set(page.texts)


def test_a_search_that_decided_nothing_is_not_shown_as_a_choice(tmp_path: Path) -> None:
    reason = "not decided: Muon, peak 0.1: the best candidate's loss is noise"
    page = race_page(
        tmp_path,
        race_line(0, "AdamW", 9),
        race_line(3, "Muon", 9, winner=4, next_base_lr=0.1, reason=reason),
    )
    assert f"The search before the first epoch has {reason}." in page.text
    assert "chosen peak" not in page.text
    assert "usual rate" in page.texts


def test_losses_below_zero_are_in_the_plots_of_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A likelihood of continuous values may have such a loss."""
    painted = []

    def draw(name: str, title: str, caption: str, paint: Any) -> None:
        painted.append(Figure().add_subplot())
        paint(painted[-1])

    monkeypatch.setattr("raytrain_opt.report.learning_rate_plots.draw", draw)
    line = race_line(0, "AdamW", 9)
    for candidate, loss in zip(line["candidates"], (-3.0, -2.8, 5.0), strict=True):
        candidate.update(val_loss=loss)
    run_dir = write_run(tmp_path / "run", rounds=False)
    write_lines(run_dir / "rounds.jsonl", [line])
    search_plots(read_run(str(run_dir)))
    [validation] = painted
    assert sorted(validation.lines[0].get_ydata()) == [-3.0, -2.8]
