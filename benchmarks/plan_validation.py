"""Predictions of `raytrain-opt plan` against measurements here, and against published figures.

    python -m benchmarks.plan_validation [--published] [--repetitions 2]

Local: for each job, one process trains with a quarter, a half and twice the job's batch, which
measures the terms, two train with half of it, which tells how fast busy cores compute, and two
exchange a number and 32 MiB, as `doctor` does. From these alone the plan predicts the seconds of
a step with 1, 2 and 4 workers and the job's own batch. These are measured with the product's
learner in so many processes without Ray, one thread each, joined by gloo; synthetic images; the
median over blocks of steps, of all repetitions in turn. Two cores are shared by 4 workers, and by
anything else that runs: `load` is the mean load while a job was measured. Rows with clock cpu
compare CPU seconds instead, those of all processes over the cores: other programs hardly change
them, but they do not include waiting.

Published: ResNet-50 on ImageNet from public figures of devices and networks alone. No constant of
the model was fitted to these rows; docs/planning.md says where each comes from. Sources:

    mlperf   logs of MLPerf Training v3.0 (github.com/mlcommons/training_results_v3.0), result_0 of
             NVIDIA on 1, 8, 64 and 96 DGX H100, and of NVIDIA and CoreWeave on 448 HGX H100: from
             run_start to run_stop, epochs and batch as logged, evaluated every 4 epochs
    honda    Honda et al., 2,048 V100 of ABCI: 1.73 M images/s; 74.7 s, with initialization. A rack
             of 34 nodes shares 2,400 Gbit/s to other racks: 8.8 GB/s a node
    goyal    Goyal et al., arXiv 1706.02677: 256 P100, 90 epochs in one hour; 90 % efficiency from
             8 to 256; nodes of 8 with 50 Gbit/s
    table    Table 2 of Honda et al.: He et al. on 8 P100, Akiba et al. on 1,024 P100 and Mikami
             et al. on 3,456 V100
    of he    with the step of He et al. on one node as the measured term, instead of public figures

`median_error_published` is the median over all rows; `median_error_named` over the first six: 8,
64 and 3,584 H100, both of Honda et al., and Goyal's hour, from public figures. The last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.common import machine, synthetic_images
from raytrain_opt import Job
from raytrain_opt.commands.doctor.exchange import ExchangeTimes
from raytrain_opt.data import load_shared_data
from raytrain_opt.data.base import DataInfo
from raytrain_opt.models import build_model
from raytrain_opt.planning.cluster import ClusterSection
from raytrain_opt.planning.prediction import Planner
from raytrain_opt.planning.terms import MeasuredStep, Terms, count_work, fit_line, public_terms
from raytrain_opt.recording.recorder import versions
from raytrain_opt.train.data_parallel import Parallel, distribute
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.learner_config import LearnerConfig
from raytrain_opt.train.micro_batches import MicroBatches

IMAGENET = DataInfo(1000, (3, 224, 224), 1281167, 1281167, 0, 50000)
WORKERS = (1, 2, 4)
SHAPE, CLASSES = (32, 32, 3), 10
NETWORKS = "benchmarks.comparison_networks:"
# Seconds of a timed block of steps, and blocks of a training.
BLOCK_S, BLOCKS = 0.7, 3
CORES = len(os.sched_getaffinity(0))
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["benchmarks.plan_validation", "torch._dynamo"])


class LocalJob(NamedTuple):
    """A job with steps of 20 to 300 ms on one core."""

    name: str
    model: str
    arguments: dict[str, Any]
    batch: int
    samples: int = 8192


JOBS = (
    LocalJob("resnet8, width 8", "resnet8", {"width": 8}, 128),
    LocalJob("resnet8, width 16", "resnet8", {"width": 16}, 128),
    LocalJob("resnet8, width 32", "resnet8", {"width": 32}, 64),
    LocalJob("small_cnn", "small_cnn", {}, 256),
    LocalJob("vgg without norm", NETWORKS + "vgg_without_norm", {"width": 16}, 128),
    LocalJob("mlp", NETWORKS + "mlp", {"width": 512}, 512),
    LocalJob("transformer", NETWORKS + "vision_transformer", {"width": 64, "patch": 4}, 128),
)


def imagenet_job(batch: int, epochs: int, precision: str, every: int = 1) -> Job:
    return Job.model_validate(
        {
            "model": "resnet50",
            "data": {"name": "image_folder", "root": "imagenet"},
            "epochs": epochs,
            "global_batch_size": batch,
            "precision": precision,
            "optimizer": "LARS",
            "learning_rate": {"policy": "schedule", "shape": "constant", "initial": 1.0},
            "evaluate": {"every_epochs": every},
        }
    )


def imagenet_planner(
    cluster: dict[str, Any], batch: int, epochs: int, precision: str, every: int = 1
) -> Planner:
    job, section = imagenet_job(batch, epochs, precision, every), ClusterSection(**cluster)
    model = build_model(job.model, num_classes=1000, sample_shape=IMAGENET.sample_shape, seed=0)
    work = count_work(model, IMAGENET.sample_shape, 1000)
    width = 4 if precision == "fp32" else 2
    terms = public_terms(job, work, section)
    assert terms is not None
    return Planner(job, IMAGENET, section, terms, width * work.parameters)


def published_rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    he_s = 29 * 3600 / 90 / (IMAGENET.train_size // 256)

    def add(name: str, unit: str, published: float, predicted: float) -> None:
        error = predicted / published - 1
        rows.append(
            {"row": name, "unit": unit, "published": published, "predicted": predicted}
            | {"error": error}
        )

    def seconds(cluster: dict[str, Any], *job: Any) -> float:
        planner = imagenet_planner(cluster, *job)
        return planner.predict(planner.cluster.size, planner.job.global_batch_size).training_s

    abci = {"nodes": 512, "devices": 4, "kind": "V100", "link_gb_s": 40, "network_gb_s": 7}
    basin = {"devices": 8, "kind": "P100", "network_gb_s": 5}
    mlperf = {
        1: (3200, 35, 816.057),
        8: (3200, 35, 159.917),
        448: (57344, 77, 10.961),
        64: (20480, 50, 31.965),
        96: (32256, 56, 22.212),
    }
    for nodes, (batch, epochs, published_s) in list(mlperf.items())[:3]:
        dgx = {"nodes": nodes, "devices": 8, "kind": "H100"}
        add(f"mlperf {8 * nodes} H100", "s", published_s, seconds(dgx, batch, epochs, "fp16", 4))
    honda = imagenet_planner(abci, 81920, 90, "fp16")
    step_s = honda.step_s(2048, 81920)[0]
    add("honda 2048 V100", "images/s", 1.73e6, 81920 / step_s)
    add("honda 2048 V100", "s", 74.7, seconds(abci, 81920, 90, "fp16"))
    add("goyal 256 P100", "s", 3600, seconds({"nodes": 32, **basin}, 8192, 90, "fp32"))
    goyal = imagenet_planner({"nodes": 32, **basin}, 8192, 90, "fp32")
    efficiency = goyal.step_s(8, 256)[0] / goyal.step_s(256, 8192)[0]
    add("goyal 8 to 256 P100", "efficiency", 0.9, efficiency)
    for nodes, (batch, epochs, published_s) in list(mlperf.items())[3:]:
        dgx = {"nodes": nodes, "devices": 8, "kind": "H100"}
        add(f"mlperf {8 * nodes} H100", "s", published_s, seconds(dgx, batch, epochs, "fp16", 4))
    he = {"nodes": 1, "devices": 8, "kind": "P100"}
    add("table: he 8 P100", "s", 29 * 3600, seconds(he, 256, 90, "fp32"))
    akiba = {"nodes": 128, "devices": 8, "kind": "P100", "network_gb_s": 5}
    add("table: akiba 1024 P100", "s", 900, seconds(akiba, 32768, 90, "fp32"))
    for name, cluster, batch, published_s in (
        ("goyal 256 P100", {"nodes": 32, **basin}, 8192, 3600),
        ("akiba 1024 P100", akiba, 32768, 900),
    ):
        planner = imagenet_planner(cluster, batch, 90, "fp32")
        terms = replace(planner.terms, update_s=0.0, sample_s=he_s / 32)
        measured = replace(planner, terms=terms).predict(planner.cluster.size, batch)
        add(f"{name}, step as of he", "s", published_s, measured.training_s)
    mikami = {"nodes": 864, "devices": 4, "kind": "V100", "link_gb_s": 40, "network_gb_s": 7}
    add("table: mikami 3456 V100", "s", 120, seconds(mikami, 55296, 90, "fp16"))
    return rows


def local_job(files: list[str], job: LocalJob, batch: int) -> Job:
    return Job.model_validate(
        {
            "model": {"name": job.model, "args": job.arguments},
            "data": {"name": "arrays", "train": files, "test": files},
            "epochs": 1,
            "global_batch_size": batch,
            "optimizer": "SGD",
            "learning_rate": {"policy": "schedule", "shape": "constant", "initial": 0.01},
            "parallel": {"noise_scale": False},
            "workers": {"count": 1, "threads": 1},
        }
    )


class Seconds(NamedTuple):
    """Of a step or an exchange: elapsed, and CPU seconds of one process."""

    wall: float
    cpu: float


def timed(run: Callable[[], object], times: int) -> Seconds:
    """Return the seconds of one of so many times."""
    start = time.monotonic(), time.process_time()
    run()
    end = time.monotonic(), time.process_time()
    return Seconds(*((b - a) / times for a, b in zip(start, end, strict=True)))


def open_training(job: Job, rank: int, workers: int) -> Callable[[], Seconds]:
    """Return a function that trains a block of steps on this rank, and returns those of a step."""
    torch.set_num_threads(1)
    shared, cpu = load_shared_data(job.data), torch.device("cpu")
    wrap = distribute if workers > 1 else Parallel
    learner = Learner(LearnerConfig.from_job(job), shared, cpu, wrap)
    own = MicroBatches(range(rank, rank + 1), workers)
    # New buckets come with the second step. Then at least half a second for each block.
    learner.train(1, 0, (0.01,) * 4, own)
    step_s = learner.train(1, 0, (0.01,) * 4, own).duration_s / 4
    steps = torch.tensor([min(job_steps(learner, job), 1 + round(BLOCK_S / step_s))])
    if workers > 1:
        dist.broadcast(steps, 0)
    lrs = (0.01,) * int(steps)
    return lambda: timed(lambda: learner.train(1, 0, lrs, own), len(lrs))


def job_steps(learner: Learner, job: Job) -> int:
    return learner.info.train_size // job.global_batch_size


def rank_main(rank: int, workers: int, jobs: list[Job], folder: str, replies: Any) -> None:
    """Time the jobs one after another, and with two processes also their exchange."""
    result: dict[str, Any] = {}
    if workers > 1:
        meeting = f"file://{folder}/meeting-{workers}-{os.getppid()}"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=workers)
        result["exchange"] = [time_all_reduce(torch.ones(size)) for size in (1, 8 * 2**20)]
    trainings = [open_training(job, rank, workers) for job in jobs]
    # In turn, so that other programs disturb all jobs alike.
    blocks = [[train() for train in trainings] for _ in range(BLOCKS)]
    result["steps"] = list(zip(*blocks, strict=True))
    replies.put(result)
    if workers > 1:
        dist.destroy_process_group()


def time_all_reduce(data: torch.Tensor) -> Seconds:
    durations = [timed(lambda: dist.all_reduce(data), 1) for _ in range(6)][1:]
    return Seconds(*map(median, zip(*durations, strict=True)))


def run_ranks(workers: int, jobs: list[Job]) -> list[dict[str, Any]]:
    """Return what each rank measured."""
    with tempfile.TemporaryDirectory() as folder:
        replies = CONTEXT.Queue()
        ranks = [
            CONTEXT.Process(target=rank_main, args=(rank, workers, jobs, folder, replies))
            for rank in range(workers)
        ]
        for rank in ranks:
            rank.start()
        results = [replies.get(timeout=300) for _ in ranks]
        for rank in ranks:
            rank.join()
    return results


def local_rows(repetitions: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        return [row for job in JOBS for row in job_rows(job, folder, repetitions)]


def job_rows(job: LocalJob, folder: str, repetitions: int) -> list[dict[str, Any]]:
    files = [f"{folder}/{part}.npy" for part in "xy"]
    for file, values in zip(files, synthetic_images(job.samples, SHAPE, CLASSES), strict=True):
        np.save(file, values)
    sizes = (job.batch // 4, job.batch // 2, 2 * job.batch, job.batch)
    jobs = {size: local_job(files, job, size) for size in sizes}
    measured: dict[tuple[int, int], list[Seconds]] = {}
    exchanges: list[list[Seconds]] = []
    loads = []
    for _ in range(repetitions):
        for workers in WORKERS:
            loads.append(os.getloadavg()[0])
            # One worker gives the terms; two with half the batch, how fast busy cores compute.
            own_sizes = {1: sizes, 2: (job.batch // 2, job.batch)}.get(workers, (job.batch,))
            for reply in run_ranks(workers, [jobs[size] for size in own_sizes]):
                exchanges += [reply["exchange"]] if workers == 2 else []
                for size, blocks in zip(own_sizes, reply["steps"], strict=True):
                    measured.setdefault((workers, size), []).extend(blocks)
    rows = []
    for clock in ("wall", "cpu"):
        seconds = {key: [getattr(b, clock) for b in blocks] for key, blocks in measured.items()}
        number_s, tensor_s = (
            median(getattr(exchange, clock) for exchange in column)
            for column in zip(*exchanges, strict=True)
        )
        # CPU seconds of one process become those of a step where processes share cores.
        shares = {n: max(1.0, n / CORES) if clock == "cpu" else 1.0 for n in WORKERS}
        exchange = ExchangeTimes(2, 1, number_s, tensor_s)
        planner = local_planner(job, jobs[job.batch], seconds, exchange)
        half_s = shares[2] * median(seconds[2, job.batch // 2])
        planner = planner.calibrated([MeasuredStep(2, job.batch // 2, half_s)])
        for workers in WORKERS:
            share = shares[workers]
            step_s = share * median(seconds[workers, job.batch])
            predicted_s, exchange_s, _ = planner.step_s(workers, job.batch)
            rows.append(
                {
                    "job": job.name,
                    "clock": clock,
                    "workers": workers,
                    "measured_ms": 1000 * step_s,
                    "spread_ms": [
                        1000 * share * f(seconds[workers, job.batch]) for f in (min, max)
                    ],
                    "predicted_ms": 1000 * predicted_s,
                    "error": predicted_s / step_s - 1,
                    "exchange_ms": 1000 * exchange_s,
                    "busy": planner.terms.busy,
                    "load": mean(loads),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


def local_planner(
    local: LocalJob, job: Job, seconds: dict[tuple[int, int], list[float]], exchange: ExchangeTimes
) -> Planner:
    """Return the planner that knows other batches of one worker, and the exchange of two."""
    points = [
        (size, median(blocks))
        for (workers, size), blocks in seconds.items()
        if workers == 1 and size != local.batch
    ]
    cluster = ClusterSection(
        nodes=1,
        devices=CORES,
        kind="CPU",
        link_gb_s=exchange.gb_s,
        link_latency_us=exchange.latency_us,
    )
    model = build_model(job.model, num_classes=CLASSES, sample_shape=(3, 32, 32), seed=0)
    gradient_bytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    info = DataInfo(CLASSES, (3, 32, 32), local.samples, local.samples, 0, local.samples)
    return Planner(job, info, cluster, Terms(*fit_line(points), 0, 0), gradient_bytes)


def median_error(rows: Sequence[dict[str, Any]]) -> float | None:
    return median(abs(row["error"]) for row in rows) if rows else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--published", action="store_true", help="only the published rows")
    parser.add_argument("--repetitions", type=int, default=2)
    arguments = parser.parse_args()
    published = published_rows()
    for row in published:
        print(json.dumps(row))
    local = [] if arguments.published else local_rows(arguments.repetitions)
    by_clock = {
        clock: [row for row in local if row["clock"] == clock] for clock in ("wall", "cpu")
    }
    result = {
        "median_error_local": median_error(by_clock["wall"]),
        "median_error_local_cpu": median_error(by_clock["cpu"]),
        "median_error_published": median_error(published),
        "median_error_named": median_error(published[:6]),
        "local": local,
        "published": published,
        "machine": machine(),
        "versions": versions(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
