"""A training step of ResNet-50 and VGG16 on one GPU: how fast, where the time goes, what helps.

    python -m benchmarks.gpu_train              all cases, below 9 minutes
    python -m benchmarks.gpu_train --quick      two cases, 3 minutes
    ... --only 'resnet50_224:*' '*:compile_graph'            case:variant; or a case alone
    ... --batch-sizes resnet50_224=256 resnet50_224=512

Needs torch, torchvision, pydantic and the repository; no Ray, no network, no data set, no
installed package. Use a GPU that nobody else uses.

Cases (default batch): resnet50_224 (256) and vgg16_224 (128), torchvision's resnet50 and
vgg16_bn with 1,000 classes; resnet50_32 and vgg16_32 (1024), this package's cifar_resnet50
and vgg16_bn with 100. The images are synthetic, uint8, and lie on the GPU: a batch is gathered,
cropped, mirrored and normalized there by the package's own `InMemoryData`, for every variant.

Variants. Loss: cross entropy with label smoothing 0.1. cudnn.benchmark is on for all.
  plain_fp32     torchvision's references/classification step without options: float32
                 (convolutions in TF32), NCHW, SGD with momentum (torch's default: foreach), and
                 loss, top-1 and top-5 read by the CPU (.item()) after every step
  plain_amp      the same with --amp: fp16 autocast and GradScaler. All ratios are to this one
  eager          ours: bf16 autocast, channels_last, SGD fused, sums of loss and hits stay on
                 the GPU, the CPU never waits
  eager_lars     the same with the package's LARS
  eager_fp16     as eager in fp16 with GradScaler (the fused SGD skips an overflow by itself).
                 torch gives fp16's BatchNorm to cuDNN, bf16's to kernels of its own
  compile        as eager, torch.compile over the network: BatchNorm, ReLU and the residual sums
                 become few fused kernels, part of them computed again in the backward pass
  graph          as eager; forward, backward and update are one CUDA graph
  compile_graph  both
  compile_graph_lars  both, with LARS
  autotune_graph only if requested by name: as compile_graph, mode max-autotune-no-cudagraphs;
                 compiles for minutes
With --device cpu, a trial of the script, graphs and compiling are `skipped`; fp16 becomes bf16.

Left out on purpose: bf16 weights with a float32 master. The casts of 25.6 million weights and
gradients move 0.3 GB a step, 0.1 ms of some 40 ms at batch 256.

What the timers cover. A block is a number of consecutive steps that take about --block-s, from
synchronization to synchronization, data included: `ms.step` and `images_per_s`. Within it CUDA
events end each part; the parts add up to the step. `data` ends with the batch on the GPU,
`update` includes the meters; a graph is one part, `graph`, including the copy of the batch into
its input. Blocks of all variants alternate, each round in the opposite order; figures are medians
over the rounds, ratios medians of the ratios within a round. One network in channels_last and
one in NCHW are trained by all their variants in turn, at a rate that leaves them in range.

The last line is one JSON object:
  runs      a list, one per case and batch size:
    case, batch_size, rounds
    gflop_per_image      forward and backward, convolutions and linear layers, 2 per product
    conv_mib_per_image   outputs of the convolutions in 16 bit
    variants  name -> status: ok, out_of_memory, skipped, no_time or failed (then `why`), and if
              ok: images_per_s, images_per_s_all, ratio (to plain_amp, above 1: faster),
              ms {step, data, forward, backward, update | graph}, setup_s (warm-up, cuDNN's
              trials, compiling, capture), loss (of the last step; null: not finite),
              matmul_fraction (achieved flop/s over `matmul_tflop_per_s`), passes (below)
    lars_over_sgd        time of a step with LARS over that with SGD: eager, compile_graph
  matmul_tflop_per_s, copy_tb_per_s   measured here: a bf16 product of 8192 x 8192 matrices, and
              a copy of 2 GiB counting bytes read and written; null without a GPU
  machine, versions, and the settings
Each run's object is printed when it is done. Exit code 1 if a variant failed, 2 without a GPU.

`passes`: how many times all outputs of the convolutions could be read or written in the time of a
step, at the measured copy rate. A convolution with BatchNorm and ReLU needs 14: forward, it is
written, read for the statistics, read and written by the normalization and read by the next
convolution; backward, its gradient is written, the input read for the weights, both read for the
two sums and again for the gradient that is written, and that is read twice. With the residual
sums ResNet-50 needs about 16, which is 13,900 images/s at an H200's 4.8 TB/s.

Reference figures for ResNet-50 at 224 on one H200: 7,950 images/s (MLPerf training v4.0, MXNet,
fp16, whose kernels compute the statistics while a convolution is written and normalize while the
next one reads); about 6,000, plain PyTorch, extrapolated; 13,900, the bandwidth's limit.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from functools import partial
from math import isfinite
from statistics import median
from typing import Any

import torch

from benchmarks.common import machine
from benchmarks.gpu_train_steps import (
    BASE,
    CASES,
    VARIANTS,
    Bench,
    StepTimer,
    Variant,
    synchronize,
    work_of,
)
from raytrain_opt.clock import monotonic_s

QUICK_CASES = ("resnet50_224", "vgg16_32")

LARS_AND_SGD = {"eager": "eager_lars", "compile_graph": "compile_graph_lars"}


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    device = torch.device(args.device)
    torch.backends.cudnn.benchmark = True
    deadline_s = monotonic_s() + args.max_seconds
    runs = []
    # All on one stream that is not the default: the one that graphs are captured on.
    stream = torch.cuda.Stream() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        limits = measured_limits(device)
        free_memory()
        for name, batch_size in chosen_runs(args):
            runs.append(run_case(name, batch_size, device, limits, args, deadline_s))
            print(json.dumps(runs[-1]), flush=True)
            free_memory()
    print(json.dumps({"runs": runs, **limits, **setting(args)}))
    statuses = [result["status"] for run in runs for result in run["variants"].values()]
    return 1 if "failed" in statuses else 0


def run_case(
    name: str,
    batch_size: int,
    device: torch.device,
    limits: dict[str, Any],
    args: argparse.Namespace,
    deadline_s: float,
) -> dict[str, Any]:
    """Measure one case at one batch size and return its JSON object."""
    bench = Bench(CASES[name], batch_size, device)
    runners: dict[str, Runner] = {}
    for variant in chosen_variants(name, args.only):
        runner = Runner(bench, VARIANTS[variant])
        runners[variant] = runner
        runner.prepare(args.block_s, deadline_s)
        say(f"{name} x {batch_size}: {variant} {runner.status} {runner.why}")
    rounds = measure(runners, args.rounds, deadline_s)
    work = work_of(CASES[name])
    report = {key: r.report(runners[BASE], work, limits) for key, r in runners.items()}
    ratios = {
        sgd: median_ratio(runners[lars], runners[sgd])
        for sgd, lars in LARS_AND_SGD.items()
        if {sgd, lars} <= runners.keys()
    }
    return {
        "case": name,
        "batch_size": batch_size,
        "rounds": rounds,
        **work,
        "variants": report,
        "lars_over_sgd": ratios,
    }


class Runner:
    """A variant of a case: prepared, measured, reported."""

    def __init__(self, bench: Bench, variant: Variant) -> None:
        self.bench, self.variant = bench, variant
        self.status, self.why = "ok", ""
        self.blocks: list[dict[str, float]] = []
        self._run_block: Callable[[], dict[str, float]] = dict
        self._setup_s, self._loss = 0.0, 0.0

    def prepare(self, block_s: float, deadline_s: float) -> None:
        """Warm up and determine the number of steps of a block."""
        if self.variant.needs_gpu and self.bench.device.type != "cuda":
            self.status, self.why = "skipped", "CUDA graphs and compiling are for a GPU"
        elif monotonic_s() > deadline_s:
            self.status, self.why = "no_time", "--max-seconds had passed"
        else:
            self._attempt(partial(self._warm_up, block_s))

    def measure(self) -> None:
        """Measure one block, unless the variant was skipped or has failed."""
        if self.status == "ok":
            self._attempt(lambda: self.blocks.append(self._run_block()))

    def report(
        self, base: Runner, work: dict[str, float], limits: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the variant's entry of `variants` (see the module's docstring)."""
        if self.status != "ok":
            return {"status": self.status, "why": self.why}
        size, all_ms = self.bench.batch_size, [block["step"] for block in self.blocks]
        return {
            "status": "ok",
            "images_per_s": round(1000 * size / median(all_ms), 1),
            "images_per_s_all": [round(1000 * size / ms, 1) for ms in all_ms],
            "ratio": median_ratio(base, self),
            "ms": {key: round(median(b[key] for b in self.blocks), 3) for key in self.blocks[0]},
            "setup_s": round(self._setup_s, 1),
            "loss": round(self._loss, 3) if isfinite(self._loss) else None,
            **limit_fractions(size / median(all_ms), work, limits),
        }

    def _warm_up(self, block_s: float) -> None:
        started_s = monotonic_s()
        step = self.bench.step(self.variant)
        synchronize(self.bench.device)
        self._setup_s = monotonic_s() - started_s
        trial = self.bench.block(step, self.variant, 2)
        steps = max(2, round(1000 * block_s / trial["step"]))

        def run_block() -> dict[str, float]:
            ms = self.bench.block(step, self.variant, steps)
            self._loss = step.loss.item()
            return ms

        self._run_block = run_block

    def _attempt(self, work: Callable[[], None]) -> None:
        """Do `work`; a variant that fails must not cost the others' figures."""
        try:
            work()
        except torch.OutOfMemoryError as error:
            self.status, self.why = "out_of_memory", str(error).splitlines()[0]
        except RuntimeError as error:
            self.status, self.why = "failed", f"{type(error).__name__}: {error}"[:1000]
        if self.status != "ok":
            # Not in the handlers: while an exception is handled, its frames hold the tensors.
            self._run_block = dict
            free_memory(compiled=False)


