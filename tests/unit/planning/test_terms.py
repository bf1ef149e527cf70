from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from raytrain_opt.config.load import dump_job, load_job
from raytrain_opt.errors import JobError
from raytrain_opt.planning.cluster import read_cluster
from raytrain_opt.planning.terms import (
    MeasuredStep,
    Work,
    count_work,
    fit_line,
    measured_steps,
    measured_terms,
    public_terms,
    state_bytes,
)
from raytrain_opt.recording.records import BatchSizeProbeRecord
from tests.support import synthetic_runs
from tests.support.small_jobs import small_job

HERE = Path()

WORK = Work(parameters=10**6, flops=1e9, activation_bytes=1e6, operations=100)


def test_the_work_of_a_linear_layer() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 5))
    work = count_work(model, (3, 2, 2), 5)
    assert work.parameters == 12 * 5 + 5
    # Forward 2 x 12 x 5; backward as much for the weights; the input needs no gradient.
    assert work.flops == 2 * 2 * 12 * 5
    # The input of the layer and the log-probabilities of the loss are kept, not the weights.
    assert 4 * 12 <= work.activation_bytes <= 4 * (12 + 2 * 5) + 8
    assert 0 < work.operations < 30


def test_half_precision_halves_the_traffic_and_uses_the_faster_units() -> None:
    cluster = read_cluster("1x8xV100")
    job = small_job(HERE)
    full = public_terms(job, WORK, cluster)
    half = public_terms(job.model_copy(update={"precision": "fp16"}), WORK, cluster)
    assert job.precision == "auto"  # a V100 has no bf16
    assert full is not None
    assert half is not None
    assert full.sample_s == pytest.approx(1e9 / (0.6 * 15.7e12) + 5e6 / (0.8 * 900e9))
    assert half.sample_s == pytest.approx(1e9 / (0.6 * 125e12) + 2.5e6 / (0.8 * 900e9))
    assert half.sample_bytes == full.sample_bytes / 2
    assert half.update_s == full.update_s > 100 * 10e-6


@pytest.mark.parametrize(("kind", "is_half"), [("P100", False), ("V100", False), ("A100", True)])
def test_auto_is_half_precision_where_a_device_has_bf16(kind: str, is_half: bool) -> None:
    cluster = read_cluster(f"1x8x{kind}")
    auto, half = (
        public_terms(small_job(HERE, precision=precision), WORK, cluster)
        for precision in ("auto", "bf16")
    )
    assert (auto == half) == is_half


def test_cpus_have_no_public_figures() -> None:
    assert public_terms(small_job(HERE), WORK, read_cluster("1x2xCPU")) is None


def test_a_checkpoint_holds_weights_average_and_moments() -> None:
    sgd = small_job(HERE, optimizer="SGD", average=None)
    adam = small_job(HERE, optimizer="AdamW", average={})
    assert state_bytes(sgd, 100) == 4 * 100 * 2
    assert state_bytes(adam, 100) == 4 * 100 * 4


@pytest.mark.parametrize(
    ("points", "line"),
    [
        ([(1, 5.0), (2, 7.0), (4, 11.0)], (3, 2)),
        ([(4, 8.0), (4, 8.0)], (0, 2)),  # one size: in proportion
        ([(1, 1.0), (2, 3.0), (4, 8.0)], (0, 1.28)),  # no negative constant
    ],
)
def test_a_line_through_measurements(points: Any, line: tuple[float, float]) -> None:
    assert fit_line(points) == pytest.approx(line, rel=0.01)


