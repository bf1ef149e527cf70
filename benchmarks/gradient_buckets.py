"""Seconds of a step with the gradients in groups of layers, in one message, in DDP's buckets.

    python -m benchmarks.gradient_buckets [--ranks 2 4] [--repeats 5]

ResNet-50 (102 MB of gradients) on images of 64x64, one thread per process, DDP over gloo with the
plans of `parallel.gradient_buckets`: `default` (torch's own), `growing` (groups of complete
layers, Yamazaki et al. 2019), `single` (one message after the backward pass). Links:

memory       this machine's own: processes of one machine
10 Gbit/s,   **simulated**: gloo exchanges the gradients, then the message waits until a link of
1 Gbit/s     this speed would have carried it in a ring, with LATENCY_S per message; one message at
             a time, while the backward pass goes on

Computing is real, so with more processes than cores it takes longer, and hides more of the
exchange. A repetition takes the plans in turns on each link; `over_default` is the median over
the repetitions of a plan's step time over that of `default` on the same link, with the lowest and
highest. A step's time is the median of `--steps` steps, of the slowest process. The last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torchvision
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import machine
from raytrain_opt.clock import monotonic_s
from raytrain_opt.recording.recorder import versions
from raytrain_opt.train.data_parallel import WARMUP_STEPS
from raytrain_opt.train.gradient_buckets import BackwardOrder, BucketPlan, plan_buckets

PLANS = ("default", "growing", "single")
LATENCY_S = 2e-4
# Gbit/s; None: no simulated link.
LINKS: dict[str, float | None] = {"memory": None, "10 Gbit/s": 10.0, "1 Gbit/s": 1.0}
# Seconds of a step by plan and link, a value per repetition.
Times = dict[tuple[str, str], list[float]]


@dataclass(frozen=True)
class Setting:
    """What each process computes; `network` is a function of torchvision.models."""

    network: str
    repeats: int
    steps: int
    batch_size: int
    image_size: int


class SlowLink:
    """Exchanges the buckets of DDP one after another, as slowly as a link of this speed."""

    def __init__(self, gbit_per_s: float) -> None:
        self._thread, ranks = ThreadPoolExecutor(1), dist.get_world_size()
        # A ring sends each byte 2 (n - 1) / n times over every link.
        self._s_per_byte = 2 * (ranks - 1) / ranks * 8 / (gbit_per_s * 1e9)

    def exchange(self, _, bucket):  # type: ignore[no-untyped-def]  # DDP checks types
        """Average a bucket; this is a communication hook of DDP."""
        averaged: Future[Tensor] = Future()
        self._thread.submit(self._exchange, bucket.buffer(), averaged)
        return averaged

    def _exchange(self, gradients: Tensor, averaged: Future[Tensor]) -> None:
        started_s = monotonic_s()
        try:
            dist.all_reduce(gradients)
        except RuntimeError as error:  # another process ended; DDP raises it
            averaged.set_exception(error)  # type: ignore[arg-type]  # torch's stub asks for Tensor
            return
        gradients /= dist.get_world_size()
        arrival_s = started_s + LATENCY_S + gradients.nbytes * self._s_per_byte
        time.sleep(max(0.0, arrival_s - monotonic_s()))
        averaged.set_result(gradients)


def main() -> None:
    args = _arguments()
    setting = Setting(args.network, args.repeats, args.steps, args.batch_size, args.image_size)
    result = {}
    for ranks in args.ranks:
        times = measure(ranks, setting)
        result[ranks] = {
            link: {plan: _summary(times, plan, link) for plan in PLANS} for link in LINKS
        }
        print(ranks, result[ranks], flush=True)
    print(json.dumps({"ranks": result, "machine": machine(), "versions": versions()}))


def measure(ranks: int, setting: Setting) -> Times:
    """Return the seconds of a step in so many processes."""
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, context.Pool(ranks) as pool:
        rendezvous = (Path(folder) / "rendezvous").as_uri()
        arguments = [(rank, ranks, rendezvous, setting) for rank in range(ranks)]
        return pool.starmap(_rank, arguments, 1)[0]


def _rank(rank: int, ranks: int, rendezvous: str, setting: Setting) -> Times:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=ranks)
    torch.manual_seed(0)
    model = torchvision.models.get_model(setting.network).to(memory_format=torch.channels_last)
    shape = (setting.batch_size, 3, setting.image_size, setting.image_size)
    x = torch.randn(shape).to(memory_format=torch.channels_last)
    y = torch.randint(1000, (setting.batch_size,))
    order = BackwardOrder(model)
    cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
    gradients = order.gradients(order.finish())
    plans = {plan.name: plan for plan in plan_buckets("auto", gradients)}
    times: Times = {}
    for repeat in range(setting.repeats):
        for link, gbit_per_s in LINKS.items():
            for turn in range(len(PLANS)):
                plan = plans[PLANS[(turn + repeat) % len(PLANS)]]
                seconds = _step_s(model, plan, gbit_per_s, x, y, setting.steps)
                times.setdefault((plan.name, link), []).append(seconds)
    dist.destroy_process_group()
    return times


def _step_s(
    model: nn.Module,
    plan: BucketPlan,
    gbit_per_s: float | None,
    x: Tensor,
    y: Tensor,
    steps: int,
) -> float:
    """Return the median of the seconds of a step of the slowest process."""
    model.zero_grad(set_to_none=True)
    ddp = DistributedDataParallel(
        model, gradient_as_bucket_view=True, init_sync=False, **plan.ddp_arguments()
    )
    if gbit_per_s is not None:
        ddp.register_comm_hook(None, SlowLink(gbit_per_s).exchange)
    marks = []
    for _ in range(WARMUP_STEPS + steps + 1):
        dist.barrier()
        marks.append(monotonic_s())
        cross_entropy(ddp(x), y).backward()  # type: ignore[no-untyped-call]
    own = torch.tensor([after - before for before, after in pairwise(marks[WARMUP_STEPS:])])
    dist.all_reduce(own, op=dist.ReduceOp.MAX)
    seconds: list[float] = own.tolist()
    return median(seconds)


def _summary(times: Times, plan: str, link: str) -> dict[str, object]:
    own, default = times[plan, link], times["default", link]
    ratios = [a / b for a, b in zip(own, default, strict=True)]
    return {
        "step_ms": round(1e3 * median(own), 1),
        "over_default": round(median(ratios), 3),
        "range": [round(min(ratios), 3), round(max(ratios), 3)],
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Gradient buckets on gloo.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--network", default="resnet50", help="of torchvision.models")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="timed, per plan and repetition")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--image-size", type=int, default=64)
    return parser.parse_args()


if __name__ == "__main__":
    main()