def measure(runners: dict[str, Runner], rounds: int, deadline_s: float) -> int:
    """Measure a block of every variant per round; return the rounds done in time, at least one."""
    for done in range(rounds):
        if done and monotonic_s() > deadline_s:
            return done
        for name in list(runners)[:: -1 if done % 2 else 1]:
            runners[name].measure()
    return rounds


def median_ratio(upper: Runner, lower: Runner) -> float | None:
    """Return the median over the rounds of the ratio of step times."""
    if {upper.status, lower.status} != {"ok"}:
        return None
    pairs = zip(upper.blocks, lower.blocks, strict=True)
    return round(median(u["step"] / below["step"] for u, below in pairs), 4)


def limit_fractions(
    images_per_ms: float, work: dict[str, float], limits: dict[str, Any]
) -> dict[str, float]:
    """Return `matmul_fraction` and `passes`; nothing where the limits were not measured."""
    if limits["matmul_tflop_per_s"] is None:
        return {}
    tflop_per_s = work["gflop_per_image"] * images_per_ms
    bytes_per_image = 1e9 * limits["copy_tb_per_s"] / images_per_ms
    return {
        "matmul_fraction": round(tflop_per_s / limits["matmul_tflop_per_s"], 4),
        "passes": round(bytes_per_image / (work["conv_mib_per_image"] * 2**20), 1),
    }


