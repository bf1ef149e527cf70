"""The paper's experiments: the rows follow the paper, and agreement is judged correctly."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import comparison_command
from benchmarks.common import JOBS
from benchmarks.comparison_rows import STPT_ALPHA, STPT_FILE, published_stpt
from benchmarks.comparison_tasks import SYNTHETIC
from benchmarks.comparison_units import Result, Setting, Unit, compute
from benchmarks.papers import stpt as benchmark
from benchmarks.papers import stpt_rows as rows_of
from raytrain_opt.config.learning_rate import LR_SETS
from raytrain_opt.config.load import load_job
from raytrain_opt.config.schema import Job

EPOCHS = 10
BATCH_64 = replace(SYNTHETIC, batch=64)
STEPS = SYNTHETIC.train // SYNTHETIC.batch
SEARCHES = EPOCHS - 1


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    data = SYNTHETIC.prepare(Path(), tmp_path_factory.mktemp("data"))
    return Setting(SYNTHETIC, 0, EPOCHS, data)


def trained(name: str, setting: Setting) -> Result:
    [unit] = rows_of.paper_rows()[name].units(setting)
    return compute(unit)


def computed_here(units: Sequence[Unit], _processes: int) -> Iterator[tuple[Unit, Result]]:
    for unit in units:
        yield unit, compute(unit)


# Trainings.


@pytest.mark.parametrize(("name", "alpha"), [("alpha_25", 2), ("alpha_100", STEPS)])
def test_a_search_follows_the_paper(name: str, alpha: int, setting: Setting) -> None:
    """A tenth of the epochs at 0.005; then a round of eight candidates in each epoch."""
    result = trained(name, setting)
    rounds = result["notes"]
    assert [note["epoch"] for note in rounds] == list(range(2, EPOCHS + 1))
    assert {note["steps"] for note in rounds} == {alpha}
    assert rounds[0]["lrs"] == pytest.approx([0.1 * m for m in LR_SETS["alpha_study"]])
    counted = rows_of.counted(result, setting)
    assert (counted.warmup, counted.main) == (STEPS, SEARCHES * STEPS)
    assert counted.lost == SEARCHES * 7 * alpha
    assert counted.searches == SEARCHES


def test_mix_goes_through_the_papers_sets(setting: Setting) -> None:
    """Warm-up, narrow, middle, wide: 4, 15, 10 and 11 of 40 epochs; 1, 4, 2 and 3 of 10."""
    rounds = trained("mix", setting)["notes"]
    bases = [0.1, *(note["next_base_lr"] for note in rounds[:-1])]
    sets = ["narrow"] * 4 + ["middle"] * 2 + ["wide"] * 3
    for base, note, name in zip(bases, rounds, sets, strict=True):
        assert note["lrs"] == pytest.approx([base * m for m in LR_SETS[name]])


def test_the_reference_searches_nothing_and_learns(setting: Setting) -> None:
    result = trained("reference", setting)
    assert result["samples"] == EPOCHS * SYNTHETIC.train
    assert result["search_samples"] == 0
    assert result["accuracy"] > 0.5


def test_local_candidates_train_on_the_share_of_one_of_eight_workers(setting: Setting) -> None:
    [unit] = rows_of.paper_rows()["local"].units(setting)
    job = Job.model_validate(unit.job)
    assert (job.learning_rate.candidate_batch, job.workers.count) == ("local", 8)
    result = compute(unit)
    # Seven of eight candidates lose, each after one step on a share of 4 of 32 samples.
    assert result["search_samples"] == SEARCHES * 7 * 4


def test_the_setting_at_full_size_is_that_of_the_job() -> None:
    section = load_job(JOBS / STPT_FILE).learning_rate.model_dump(exclude_unset=True)
    published = published_stpt(Setting(SYNTHETIC, 0, 40, {}))
    assert published == section | {"alpha": STPT_ALPHA}
    assert section["alpha"] / 2500 == STPT_ALPHA


def test_the_row_of_the_cifar_jobs_scales_their_rate(setting: Setting) -> None:
    files = ("cifar100_resnet50_stpt.yaml", "cifar100_vgg16_stpt.yaml")
    resnet, vgg = (load_job(JOBS / file).learning_rate for file in files)
    assert resnet == vgg
    [unit] = rows_of.paper_rows()["cifar_job"].units(replace(setting, task=BATCH_64))
    assert unit.learning_rate["initial"] == 2 * vgg.initial
    assert unit.learning_rate["candidates"] == "mix"


# Claims.


def row(*accuracies: float) -> dict[str, Any]:
    return {"accuracies": list(accuracies), "highest": list(accuracies)}


@pytest.mark.parametrize(
    ("narrow", "middle", "agrees", "beyond"),
    [
        ([65.0, 66.0], [60.0, 61.0], "yes", True),
        ([60.0, 61.0], [65.0, 66.0], "no", True),
        ([65.0, 61.0], [64.0, 61.0], "undecided", False),
        ([65.0], [60.0], "undecided", None),
    ],
)
def test_only_a_difference_beyond_the_seeds_decides(
    narrow: list[float], middle: list[float], agrees: str, beyond: bool | None
) -> None:
    claims = rows_of.order_claims({"narrow": row(*narrow), "middle": row(*middle)})
    claim = claims["narrow - middle"]
    assert claim["paper_points"] == 1.6
    assert (claim["agrees"], claim["beyond_spread"]) == (agrees, beyond)
    assert claim["points"] == pytest.approx((sum(narrow) - sum(middle)) / len(narrow))


@pytest.mark.parametrize(("wide", "agrees"), [([50.0, 52.0], "yes"), ([40.0, 42.0], "no")])
def test_where_the_paper_has_no_difference_one_disagrees(wide: list[float], agrees: str) -> None:
    rows = {"wide": row(*wide), "reference": row(51.0, 52.0)}
    assert rows_of.order_claims(rows)["wide - reference"]["agrees"] == agrees


@pytest.mark.parametrize(
    ("lowest", "agrees"), [([49.0, 49.1], "yes"), ([47.0, 48.0], "no"), ([45.0, 50.0], "yes")]
)
def test_alpha_matters_little_within_the_papers_range_or_the_seeds(
    lowest: list[float], agrees: str
) -> None:
    rows = {name: row(50.0, 50.1) for name in rows_of.ALPHAS}
    claim = rows_of.alpha_claim({**rows, "alpha_50": row(*lowest)})
    assert (claim["paper_points"], claim["agrees"]) == (1.7, agrees)


def test_the_papers_own_figures_agree_with_it() -> None:
    paper = {name: figure for name, figure in rows_of.PAPER.items() if figure == figure}
    rows = {name: row(figure, figure) for name, figure in paper.items()}
    claims = [*rows_of.order_claims(rows).values(), rows_of.alpha_claim(rows)]
    assert {claim["agrees"] for claim in claims} == {"yes"}
    assert all(claim["points"] == pytest.approx(claim["paper_points"]) for claim in claims)


def test_the_saving_depends_on_the_way_of_counting() -> None:
    """An epoch of 100 iterations, 8 candidates of 8 and of 100."""
    short = rows_of.Counted(warmup=100, main=300, lost=3 * 7 * 8, repeated=0, searches=3)
    full = rows_of.Counted(warmup=100, main=300, lost=3 * 7 * 100, repeated=0, searches=3)
    savings = rows_of.saving_claims([short], [full])
    assert {way: saving["pct"] for way, saving in savings.items()} == {
        "as_published": 87.5,
        "in_turn": 80.5,
        "side_by_side": 0.0,
    }
    assert [saving["agrees"] for saving in savings.values()] == ["yes", "no", "no"]
    # The paper's count does not depend on alpha; and a repeated round counts.
    assert rows_of.saving_claims([full], [full])["as_published"]["pct"] == 87.5
    repeated = rows_of.Counted(
        warmup=100, main=300, lost=3 * 7 * 8 + 8 * 8, repeated=8, searches=3
    )
    savings = rows_of.saving_claims([repeated], [full])
    assert savings["as_published"]["pct"] < 87.5
    assert savings["in_turn"]["pct"] < 80.5


# The command.


def test_the_command_on_synthetic_data(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(comparison_command, "compute_all", computed_here)
    arguments = ["--full", "--tasks", "synthetic", "--epochs", "1", "--seeds", "1"]
    monkeypatch.setattr(sys, "argv", ["stpt.py", *arguments])
    benchmark.main()
    output = capsys.readouterr().out
    result = json.loads(output.splitlines()[-1])["tasks"]["synthetic"]
    assert result["rows"].keys() == rows_of.PAPER.keys() == rows_of.paper_rows().keys()
    fractions = {name: row["search_fraction"] for name, row in result["rows"].items()}
    assert fractions["reference"] == fractions["reference_loss"] == 0
    # One, two, four and eight of eight iterations; the winner's are no search.
    assert [fractions[name] for name in rows_of.ALPHAS] == [0.875, 1.75, 3.5, 7]
    assert all(row["trainings"] == 1 + fractions[name] for name, row in result["rows"].items())
    assert len(result["claims"]) == len(rows_of.CLAIMS) + 1
    assert result["savings"]["alpha_8"]["as_published"]["pct"] == 87.5
    # An eighth of an epoch: 1 - (1 + 7 / 8) / 8.
    assert result["savings"]["alpha_8"]["in_turn"]["pct"] == pytest.approx(76.562, abs=0.001)
    assert all(f" {row.title} " in output for row in rows_of.paper_rows().values())


def test_real_tasks_need_their_data(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        benchmark._arguments(["--full"])
    assert "--data-root" in capsys.readouterr().err
