"""`run(job, in_process=True)`: the run of a job in this process, with all its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray
from click.testing import CliRunner

from raytrain_opt.cli import main
from raytrain_opt.config.load import dump_job
from raytrain_opt.config.schema import Job
from raytrain_opt.driver import run
from raytrain_opt.errors import JobError
from tests.support.small_jobs import read_lines, small_job, without_times

TINY = {"model": {"name": "small_cnn", "args": {"width": 2}}, "epochs": 2}
STPT = {"policy": "stpt", "candidates": [1.0, 0.5], "alpha": 3}


def tiny_job(storage: Path, **changes: Any) -> Job:
    return small_job(storage, **{**TINY, "learning_rate": STPT, **changes})


def test_a_run_in_one_process_leaves_the_files_of_a_run_on_ray(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(tiny_job(tmp_path, workers={"count": 2}), in_process=True)
    assert not ray.is_initialized()
    assert "in one process, without Ray" in capsys.readouterr().out
    assert (len(result.lrs), result.summary["search"]["rounds"]) == (
        2 * result.summary["steps_per_epoch"],
        2,
    )
    files = {path.name for path in Path(result.run_dir).iterdir()}
    assert {"job.yaml", "rounds.jsonl", "epochs.jsonl", "timeline.jsonl"} < files
    assert {"result.json", "report.html", "schedule.json", "checkpoints", "tensorboard"} < files
    assert (Path(result.run_dir) / "checkpoints" / "epoch-0002").is_dir()
    assert result.summary["hardware"]["workers"] == result.summary["hardware"]["slots"] == 1


def test_a_run_in_one_process_resumes_bit_for_bit(tmp_path: Path) -> None:
    uninterrupted = run(tiny_job(tmp_path / "a", epochs=3), in_process=True)
    first = run(tiny_job(tmp_path / "b", epochs=2), in_process=True)
    resumed = run(tiny_job(tmp_path / "b", epochs=3), in_process=True, resume=first.run_dir)
    rounds = [without_times(read_lines(r.run_dir, "rounds")) for r in (uninterrupted, resumed)]
    assert rounds[0] == rounds[1]
    assert uninterrupted.lrs == resumed.lrs


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": {"mode": "async"}}, r"parallel\.mode: .*several processes.*--in-process"),
        (
            {"batch_size_search": {"strategy": "throughput_knee"}},
            r"batch_size_search: .*global_batch_size",
        ),
    ],
)
def test_a_job_that_needs_several_processes_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(JobError, match=message):
        run(tiny_job(tmp_path, **changes), in_process=True)
    assert not any(tmp_path.iterdir())


def test_the_command_line_has_the_option(tmp_path: Path) -> None:
    job_file = tmp_path / "job.yaml"
    job_file.write_text(dump_job(tiny_job(tmp_path / "runs", epochs=1)))
    result = CliRunner().invoke(main, ["run", "--in-process", str(job_file)])
    assert result.exit_code == 0, result.output
    assert len(list((tmp_path / "runs").iterdir())) == 1