def measured_limits(device: torch.device) -> dict[str, float | None]:
    """Measure the GPU's limits (see the module's docstring)."""
    if device.type != "cuda":
        return {"matmul_tflop_per_s": None, "copy_tb_per_s": None}
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    product_ms = median_ms(partial(torch.mm, a, b, out=torch.empty_like(a)))
    source = torch.randint(0, 256, (2**31,), device=device, dtype=torch.uint8)
    copy_ms = median_ms(partial(torch.empty_like(source).copy_, source))
    return {
        "matmul_tflop_per_s": round(2 * 8192**3 / product_ms / 1e9, 1),
        "copy_tb_per_s": round(2 * 2**31 / copy_ms / 1e9, 3),
    }


def median_ms(work: Callable[[], object]) -> float:
    """Return the median milliseconds of 20 executions on the GPU, after 5 to warm up."""
    times = []
    for _ in range(25):
        timer = StepTimer(torch.device("cuda"))
        work()
        timer("work")
        torch.cuda.synchronize()
        times.append(timer.sums_ms()["work"])
    return median(times[5:])


def free_memory(compiled: bool = True) -> None:
    """Free unreferenced memory and, if `compiled`, the compiled networks."""
    if compiled:
        torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()


def say(line: str) -> None:
    print(line, flush=True)