def write_probes(folder: Path, sizes: dict[int, float]) -> str:
    values = dict.fromkeys(BatchSizeProbeRecord.model_fields)
    fixed = {"check": False, "reason": "", "error": "", "timings_s": {}, "utilization_samples": 0}
    lines = [
        BatchSizeProbeRecord.model_validate(
            values
            | fixed
            | {
                "schema_version": 1,
                "probe": number,
                "batch_size": size,
                "status": "ok",
                "steps": 9,
            }
            | {"samples_per_s": size / seconds, "peak_memory_mib": 100 + size}
        )
        for number, (size, seconds) in enumerate(sizes.items(), 1)
    ]
    (folder / "batch_size.jsonl").write_text("".join(f"{x.model_dump_json()}\n" for x in lines))
    (folder / "job.yaml").write_text(
        dump_job(small_job(folder, workers={"count": 1, "threads": 2}))
    )
    return str(folder)


def test_probes_give_the_terms_of_time_and_memory(tmp_path: Path) -> None:
    run_dir = write_probes(tmp_path, {8: 0.1 + 8e-3, 16: 0.1 + 16e-3, 64: 0.1 + 64e-3})
    terms = measured_terms([run_dir], None, cores=8)
    assert (terms.update_s, terms.sample_s) == pytest.approx((0.1, 1e-3))
    assert (terms.fixed_bytes, terms.sample_bytes) == pytest.approx((100 * 2**20, 2**20))
    assert terms.threads == 2
    assert run_dir in terms.source


def test_a_run_of_several_workers_gives_its_steps_and_the_time_of_a_checkpoint(
    tmp_path: Path,
) -> None:
    alone = write_probes(tmp_path, {8: 0.1})
    run_dir = str(synthetic_runs.write_run(tmp_path / "run"))
    times = [{"samples_per_s": speed, "workers": 2} for speed in (1.0, 40.0, 32.0, 32.0)]
    lines = [synthetic_runs.epoch_line(n, **values) for n, values in enumerate(times, 1)]
    synthetic_runs.write_lines(tmp_path / "run" / "epochs.jsonl", lines)
    span = synthetic_runs.span_lines(1)[0] | {"process": "driver", "command": "checkpoint"}
    spans = [span | {"duration_s": seconds} for seconds in (0.5, 0.7, 0.9)]
    synthetic_runs.write_lines(tmp_path / "run" / "timeline.jsonl", spans)
    # The first epoch, which also makes connections, does not count.
    batch = load_job(f"{run_dir}/job.yaml").global_batch_size
    assert measured_steps([alone, run_dir]) == [MeasuredStep(2, batch, batch / 32)]
    terms = measured_terms([alone, run_dir], None, cores=2)
    assert (terms.compute_s(8), terms.checkpoint_s) == pytest.approx((0.1, 0.7))


def write_epochs(folder: Path, workers: int, speeds: list[float]) -> str:
    synthetic_runs.write_run(folder)
    lines = [
        synthetic_runs.epoch_line(n, samples_per_s=speed, workers=workers)
        for n, speed in enumerate(speeds, 1)
    ]
    synthetic_runs.write_lines(folder / "epochs.jsonl", lines)
    (folder / "job.yaml").write_text(dump_job(small_job(folder, workers={"count": workers})))
    return str(folder)


def test_threads_are_those_of_the_runs_that_measured_one_worker(tmp_path: Path) -> None:
    alone, pair = (write_epochs(tmp_path / str(n), n, [50.0] * 3) for n in (1, 2))
    for run_dirs in ([alone, pair], [pair, alone], [alone]):
        assert measured_terms(run_dirs, None, cores=8).threads == 8


def test_epochs_whose_search_trained_all_steps_measure_none(tmp_path: Path) -> None:
    run_dir = write_epochs(tmp_path / "run", 1, [0.0, 0.0, 32.0, 0.0])
    batch = load_job(f"{run_dir}/job.yaml").global_batch_size
    assert measured_steps([run_dir]) == [MeasuredStep(1, batch, batch / 32)]
    assert measured_terms([run_dir], None, cores=1).compute_s(batch) == pytest.approx(batch / 32)


def test_a_run_that_measured_nothing_is_refused(tmp_path: Path) -> None:
    run_dir = write_probes(tmp_path, {})
    with pytest.raises(JobError, match=r"--measured: .*find-batch-size.*one worker"):
        measured_terms([run_dir], None, cores=1)