def setting(args: argparse.Namespace) -> dict[str, object]:
    """Return settings, machine and versions for the JSON object."""
    import torchvision

    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
    }
    return {"settings": vars(args), "machine": machine(), "versions": versions}


def chosen_runs(args: argparse.Namespace) -> list[tuple[str, int]]:
    """Return case and batch size of each requested run."""
    on_gpu = args.device.startswith("cuda")
    runs = []
    for name in CASES:
        if not chosen_variants(name, args.only) or (not args.only and name not in args.cases):
            continue
        sizes = [size for case, size in args.batch_sizes if case == name]
        runs += [(name, size) for size in sizes or [CASES[name].batch_size if on_gpu else 2]]
    return runs


def chosen_variants(case: str, only: Sequence[str]) -> list[str]:
    """Return the requested variants in table order, always with the base; none for other cases."""
    if not only:
        return [name for name, variant in VARIANTS.items() if not variant.by_name_only]
    patterns = [pattern if ":" in pattern else f"{pattern}:*" for pattern in only]
    requested = {
        name
        for name, variant in VARIANTS.items()
        for pattern in patterns
        if fnmatch(f"{case}:{name}", pattern)
        and not (variant.by_name_only and pattern.rpartition(":")[2] != name)
    }
    return [name for name in VARIANTS if requested and name in requested | {BASE}]


def case_and_size(text: str) -> tuple[str, int]:
    name, _, size = text.partition("=")
    if name not in CASES or not size.isdecimal() or int(size) < 1:
        raise argparse.ArgumentTypeError(f"CASE=N with a case of {', '.join(CASES)}, not {text!r}")
    return name, int(size)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A training step on one GPU, part by part.")
    parser.add_argument("--only", nargs="+", default=[], metavar="CASE[:VARIANT]")
    parser.add_argument(
        "--batch-sizes", nargs="+", type=case_and_size, default=[], metavar="CASE=N"
    )
    parser.add_argument("--quick", action="store_true", help="fewer cases, rounds and steps")
    parser.add_argument("--rounds", type=int, help="blocks of each variant (5; quick: 3)")
    parser.add_argument("--block-s", type=float, help="seconds of a block (0.6; quick: 0.3)")
    parser.add_argument(
        "--max-seconds", type=float, help="start no variant after these seconds (420; quick: 130)"
    )
    parser.add_argument("--device", default="cuda", help="cpu: a trial with batches of 2")
    args = parser.parse_args(argv)
    rounds, block_s, max_seconds = (3, 0.3, 130.0) if args.quick else (5, 0.6, 420.0)
    args.rounds = args.rounds or rounds
    args.block_s = block_s if args.block_s is None else args.block_s
    args.max_seconds = max_seconds if args.max_seconds is None else args.max_seconds
    args.cases = list(QUICK_CASES if args.quick else CASES)
    if not chosen_runs(args):
        parser.error(f"--only matches nothing; cases {list(CASES)}, variants {list(VARIANTS)}")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.exit(
            2, "gpu_train needs an NVIDIA GPU, and torch sees none (--device cpu: trial)\n"
        )
    return args


if __name__ == "__main__":
    sys.exit(main())
